#include "server/slots/slot_shape.h"

#include <algorithm>

namespace ballast {

ShmShape ShapeOf(const RunSpec& spec, const Plan& plan) {
  ShmShape shape{.pipe_bytes = kPipeBytes,
                 .weight_slots = static_cast<uint32_t>(SendBuffersOfARank(spec)) + kMoreWeightSlots,
                 .weight_slot_bytes = plan.send_buffer_bytes};
  for (const TensorSpec& t : spec.tensors) {
    const uint64_t chunk_bytes = std::min(t.elements, spec.chunk_elements) * WireBytes(t.gradient_format);
    shape.gradient_slot_bytes = std::max(shape.gradient_slot_bytes, AlignUp(chunk_bytes));
  }
  // A run of empty tensors has no payload at all.
  const uint64_t slots = plan.window_bytes / std::max(shape.gradient_slot_bytes, kAlignment) + 1;
  shape.gradient_slots = static_cast<uint32_t>(std::max<uint64_t>(slots, kLeastGradientSlots));
  return shape;
}

ShmShape GpuShapeOf(const RunSpec& spec, const Plan& plan) {
  ShmShape shape = ShapeOf(spec, plan);
  shape.on_gpu = 1;
  for (uint64_t* bytes : {&shape.gradient_slot_bytes, &shape.weight_slot_bytes}) {
    if (*bytes == 0) continue;
    *bytes += kernels::kPad * sizeof(float) + kGpuSlotAlignment - 1;
    *bytes -= *bytes % kGpuSlotAlignment;
  }
  return shape;
}

}  // namespace ballast
