#include "server/base/failpoint.h"

#include <signal.h>
#include <unistd.h>

#include <atomic>

#include "absl/strings/numbers.h"
#include "absl/strings/string_view.h"
#include "absl/strings/strip.h"

#include "server/base/log.h"

namespace ballast {
namespace {

struct Armed {
  std::string name;
  int visit = 1;  // at which something happens; 0: at each
  enum class Action { kKill, kStop, kSkip } action = Action::kKill;
};
Armed armed;
std::atomic<int> visits = 0;

bool IsDue(const char* name) {
  if (armed.name != name) return false;
  const int visit = ++visits;
  return armed.visit == 0 || visit == armed.visit;
}

}  // namespace

void Failpoint(const char* name) {
  if (!IsDue(name)) return;
  // A signal to this thread is taken before the call returns; one to the process may be taken by another thread later.
  armed.action == Armed::Action::kStop ? raise(SIGSTOP) : kill(getpid(), SIGKILL);
}

bool LeftOut(const char* name) { return armed.action == Armed::Action::kSkip && IsDue(name); }

void ArmFailpoint(const std::string& place) {
  absl::string_view text = place;
  if (absl::ConsumeSuffix(&text, ":stop")) armed.action = Armed::Action::kStop;
  if (absl::ConsumeSuffix(&text, ":skip")) armed.action = Armed::Action::kSkip;
  const size_t equals = text.find('=');
  armed.name = std::string(text.substr(0, equals));
  if (equals == absl::string_view::npos || absl::SimpleAtoi(text.substr(equals + 1), &armed.visit)) return;
  Log(LogLevel::kError, "config", "TEST_FAILPOINT is no NAME=VISIT[:stop|:skip]; nothing is armed", {{"err", place}});
  armed.name.clear();
}

}  // namespace ballast
