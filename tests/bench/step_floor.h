// What a step over shared memory cannot do without, by threads that do nothing else: each rank copies its gradients into slots,
// with their checksums, one thread checks them there, adds them up, moves the weights and writes them into slots of each rank, and
// the ranks check them and copy them out. No message, no client, no daemon; who waits looks again and again.
#pragma once

#include <cstdint>

namespace ballast::bench {

struct StepShape {
  uint32_t ranks = 1, tensors = 1;
  uint64_t elements = 1;  // of a tensor, in fp32
  uint32_t steps = 1;
};

// Seconds of all `steps`, after one that does not count.
double StepFloorSeconds(const StepShape& shape);

}  // namespace ballast::bench
