// Whether a device gives the CPU's bits. Every kernel of the registry updates a small tensor on the device and on the
// CPU, by fp32 and bf16 gradients, with stochastic rounding and to nearest; before that the gradient is measured, the
// curvature probed, and the update tried dry. Weights, statistics and curvatures must be equal. A daemon does this
// before it trusts a GPU; it takes some tenths of a second.
#pragma once

#include "absl/status/status.h"

#include "server/device/device.h"

namespace ballast {

// DATA_LOSS names the kernel and what differs; UNAVAILABLE: the device did not answer.
absl::Status CheckDevice(Device* device);

}  // namespace ballast
