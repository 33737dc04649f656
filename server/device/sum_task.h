// A part of a tensor's gradient, usually a chunk, as the sum of what ranks sent of it: the task, and how a processor
// does it.
#pragma once

#include <cstddef>
#include <cstdint>

#include "absl/container/inlined_vector.h"
#include "absl/types/span.h"

#include "kernels/registry.h"
#include "server/spec/run_spec.h"
#include "server/step/payload.h"

namespace ballast {

// Movable only: the task owns the payloads. The device frees them once they are added, before it answers.
struct SumTask {
  // What one rank sent: elements [first, last) of the part, in the task's format.
  struct Term {
    Payload payload;
    uint64_t first = 0, last = 0;
  };
  std::byte* to = nullptr;  // the part, in Place::kHost
  uint64_t elements = 0;    // of the part
  kernels::WireIndex format = 0;
  // Whether `to` holds fp32, to which the terms are added in their order. Else it holds `format`, and takes one term as
  // it is.
  bool adds = true;
  // The sum begins: what `to` held before is forgotten. An element that one term alone has is then what came, to the
  // bit. One that no term has is -0.0, to which what comes later is added without a trace; without `adds`, 0.
  bool first = false;
  // The sum is in the memory that the device has for `to`, and not in `to`: what reads it says so (UpdateTask::there). Of a
  // device that is not on_host; each term is of the whole part.
  bool on_device = false;
  absl::InlinedVector<Term, 1> terms = {};
};

// What the task writes to.
inline absl::Span<std::byte> PlaceOf(const SumTask& task) {
  return {task.to, task.elements * (task.adds ? sizeof(float) : WireBytes(task.format))};
}

// Does elements [begin, end) of the part, where it and its terms are in host memory. Each element's bits are a function of
// its own terms, so that threads may share a task. Terms are taken side by side, a tile at a time, so that the sum stays in
// the nearest cache.
void RunSum(const SumTask& task, uint64_t begin, uint64_t end);

}  // namespace ballast
