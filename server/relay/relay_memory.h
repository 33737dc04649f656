// What relayed runs reserve of the daemon's memory. Thread-safe.
#pragma once

#include <memory>

#include "absl/base/thread_annotations.h"
#include "absl/status/status.h"
#include "absl/synchronization/mutex.h"

#include "server/device/device_pool.h"
#include "server/metrics/metrics.h"
#include "server/plan/plan.h"

namespace ballast {

class RelayMemory {
 public:
  // Both outlive it.
  RelayMemory(DevicePool* devices, Metrics* metrics) : devices_(devices), metrics_(metrics) {}

  // FAILED_PRECONDITION says what is needed, and what is free.
  absl::Status Reserve(const std::string& run_id, const Plan& plan);
  void Release(const Plan& plan);

 private:
  void Show() const;

  DevicePool* const devices_;
  Metrics* const metrics_;
  absl::Mutex mu_;  // from the look at what is free until it is reserved
};

}  // namespace ballast
