#include "server/access/access_control.h"

#include <utility>

#include "absl/time/clock.h"

#include "server/base/log.h"
#include "server/base/status_macros.h"

namespace ballast {

absl::StatusOr<std::unique_ptr<AccessControl>> AccessControl::Open(const std::string& file, Metrics* metrics,
                                                                   absl::Duration look_every) {
  std::unique_ptr<AccessControl> control(new AccessControl(file, metrics));
  // Before it is read: what changes meanwhile is read again.
  auto watcher = std::make_unique<FileWatcher>(std::vector{file}, look_every);
  ASSIGN_OR_RETURN(AccessList read, AccessList::Read(file));
  control->list_ = std::make_shared<const AccessList>(std::move(read));
  control->watcher_ = std::move(watcher);
  control->watcher_->Start([self = control.get()] { self->ReadAgain(); });
  return control;
}

absl::StatusOr<std::string> AccessControl::Find(const Caller& caller, Scope scope,
                                                std::optional<absl::string_view> run) const {
  std::shared_ptr<const AccessList> list;
  {
    absl::MutexLock lock(&mu_);
    list = list_;
  }
  return list->Find(caller, scope, run, absl::Now());
}

void AccessControl::ReadAgain() {
  absl::StatusOr<AccessList> read = AccessList::Read(file_);
  if (!watcher_->Steady()) return;
  metrics_->Count("ballast_access_reloads_total", read.ok() ? "success" : "failed");
  if (!read.ok()) {
    return Log(LogLevel::kError, "access_reload", "the new access file is not right; the grants before stay in use",
               {{"err", std::string(read.status().message())}});
  }
  Log(LogLevel::kInfo, "access_reload", "the new access file is in use", {{"grants", uint64_t{read->size()}}});
  absl::MutexLock lock(&mu_);
  list_ = std::make_shared<const AccessList>(*std::move(read));
}

}  // namespace ballast
