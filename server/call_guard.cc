#include "server/call_guard.h"

#include <utility>

namespace ballast {
void CallGuard::Watch(std::function<void()> look) {
  absl::MutexLock lock(&mu_);
  look_ = std::move(look);
}

void CallGuard::OnCall() {
  if (++open_ % kLookEvery != 0) return;
  absl::MutexLock lock(&mu_);
  if (look_) look_();
}

void CallGuard::Trust(const std::string& peer) {
  absl::MutexLock lock(&mu_);
  if (!look_) return;
  trusted_.push_back(peer);
  look_();
}

std::vector<std::string> CallGuard::TakeTrusted() {
  absl::MutexLock lock(&mu_);
  return std::exchange(trusted_, {});
}

}  // namespace ballast
