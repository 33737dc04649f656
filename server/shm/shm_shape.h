// How large a rank's shared segment is. Pure.
//
// The gradient slots are the rank's window (Plan::window_bytes): a gradient that comes over this transport waits in its
// slot until it is summed, so the plan's window counts it already. The plan does not count the rounding up to whole
// slots and to the least number of them, the weight slots and the pipes, together less than 14 chunks and 384 KiB; nor
// small gradients, which come through the pipe and wait beside the slots, at most the rank's credit; nor, after a lost
// stream, the copies of what it brought, at most a window, until that is summed. The segment's memory is reserved
// when it is made; if the system has none, the rank goes over gRPC.
#pragma once

#include "proto/shm/segment.h"

#include "server/plan/plan.h"

namespace ballast {

// Some 30 of the largest records that hold a payload; longer ones pass through piece by piece.
inline constexpr uint32_t kPipeBytes = 256 << 10;
// Enough for the trainer to copy some while the next is encoded and the daemon's threads take their turns.
inline constexpr uint32_t kWeightSlots = 8;
// One slot is only for a chunk that sums wait for, so that there is always room for it.
inline constexpr uint32_t kLeastGradientSlots = 4;

ShmShape ShapeOf(const RunSpec& spec, const Plan& plan);

}  // namespace ballast
