#include "server/relay/relay_memory.h"

#include <string>

#include "absl/strings/str_cat.h"

namespace ballast {

absl::Status RelayMemory::Reserve(const std::string& run_id, const Plan& plan) {
  absl::MutexLock lock(&mu_);
  const uint64_t needed = plan.bytes.total(), free = devices_->free_bytes();
  if (needed > free) {
    metrics_->OnAdmissionRejected("memory");
    return absl::FailedPreconditionError(
        absl::StrCat("this relay has no room for run '", run_id, "': its versions take ", needed, " bytes, and ", free,
                     " of memory_limit are free; raise memory_limit, lower relay.readers, or relay fewer runs"));
  }
  devices_->Reserve(plan);
  Show();
  return absl::OkStatus();
}

void RelayMemory::Release(const Plan& plan) {
  absl::MutexLock lock(&mu_);
  devices_->Release(plan);
  Show();
}

void RelayMemory::Show() const {
  for (const DevicePool::State& state : devices_->Read()) {
    metrics_->SetMemory(state.label, state.reserved, state.limit_bytes);
  }
}

}  // namespace ballast
