// How large a rank's slots are: in a shared segment, or by NCCL. Pure.
//
// The gradient slots are the rank's window (Plan::window_bytes): a gradient that comes over this transport waits in its
// slot until it is summed, so the plan's window counts it already. The weight slots take the place of the rank's send
// buffers, whose memory is not touched then. The plan does not count kMoreWeightSlots, the rounding up to whole slots and
// to the least number of them, and the pipes, together less than 10 chunks and 384 KiB; nor
// small gradients, which come through the pipe and wait beside the slots, at most the rank's credit; nor, after a lost
// stream, the copies of what it brought, at most a window, until that is summed. The segment's memory is reserved
// when it is made; if the system has none, the rank goes over gRPC. Slots that are on_gpu take as much there instead, beyond
// the plan: where the GPU has no room for them they are in the segment. By NCCL they are always there.
#pragma once

#include "proto/shm/segment.h"

#include "server/plan/plan.h"

namespace ballast {

// Some 30 of the largest records that hold a payload; longer ones pass through piece by piece.
inline constexpr uint32_t kPipeBytes = 256 << 10;
// Beside those of SendBuffersOfARank: for the trainer to copy from while as many are on their way to it.
inline constexpr uint32_t kMoreWeightSlots = 4;
// One slot is only for a chunk that sums wait for, so that there is always room for it.
inline constexpr uint32_t kLeastGradientSlots = 4;

ShmShape ShapeOf(const RunSpec& spec, const Plan& plan);
// The same with slots on_gpu, which have room for whole rows, as EncodeWeightsTask wants it.
ShmShape GpuShapeOf(const RunSpec& spec, const Plan& plan);

}  // namespace ballast
