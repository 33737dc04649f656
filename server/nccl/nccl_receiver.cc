#include "server/nccl/nccl_receiver.h"

#include <utility>

#include "absl/strings/str_cat.h"

#include "server/base/status_macros.h"

namespace ballast {
namespace {

bool ComesByNccl(const v1::TrainRequest& request) { return request.has_gradient() && request.gradient().has_nccl(); }

}  // namespace

bool NcclReceiver::Queue(v1::TrainRequest* request) {
  absl::MutexLock lock(&mu_);
  if (over_) return true;
  if (!ComesByNccl(*request) && waiting_.empty() && !delivering_) return false;
  waiting_.emplace_back(std::move(*request));
  return true;
}

bool NcclReceiver::QueueEnd() {
  absl::MutexLock lock(&mu_);
  if (over_) return true;
  if (waiting_.empty() && !delivering_) return false;
  waiting_.emplace_back(std::nullopt);
  return true;
}

NcclReceiver::Waiting NcclReceiver::Await() {
  const auto stirred = [this]() ABSL_NO_THREAD_SAFETY_ANALYSIS { return over_ || !waiting_.empty(); };
  absl::MutexLock lock(&mu_);
  delivering_ = false;
  mu_.Await(absl::Condition(&stirred));
  if (over_) return {};
  delivering_ = true;
  return std::exchange(waiting_, {});
}

absl::StatusOr<std::vector<NcclLink::Piece>> NcclReceiver::TakeSlots(const Waiting& waiting) {
  std::vector<NcclLink::Piece> pieces;
  for (const auto& request : waiting) {
    if (!request || !ComesByNccl(*request)) continue;
    const v1::NcclPayload& payload = request->gradient().nccl();
    if (payload.bytes() == 0 || payload.bytes() > slots_.slot_bytes()) {
      return absl::InvalidArgumentError(
          absl::StrCat("a gradient of ", payload.bytes(), " bytes by NCCL, wanted 1 to ", slots_.slot_bytes()));
    }
    if (!slots_.TakeThis(payload.slot())) {
      return absl::InvalidArgumentError(
          absl::StrCat("a gradient by NCCL for slot ", payload.slot(), " of ", slots_.count(), ", which is not free"));
    }
    pieces.push_back({slots_.at(payload.slot()), payload.bytes()});
  }
  return pieces;
}

absl::Status NcclReceiver::Receive(NcclLink* link, const Deliver& deliver) {
  for (Waiting waiting = Await(); !waiting.empty(); waiting = Await()) {
    ASSIGN_OR_RETURN(const auto pieces, TakeSlots(waiting));
    if (!pieces.empty()) RETURN_IF_ERROR(link->Move(pieces));
    for (auto& request : waiting) {
      Payload payload;
      if (request && ComesByNccl(*request)) {
        const v1::NcclPayload& came = request->gradient().nccl();
        payload = Payload(shared_from_this(), came.slot(), {slots_.at(came.slot()), came.bytes()});
      }
      deliver(request ? &*request : nullptr, std::move(payload));
    }
  }
  return absl::OkStatus();
}

void NcclReceiver::Over() {
  absl::MutexLock lock(&mu_);
  over_ = true;
  waiting_.clear();
}

void NcclReceiver::GiveBack(uint32_t slot) {
  slots_.GiveBack(slot);
  absl::MutexLock lock(&mu_);
  if (!over_) returned_.push_back(slot);
}

std::vector<uint32_t> NcclReceiver::TakeReturned() {
  absl::MutexLock lock(&mu_);
  return std::exchange(returned_, {});
}

}  // namespace ballast
