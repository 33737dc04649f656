// The gradients of a rank that come by NCCL: their messages wait until the bytes are there, and the messages behind them too, so
// that all keep their order.
//
// Receive is called by one thread of the lane's. Queue, Over and what a payload calls: any thread. Memory: what Queue has taken,
// which its caller bounds.
#pragma once

#include <cstdint>
#include <deque>
#include <functional>
#include <memory>
#include <optional>
#include <vector>

#include "absl/base/thread_annotations.h"
#include "absl/status/status.h"
#include "absl/synchronization/mutex.h"
#include "proto/nccl/nccl_link.h"

#include "ballast/v1/trainer.pb.h"
#include "server/device/shared_memory.h"
#include "server/nccl/nccl_slots.h"
#include "server/step/payload.h"

namespace ballast {

class NcclReceiver final : public Payload::Lender, public std::enable_shared_from_this<NcclReceiver> {
 public:
  // A message, with its payload where it came by NCCL; nullptr: the rank says no more.
  using Deliver = std::function<void(v1::TrainRequest* request, Payload payload)>;

  // The slots are `count` of so many bytes from the memory's start.
  NcclReceiver(std::shared_ptr<SharedMemory> memory, uint32_t count, uint64_t slot_bytes)
      : memory_(std::move(memory)), slots_(memory_->data(), count, slot_bytes) {}

  // Takes the message out, if its payload comes by NCCL or others wait before it. False: it is the caller's.
  bool Queue(v1::TrainRequest* request);
  // The rank says no more. False: nothing waits, and the caller tells.
  bool QueueEnd();
  // Receives from the link, and delivers, until Over or an error, which it returns.
  absl::Status Receive(NcclLink* link, const Deliver& deliver);
  // What waits is dropped, and Receive returns; the caller stops the link.
  void Over();
  // Slots that have been given back since this was called last.
  std::vector<uint32_t> TakeReturned();

  void GiveBack(uint32_t slot) override;
  bool on_device() const override { return true; }
  void Read(absl::Span<const std::byte> borrowed, char* to) const override {
    memory_->Read(borrowed.data(), borrowed.size(), to);
  }

 private:
  using Waiting = std::deque<std::optional<v1::TrainRequest>>;  // nullopt: the end
  // All that waits; none: it is over.
  Waiting Await();
  absl::StatusOr<std::vector<NcclLink::Piece>> TakeSlots(const Waiting& waiting);

  const std::shared_ptr<SharedMemory> memory_;
  NcclSlots slots_;
  absl::Mutex mu_;
  Waiting waiting_ ABSL_GUARDED_BY(mu_);
  bool delivering_ ABSL_GUARDED_BY(mu_) = false;  // what waited before
  bool over_ ABSL_GUARDED_BY(mu_) = false;
  std::vector<uint32_t> returned_ ABSL_GUARDED_BY(mu_);
};

}  // namespace ballast
