// Sums of a gradient that the update makes which reads it, so that it finds them in the nearest cache; where the sum of a part
// is what one rank sent, as it came, it is read where that lies, and nothing is copied. They come with the update's task, or
// wait in the queue before it, where JoinSums finds them.
#pragma once

#include <cstddef>
#include <cstdint>

#include "absl/container/inlined_vector.h"

#include "kernels/registry.h"
#include "server/device/sum_task.h"

namespace ballast {

struct UpdateTask;
struct DeviceJob;
struct FairQueue;

// Of different parts, each of which begins with a tile, in their order.
using GradientSums = absl::InlinedVector<SumTask, 1>;

// Whether the part is one rank's contribution as it came.
inline bool IsAsItCame(const SumTask& sum) {
  return !sum.adds && sum.terms.size() == 1 && sum.terms[0].first == 0 && sum.terms[0].last == sum.elements;
}

// Updates tiles [first, last) by the kernel, which has one pass, and makes the sums that they need.
void UpdateWithSums(const UpdateTask& task, uint64_t first, uint64_t last);
// Makes what the task is to sum of tiles [first, last) of the gradient, where an update reads it later.
void MakeSums(const UpdateTask& task, uint64_t first, uint64_t last);

// Takes sums of the gradient that wait in the queue for the update that is about to go there, as its own: the last of each part, if
// nothing that waits behind it reads or writes that gradient. They are answered just before the update. Every part of the
// gradient has been submitted as a sum by then.
void JoinSums(FairQueue* queue, DeviceJob* update);

}  // namespace ballast
