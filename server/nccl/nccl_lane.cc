#include "server/nccl/nccl_lane.h"

#include <utility>

#include "proto/nccl/nccl_loss.h"

#include "server/base/status_macros.h"

namespace ballast {

NcclLane::NcclLane(Parts parts)
    : parts_(std::move(parts)),
      receiver_(
          std::make_shared<NcclReceiver>(parts_.memory, parts_.shape.gradient_slots, parts_.shape.gradient_slot_bytes)),
      sender_(std::make_unique<NcclSender>(
          parts_.memory, parts_.memory->data() + parts_.shape.gradient_slots * parts_.shape.gradient_slot_bytes,
          parts_.shape.weight_slots, parts_.shape.weight_slot_bytes)) {}

absl::StatusOr<std::shared_ptr<NcclLane>> NcclLane::Open(Parts parts, const v1::NcclIds& ids) {
  std::shared_ptr<NcclLane> lane(new NcclLane(std::move(parts)));
  const auto open = [&](const std::string& id, NcclLink::Side side) {
    return NcclLink::Open(lane->parts_.nccl, lane->parts_.gpu, id, side);
  };
  ASSIGN_OR_RETURN(lane->gradients_, open(ids.gradients(), NcclLink::Side::kReceives));
  ASSIGN_OR_RETURN(lane->weights_, open(ids.weights(), NcclLink::Side::kSends));
  return lane;
}

v1::NcclSlots NcclLane::slots() const {
  v1::NcclSlots slots;
  slots.set_gradient_slots(parts_.shape.gradient_slots);
  slots.set_gradient_slot_bytes(parts_.shape.gradient_slot_bytes);
  slots.set_weight_slot_bytes(parts_.shape.weight_slot_bytes);
  return slots;
}

void NcclLane::Receive() {
  absl::Status status = gradients_->AwaitReady(kNcclConnectS);
  if (status.ok()) status = receiver_->Receive(gradients_.get(), events_.deliver);
  End(status);
}

void NcclLane::Send() {
  absl::Status status = weights_->AwaitReady(kNcclConnectS);
  connected_ = status.ok();
  if (status.ok()) status = sender_->Send(weights_.get(), events_.on_room);
  End(status);
}

void NcclLane::End(const absl::Status& status) {
  if (!status.ok() && !stopped_) events_.on_lost(status);
}

void NcclLane::Stop() {
  stopped_ = true;
  receiver_->Over();
  sender_->Over();
  gradients_->Stop();
  weights_->Stop();
}

}  // namespace ballast
