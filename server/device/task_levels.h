// Which tasks of a queue may be done at once: they are put into levels, which come one after another, and those of a level
// share no memory that one of them writes:
//
//   - tasks of one tensor keep their order; but weights that go out are only read, and chunks of a gradient that lie apart
//     are summed apart;
//   - tasks of different tensors are independent. Where the memory of their gradients overlaps nevertheless, since a step
//     came to nothing and the next one reuses it, all keep their order;
//   - a load, a copy, a probe, and a task of no tensor come after all before them and before all after them.
//
// Bookkeeping only. Not thread-safe; takes no memory but for the longest list so far.
#pragma once

#include <cstddef>
#include <cstdint>
#include <vector>

#include "absl/types/span.h"

#include "server/device/fair_queue.h"

namespace ballast {

class TaskLevels {
 public:
  void Plan(absl::Span<const DeviceJob> jobs);
  size_t size() const { return ends_.size(); }
  // Places in the list that was planned, ascending.
  absl::Span<const uint32_t> operator[](size_t level) const {
    const size_t begin = level == 0 ? 0 : ends_[level - 1];
    return absl::MakeConstSpan(order_).subspan(begin, ends_[level] - begin);
  }

 private:
  struct Bytes {
    uintptr_t begin = 0, end = 0;
    uint32_t tensor = 0;
  };

  // Levels from `next` on for jobs [begin, end), of which none is alone; the next free one.
  uint32_t PlanTogether(absl::Span<const DeviceJob> jobs, uint32_t begin, uint32_t end, uint32_t next);
  bool Overlap(absl::Span<const DeviceJob> jobs, uint32_t begin, uint32_t end);
  // Of one tensor's jobs, by their places in order.
  void PlanTensor(absl::Span<const DeviceJob> jobs, absl::Span<const uint32_t> places, uint32_t next);
  void Sort();

  std::vector<uint32_t> level_;  // by place
  std::vector<uint32_t> order_;  // places
  std::vector<size_t> ends_;     // by level, in order_
  std::vector<Bytes> gradients_;
};

}  // namespace ballast
