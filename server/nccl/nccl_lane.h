// The payloads of one rank's stream that go by NCCL: a link each way, and slots in the memory of the run's device. One rank's
// lane is nothing to another's: a rank that is lost takes no other's communicator with it.
//
// Tell comes first. Then one thread calls Receive and another Send, each once; the others, and Stop: any thread.
#pragma once

#include <atomic>
#include <functional>
#include <memory>
#include <string>

#include "absl/base/thread_annotations.h"
#include "absl/status/status.h"
#include "absl/synchronization/mutex.h"
#include "proto/gpu/gpu.h"
#include "proto/nccl/nccl.h"
#include "proto/nccl/nccl_link.h"
#include "proto/shm/segment.h"

#include "ballast/v1/nccl.pb.h"
#include "server/device/shared_memory.h"
#include "server/nccl/nccl_receiver.h"
#include "server/nccl/nccl_sender.h"

namespace ballast {

class NcclLane {
 public:
  // What a lane is made of. `shape`: of the slots, in the memory one kind behind the other.
  struct Parts {
    std::shared_ptr<const Nccl> nccl;
    std::shared_ptr<Gpu> gpu;
    std::shared_ptr<SharedMemory> memory;
    ShmShape shape;
  };
  // Called by Receive and Send.
  struct Events {
    NcclReceiver::Deliver deliver;
    std::function<void()> on_room;                     // a slot for weights is free that was not before
    std::function<void(const absl::Status&)> on_lost;  // nothing more comes, or goes
  };

  NcclLane(Parts parts, v1::NcclIds ids);

  void Tell(Events events) { events_ = std::move(events); }
  // Connects, and moves payloads one way, until Stop, or an error, which on_lost gets.
  void Receive();
  void Send();
  void Stop();

  NcclReceiver& receiver() { return *receiver_; }
  NcclSender& sender() { return *sender_; }
  // Whether weights may go by NCCL: the other end is there.
  bool connected() const { return connected_; }
  v1::NcclSlots slots() const;

 private:
  // Makes the link, and waits for the other end.
  absl::Status Connect(const std::string& id, NcclLink::Side side, std::unique_ptr<NcclLink>* link);
  // Ends the link, here: that may wait for NCCL.
  void End(const absl::Status& status, std::unique_ptr<NcclLink>* link);

  const Parts parts_;
  const v1::NcclIds ids_;
  const std::shared_ptr<NcclReceiver> receiver_;
  const std::unique_ptr<NcclSender> sender_;
  Events events_;
  std::atomic<bool> connected_ = false;
  absl::Mutex mu_;
  std::unique_ptr<NcclLink> gradients_, weights_;  // each set, and ended, by its thread, under the lock
  bool stopped_ ABSL_GUARDED_BY(mu_) = false;
};

}  // namespace ballast
