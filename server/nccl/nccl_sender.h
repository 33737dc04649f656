// A rank's weights that go by NCCL: encoded into slots of the device's memory, and sent in the order given.
//
// Send is called by one thread of the lane's; the others: any thread.
#pragma once

#include <atomic>
#include <cstdint>
#include <functional>
#include <memory>
#include <optional>
#include <vector>

#include "absl/base/thread_annotations.h"
#include "absl/status/status.h"
#include "absl/synchronization/mutex.h"
#include "proto/nccl/nccl_link.h"

#include "server/device/shared_memory.h"
#include "server/nccl/nccl_slots.h"

namespace ballast {

class NcclSender {
 public:
  // The slots are `count` of so many bytes, the first at `slots` in the memory.
  NcclSender(std::shared_ptr<SharedMemory> memory, std::byte* slots, uint32_t count, uint64_t slot_bytes)
      : memory_(std::move(memory)), slots_(slots, count, slot_bytes) {}

  const NcclSlots& slots() const { return slots_; }
  // A free slot; none: `on_room` of Send tells when there is one.
  std::optional<uint32_t> Take();
  void PutBack(uint32_t slot) { slots_.GiveBack(slot); }
  // The slot, which was taken, has so many bytes to be sent.
  void Give(uint32_t slot, uint64_t bytes);
  // Sends what is given, until Over or an error, which it returns.
  absl::Status Send(NcclLink* link, const std::function<void()>& on_room);
  // What waits is dropped, and Send returns; the caller stops the link.
  void Over();

 private:
  struct Given {
    uint32_t slot = 0;
    uint64_t bytes = 0;
  };
  // All that is given; none: it is over.
  std::vector<Given> Await();

  const std::shared_ptr<SharedMemory> memory_;  // of the slots
  NcclSlots slots_;
  std::atomic<bool> starved_ = false;  // Take gave none
  absl::Mutex mu_;
  std::vector<Given> given_ ABSL_GUARDED_BY(mu_);
  bool over_ ABSL_GUARDED_BY(mu_) = false;
};

}  // namespace ballast
