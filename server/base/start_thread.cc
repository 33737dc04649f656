#include "server/base/start_thread.h"

#include <system_error>
#include <utility>

#include "absl/strings/str_cat.h"

#include "server/base/failpoint.h"
#include "server/base/log.h"

namespace ballast {

NoThread::NoThread(const std::string& reason)
    : text_(absl::StrCat("the system refused a thread (", reason,
                         "); raise the daemon's limit of processes: ulimit -u, systemd's TasksMax, or the container's "
                         "pids limit")) {}

std::thread StartThread(std::function<void()> run) try {
  if (LeftOut("thread.start")) throw std::system_error(std::make_error_code(std::errc::resource_unavailable_try_again));
  return std::thread(std::move(run));
} catch (const std::system_error& error) {
  const NoThread none(error.code().message());
  Log(LogLevel::kError, "no_thread", "a thread could not be started", {{"err", none.what()}});
  throw none;
}

}  // namespace ballast
