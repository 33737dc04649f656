// What a daemon that was told to (key `nccl`) offers trainers on GPUs: to move payloads between their GPUs and its own by NCCL.
//
// Load comes first, if at all; the rest is thread-safe. Its end waits for the lanes' threads, of which each stream has stopped
// its own.
#pragma once

#include <atomic>
#include <functional>
#include <memory>
#include <thread>
#include <vector>

#include "absl/base/thread_annotations.h"
#include "absl/status/status.h"
#include "absl/status/statusor.h"
#include "absl/synchronization/mutex.h"
#include "proto/nccl/nccl.h"

#include "ballast/v1/nccl.pb.h"
#include "server/device/device_pool.h"
#include "server/nccl/nccl_lane.h"
#include "server/run/run.h"

namespace ballast {

class NcclOffer {
 public:
  // `devices` outlives it.
  explicit NcclOffer(const DevicePool* devices) : devices_(devices) {}
  ~NcclOffer();

  // From now on it is offered. FAILED_PRECONDITION, NOT_FOUND: no device is a GPU, or there is no NCCL.
  absl::Status Load();
  // Why a trainer with that version cannot have the run's payloads so; FAILED_PRECONDITION, UNIMPLEMENTED.
  absl::Status Check(int trainers_version, const Run& run) const;
  // The lane of a rank of the run, which is idle until Start. RESOURCE_EXHAUSTED: there is no memory for its slots.
  absl::StatusOr<std::shared_ptr<NcclLane>> Open(const Run& run, const v1::NcclIds& ids) const;
  // Starts the lane's threads. RESOURCE_EXHAUSTED: there are none left; the lane is stopped.
  absl::Status Start(const std::shared_ptr<NcclLane>& lane, NcclLane::Events events);

 private:
  struct Thread {
    std::thread thread;
    std::shared_ptr<std::atomic<bool>> over;
  };
  void Add(std::function<void()> run) ABSL_EXCLUSIVE_LOCKS_REQUIRED(mu_);

  const DevicePool* const devices_;
  std::shared_ptr<const Nccl> nccl_;  // nullptr: not offered
  absl::Mutex mu_;
  std::vector<Thread> threads_ ABSL_GUARDED_BY(mu_);  // also those that are over, until the next starts
};

}  // namespace ballast
