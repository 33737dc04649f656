#include "server/nccl/nccl_lane.h"

#include <utility>

#include "proto/nccl/nccl_loss.h"

#include "server/base/status_macros.h"

namespace ballast {

NcclLane::NcclLane(Parts parts, v1::NcclIds ids)
    : parts_(std::move(parts)),
      ids_(std::move(ids)),
      receiver_(
          std::make_shared<NcclReceiver>(parts_.memory, parts_.shape.gradient_slots, parts_.shape.gradient_slot_bytes)),
      sender_(std::make_unique<NcclSender>(
          parts_.memory, parts_.memory->data() + parts_.shape.gradient_slots * parts_.shape.gradient_slot_bytes,
          parts_.shape.weight_slots, parts_.shape.weight_slot_bytes)) {}

v1::NcclSlots NcclLane::slots() const {
  v1::NcclSlots slots;
  slots.set_gradient_slots(parts_.shape.gradient_slots);
  slots.set_gradient_slot_bytes(parts_.shape.gradient_slot_bytes);
  slots.set_weight_slot_bytes(parts_.shape.weight_slot_bytes);
  return slots;
}

absl::Status NcclLane::Connect(const std::string& id, NcclLink::Side side, std::unique_ptr<NcclLink>* link) {
  ASSIGN_OR_RETURN(auto opened, NcclLink::Open(parts_.nccl, parts_.gpu, id, side));
  {
    absl::MutexLock lock(&mu_);
    *link = std::move(opened);
    if (stopped_) (*link)->Stop();
  }
  return (*link)->AwaitReady(kNcclConnectS);
}

void NcclLane::Receive() {
  absl::Status status = Connect(ids_.gradients(), NcclLink::Side::kReceives, &gradients_);
  if (status.ok()) status = receiver_->Receive(gradients_.get(), events_.deliver);
  End(status, &gradients_);
}

void NcclLane::Send() {
  absl::Status status = Connect(ids_.weights(), NcclLink::Side::kSends, &weights_);
  connected_ = status.ok();
  if (status.ok()) status = sender_->Send(weights_.get(), events_.on_room);
  End(status, &weights_);
}

void NcclLane::End(const absl::Status& status, std::unique_ptr<NcclLink>* link) {
  std::unique_ptr<NcclLink> over;
  bool tell = false;
  {
    absl::MutexLock lock(&mu_);
    over = std::move(*link);
    tell = !status.ok() && !stopped_;
  }
  if (tell) events_.on_lost(status);
}

void NcclLane::Stop() {
  receiver_->Over();
  sender_->Over();
  absl::MutexLock lock(&mu_);
  stopped_ = true;
  if (gradients_ != nullptr) gradients_->Stop();
  if (weights_ != nullptr) weights_->Stop();
}

}  // namespace ballast
