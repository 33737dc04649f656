// Memory of a GPU that other processes import, by the CUDA driver's virtual memory management (11.2 and later): what
// CudaDriver calls of it.
#pragma once

#include <cstddef>
#include <cstdint>

#include "absl/status/statusor.h"

#include "server/device/gpu_driver.h"

namespace ballast {

// `bytes` are rounded up to what the driver hands out. Of the calling thread's current device, number `device`. The errors are
// AllocateShared's, and name the driver's call.
absl::StatusOr<GpuDriver::Shared> AllocateSharedMemory(int device, uint64_t bytes);
// Nothing that was given to the device uses it any more. Closes the descriptor.
void FreeSharedMemory(const GpuDriver::Shared& shared);

}  // namespace ballast
