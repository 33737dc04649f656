// Where a run's gradients are summed: a buffer for each shard of the plan, in host memory. The step machine cuts it
// into slabs, one for a tensor's gradient from its first chunk until its update has read it. The devices write to it, or, in
// steps that are summed on_device (sum_task.h), to the memory that they have for it.
//
// Strand-confined. The buffers are reserved with the run; nothing is allocated later.
#pragma once

#include <cstddef>
#include <cstdint>
#include <vector>

#include "absl/functional/function_ref.h"

#include "server/device/device.h"
#include "server/plan/plan.h"
#include "server/spec/run_spec.h"
#include "server/step/coverage.h"
#include "server/step/payload.h"
#include "server/step/slab_allocator.h"
#include "server/step/step_machine.h"

namespace ballast {

class GradientPool {
 public:
  // buffers: by shard. Spec and plan outlive the pool.
  GradientPool(const RunSpec* spec, const Plan* plan, std::vector<DeviceBuffer> buffers);

  // Of all sums of the step that opens.
  void SumOnDevice(bool on_device) { on_device_ = on_device; }
  bool on_device() const { return on_device_; }
  // What adds one chunk of the ranks that delivered it, in rank order, on which the bits of the sum depend. `take` gives
  // a rank's payload, and `covers` what the rank contributes to: the payload is of that part of the chunk.
  SumTask TaskOf(const effect::Sum& sum, absl::FunctionRef<Payload(uint32_t rank)> take,
                 absl::FunctionRef<const ChunkSet&(uint32_t rank)> covers);
  // The tensor's gradient.
  std::byte* At(uint32_t tensor, Slab slab) { return buffers_[plan_->placement.shard_of[tensor]].data() + slab.offset; }
  uint64_t bytes() const;  // counted from the live allocations

 private:
  const RunSpec* const spec_;
  const Plan* const plan_;
  std::vector<DeviceBuffer> buffers_;  // by shard
  bool on_device_ = false;
};

}  // namespace ballast
