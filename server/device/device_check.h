// Whether a device gives the CPU's bits: every kernel of the registry updates a small tensor, on the device and on the
// CPU, by fp32 and bf16 gradients, with stochastic rounding and to nearest; measured, probed and tried before, too.
// Weights, statistics and curvatures must be equal. Some tenths of a second. A daemon does it before it trusts a GPU.
#pragma once

#include "absl/status/status.h"

#include "server/device/device.h"

namespace ballast {

// DATA_LOSS names the kernel and what differs; UNAVAILABLE: the device did not answer.
absl::Status CheckDevice(Device* device);

}  // namespace ballast
