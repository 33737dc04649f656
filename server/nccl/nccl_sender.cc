#include "server/nccl/nccl_sender.h"

#include <utility>

#include "server/base/status_macros.h"

namespace ballast {

std::optional<uint32_t> NcclSender::Take() {
  if (const auto slot = slots_.Take()) return slot;
  starved_ = true;
  return slots_.Take();  // one may have come back before Send could see that
}

void NcclSender::Give(uint32_t slot, uint64_t bytes) {
  absl::MutexLock lock(&mu_);
  given_.push_back({slot, bytes});
}

std::vector<NcclSender::Given> NcclSender::Await() {
  const auto stirred = [this]() ABSL_NO_THREAD_SAFETY_ANALYSIS { return over_ || !given_.empty(); };
  absl::MutexLock lock(&mu_);
  mu_.Await(absl::Condition(&stirred));
  if (over_) return {};
  return std::exchange(given_, {});
}

absl::Status NcclSender::Send(NcclLink* link, const std::function<void()>& on_room) {
  for (auto given = Await(); !given.empty(); given = Await()) {
    std::vector<NcclLink::Piece> pieces;
    for (const Given& one : given) pieces.push_back({slots_.at(one.slot), one.bytes});
    RETURN_IF_ERROR(link->Move(pieces));
    for (const Given& one : given) slots_.GiveBack(one.slot);
    if (starved_.exchange(false)) on_room();
  }
  return absl::OkStatus();
}

void NcclSender::Over() {
  absl::MutexLock lock(&mu_);
  over_ = true;
}

}  // namespace ballast
