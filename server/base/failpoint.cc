#include "server/base/failpoint.h"

#include <signal.h>
#include <unistd.h>

#include <optional>

#include "absl/base/attributes.h"
#include "absl/base/thread_annotations.h"
#include "absl/strings/numbers.h"
#include "absl/strings/string_view.h"
#include "absl/strings/strip.h"
#include "absl/synchronization/mutex.h"

#include "server/base/log.h"

namespace ballast {
namespace {

struct Armed {
  std::string name;
  int visit = 1;  // at which something happens; 0: at each
  enum class Action { kKill, kStop, kSkip } action = Action::kKill;
  int visits = 0;
};
ABSL_CONST_INIT absl::Mutex armed_mu(absl::kConstInit);
Armed armed ABSL_GUARDED_BY(armed_mu);

// skips: whether the caller can leave something out, and nothing else. None: nothing happens at this visit.
std::optional<Armed::Action> ActionAt(const char* name, bool skips) {
  absl::MutexLock lock(&armed_mu);
  if (armed.name != name || (armed.action == Armed::Action::kSkip) != skips) return std::nullopt;
  const int visit = ++armed.visits;
  if (armed.visit != 0 && visit != armed.visit) return std::nullopt;
  return armed.action;
}

}  // namespace

void Failpoint(const char* name) {
  const auto action = ActionAt(name, /*skips=*/false);
  if (!action) return;
  // A signal to this thread is taken before the call returns; one to the process may be taken by another thread later.
  action == Armed::Action::kStop ? raise(SIGSTOP) : kill(getpid(), SIGKILL);
}

bool LeftOut(const char* name) { return ActionAt(name, /*skips=*/true).has_value(); }

void ArmFailpoint(const std::string& place) {
  absl::MutexLock lock(&armed_mu);
  armed = {};
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
