// Where the slots of a rank's payloads are: in the memory of the run's GPU for a trainer that takes them there, if that can be.
#pragma once

#include <memory>

#include "absl/status/statusor.h"
#include "proto/shm/segment.h"

#include "server/device/device_pool.h"
#include "server/run/run.h"

namespace ballast {

// Whether the run's slots may be in the memory of its device. FAILED_PRECONDITION, UNIMPLEMENTED: why not, for people.
absl::Status CheckSlotsMayBeOnGpu(const DevicePool& devices, const Run& run);
// Memory for the slots of such a shape. FAILED_PRECONDITION, RESOURCE_EXHAUSTED, UNIMPLEMENTED: why they are to be in the host's
// memory, for people.
absl::StatusOr<std::unique_ptr<SharedMemory>> ExportSlots(const DevicePool& devices, const Run& run,
                                                          const ShmShape& shape);

}  // namespace ballast
