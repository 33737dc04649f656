// The devices that a daemon computes on, the CPU or some GPUs, and what its runs have reserved on each. A failed device
// has no room any more, and what was reserved there is lost.
//
//   ASSIGN_OR_RETURN(auto opened, OpenDevices(config));
//   DevicePool devices(std::move(opened), config.memory_limit);
//   devices.FreeBytes();
//
// Thread-safe.
#pragma once

#include <cstdint>
#include <functional>
#include <memory>
#include <optional>
#include <string>
#include <vector>

#include "absl/base/thread_annotations.h"
#include "absl/status/statusor.h"
#include "absl/synchronization/mutex.h"

#include "server/config/config.h"
#include "server/device/device.h"
#include "server/plan/plan.h"

namespace ballast {

// Opens what config.device names: the CPU; GPUs by number, or all of them, each of which must give the CPU's bits; or
// `auto`: the first GPU, or the CPU if that GPU cannot be used, which the CPU's description explains.
// FAILED_PRECONDITION names what was found.
absl::StatusOr<std::vector<std::unique_ptr<Device>>> OpenDevices(const Config& config);

// What `auto` takes, given the first GPU, or why there is none. Where that is any reason but NOT_FOUND, which a machine without
// a GPU has, the log says it too.
std::unique_ptr<Device> GpuOrCpu(absl::StatusOr<std::unique_ptr<Device>> gpu, const Config& config);

class DevicePool {
 public:
  struct State {
    std::string label;        // "cuda:0"
    std::string description;  // for people
    uint64_t limit_bytes = 0;
    bool on_host = true;  // else snapshots and client_state are not on the device
    PlanBytes reserved = {};
    uint64_t shared_bytes = 0;  // Device::shared_bytes, beyond what plans count
    absl::Status failure = absl::OkStatus();

    uint64_t reserved_bytes() const { return on_host ? reserved.total() : reserved.on_device(); }
    // 0 if the device has failed.
    uint64_t free_bytes() const;
  };

  // limit_bytes: of all runs together on each device; 0: 80 % of its memory.
  DevicePool(std::vector<std::unique_ptr<Device>> devices, uint64_t limit_bytes);

  size_t size() const { return devices_.size(); }
  Device* at(size_t device) const { return devices_[device].get(); }
  std::vector<State> Read() const;
  std::vector<uint64_t> FreeBytes() const;  // by device
  // What snapshots and client_state of runs on GPUs may take on the host: 80 % of its memory. None: the device is the
  // host.
  std::optional<uint64_t> host_limit_bytes() const;
  std::optional<uint64_t> host_free_bytes() const;
  // Sums over the devices that have not failed.
  uint64_t limit_bytes() const;
  uint64_t reserved_bytes() const;
  uint64_t free_bytes() const;
  std::vector<Device*> Of(const Placement& placement) const;  // by shard
  double busy_s() const;            // of the busiest: for how long its task in hand has been running
  std::string description() const;  // one line

  void Reserve(const Plan& plan);
  void Release(const Plan& plan);
  // The device has no room from now on. Returns whether another is left.
  bool Fail(size_t device, const absl::Status& why);

 private:
  template <typename Change>
  void ForShards(const Plan& plan, Change change);

  const std::vector<std::unique_ptr<Device>> devices_;
  mutable absl::Mutex mu_;
  std::vector<State> states_ ABSL_GUARDED_BY(mu_);
};

}  // namespace ballast
