// Which tasks of a queue a GPU does as one batch, and which of those one launch does.
//
// The tasks of a batch are in groups, launched in the order of Group. So a task that joins a group is done before those
// of the later groups, though it came behind them: it may, where it writes nothing of theirs. Updates and weights that go
// out, one after the other for each of many small tensors, thus make two launches. A load or a copy is a batch alone. A
// sum may be made before tasks that are ahead of it: none of them reads what it writes. One that writes to where another of
// the batch does must wait for the next; and so must what reads a gradient of the host's there, which is of a later step.
//
// Bookkeeping only: tasks stay where they are. Not thread-safe; takes no memory but for the largest batch so far.
#pragma once

#include <array>
#include <cstddef>
#include <cstdint>
#include <span>
#include <vector>

#include "server/device/device.h"
#include "server/device/memory_range.h"

namespace ballast {

// What a task takes of a staging's room.
struct BatchRoom {
  uint64_t tiles = 0;  // of an UpdateTask or MeasureTask, or sampled tiles of a CurvatureTask
  // Of an EncodeWeightsTask, in whole rows, as kernels/cuda/cuda_kernels.h wants them; of a SumTask, for those of its terms
  // that are in host memory.
  uint64_t payload_bytes = 0;
  uint64_t scales = 0;  // of an EncodeWeightsTask
  uint64_t terms = 0;   // of a SumTask
};
BatchRoom RoomOf(const DeviceTask& task);
// The task if it is a sum that processors make, in host memory; else nullptr.
const SumTask* HostSumOf(const DeviceTask& task);
// What a term of so many elements takes of payload_bytes.
uint64_t RoomOfTerm(uint64_t elements, kernels::WireIndex format);

constexpr uint64_t kPartAlignment = 256;  // of what lies side by side in a staging
constexpr uint64_t AlignPart(uint64_t bytes) { return (bytes + kPartAlignment - 1) / kPartAlignment * kPartAlignment; }

// The rows whose scales a piece needs.
struct Rows {
  uint64_t first = 0, count = 0;
};
Rows RowsOf(const EncodeWeightsTask& task);

class BatchGroups {
 public:
  static constexpr size_t kMostTasks = 256;  // of a group
  static constexpr uint64_t kMostTerms = 1024;
  // SumTasks that are on_device; tasks that read a gradient; AverageTasks; ScaleTasks; EncodeWeightsTasks; one of the rest.
  enum Group { kSums, kGradients, kAverages, kScales, kServes, kAlone };
  static constexpr size_t kGroups = 6;

  explicit BatchGroups(const BatchRoom& capacity) : capacity_(capacity) {}

  void Clear();
  // Of an empty batch always; it has room for any task.
  bool CanJoin(const DeviceTask& task) const;
  void Join(const DeviceTask* task);
  bool empty() const { return size_ == 0; }
  size_t size() const { return size_; }  // tasks
  // In the order in which they joined.
  std::span<const DeviceTask* const> operator[](Group group) const { return groups_[group].tasks; }

 private:
  // Whether a sum of the batch is made there.
  bool IsSummedAt(MemoryRange place) const;

  // Known by where it begins: the first of a tensor's planes, its scales, or what a probe compares with.
  using Memory = std::vector<const void*>;
  struct Tasks {
    std::vector<const DeviceTask*> tasks;
    Memory read, written;
  };
  bool HasRoomFor(const BatchRoom& room) const;

  BatchRoom capacity_, taken_;
  std::array<Tasks, kGroups> groups_;
  MemoryRange summed_;  // around what the sums write, so that few are looked at
  size_t size_ = 0;
};

}  // namespace ballast
