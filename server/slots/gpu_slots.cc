#include "server/slots/gpu_slots.h"

#include <algorithm>

#include "absl/strings/str_cat.h"

#include "server/base/status_macros.h"

namespace ballast {
namespace {

// Beside what the runs' plans count, and earlier slots have taken.
absl::Status CheckRoom(const DevicePool& devices, size_t device, uint64_t bytes) {
  const DevicePool::State state = devices.Read()[device];
  if (bytes <= state.free_bytes()) return absl::OkStatus();
  return absl::ResourceExhaustedError(absl::StrCat("they take ", bytes, " bytes of ", state.label, ", of which ",
                                                   state.free_bytes(), " of memory_limit are free"));
}

}  // namespace

absl::Status CheckSlotsMayBeOnGpu(const DevicePool& devices, const Run& run) {
  const RunSpec& spec = run.spec();
  if (spec.checkpoints && spec.checkpoints->durability != DurabilityMode::kCheckpoint) {
    return absl::FailedPreconditionError("the run's journal writes gradients from host memory");
  }
  const std::vector<size_t>& where = run.plan().placement.devices;
  if (where.size() != 1) return absl::FailedPreconditionError("the run is on several devices");
  if (!devices.at(where.front())->cuda_number()) {
    return absl::UnimplementedError("the daemon's device is the host's processors");
  }
  return absl::OkStatus();
}

absl::StatusOr<std::unique_ptr<SharedMemory>> ExportSlots(const DevicePool& devices, const Run& run,
                                                          const ShmShape& shape) {
  RETURN_IF_ERROR(CheckSlotsMayBeOnGpu(devices, run));
  const std::vector<size_t>& where = run.plan().placement.devices;
  Device* const device = devices.at(where.front());
  const uint64_t bytes = GpuSlotBytes(shape);
  if (bytes == 0) return absl::FailedPreconditionError("the run has no payload");
  if (!device->on_host()) RETURN_IF_ERROR(CheckRoom(devices, where.front(), bytes));
  return device->Export(bytes);
}

}  // namespace ballast
