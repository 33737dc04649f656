// How large a rank's shared segment is. Pure.
//
// The gradient slots are the rank's window (Plan::window_bytes): a gradient that comes over this lane waits in its slot
// until it is summed, so the plan's window counts it already. Not in the plan, while a rank has a segment: the round up
// to whole slots and to the least number of them, the weight slots and the pipes, together less than 14 chunks; and
// after a lost stream what it brought, at most a window, until that is summed. They are reserved when the segment is
// made; where the system has no memory for it the rank goes over gRPC.
#pragma once

#include "proto/shm/segment.h"

#include "server/plan/plan.h"

namespace ballast {

inline constexpr uint32_t kPipeBytes = 64 << 10;  // some hundred records; longer ones pass through piece by piece
// Enough that the trainer copies some while the next is encoded and the daemon's threads take their turns.
inline constexpr uint32_t kWeightSlots = 8;
// One of them only goes to a chunk that sums wait for, so that there is always room for that.
inline constexpr uint32_t kLeastGradientSlots = 4;

ShmShape ShapeOf(const RunSpec& spec, const Plan& plan);

}  // namespace ballast
