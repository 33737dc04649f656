// How a device is shared among its queues: the queue that has been served the fewest bytes comes next (start-time fair
// queueing). Idleness neither earns credit nor costs any: when an idle queue gets a job, its count of served bytes is
// raised to the device's clock, the count of the queue that was served last. So while two queues have jobs, their
// shares differ by the cost of two jobs at most, or of two batches where a device takes several at once. The devices'
// queues derive from FairQueue; the device's lock guards
// it.
#pragma once

#include <algorithm>
#include <cstdint>
#include <optional>
#include <utility>
#include <vector>

#include "server/base/ring_buffer.h"
#include "server/device/device.h"

namespace ballast {

// Elements that a task works on.
struct Extent {
  uint64_t first = 0, last = 0;
};

// The words of 4 bytes that a copy moves; it reads and writes each once.
inline uint64_t WordsOf(const CopyTask& task) {
  uint64_t bytes = 0;
  for (const CopyTask::Piece& piece : task.pieces) bytes += piece.bytes;
  return (bytes + 3) / 4;
}

inline Extent ExtentOf(const DeviceTask& task) {
  if (const auto* u = std::get_if<UpdateTask>(&task)) return {0, u->update.n};
  if (const auto* m = std::get_if<MeasureTask>(&task)) return {0, m->elements};
  if (const auto* c = std::get_if<CurvatureTask>(&task)) return {0, kernels::SampledElements(c->probe.n)};
  if (const auto* a = std::get_if<AverageTask>(&task)) return {a->first, a->last};
  if (const auto* s = std::get_if<ScaleTask>(&task)) return {0, s->elements};
  if (const auto* s = std::get_if<EncodeWeightsTask>(&task)) return {s->first, s->last};
  if (const auto* c = std::get_if<CopyTask>(&task)) return {0, WordsOf(*c)};
  if (const auto* s = std::get_if<SumTask>(&task)) return {0, s->elements};
  const auto& l = std::get<LoadTask>(task);
  return {l.first, l.last};
}

inline uint64_t SumBytes(const SumTask& sum) { return sum.elements * 4 * (1 + sum.terms.size()); }
// Of those that an update makes, but for what it reads where it lies.
inline uint64_t SumBytes(const UpdateTask& update) {
  if (update.sums == nullptr) return 0;
  uint64_t bytes = 0;
  for (const SumTask& sum : *update.sums) bytes += IsAsItCame(sum) ? 0 : SumBytes(sum);
  return bytes;
}

// Memory a task reads and writes, near enough to share the device fairly.
inline uint64_t CostBytes(const DeviceTask& task) {
  if (const auto* s = std::get_if<SumTask>(&task)) return 4096 + SumBytes(*s);
  const Extent extent = ExtentOf(task);
  uint64_t per_element = 8, of_sum = 0;
  if (const auto* u = std::get_if<UpdateTask>(&task)) {
    for (const kernels::Plane& p : u->kernel->planes) per_element += 2 * (p.bytes / p.per);
    // Some 15 products with a matrix of the shorter side.
    const uint64_t rows = std::max<uint64_t>(u->update.rows, 1);
    if (u->kernel->fit != nullptr) per_element += std::min(rows, u->update.n / rows);
    of_sum = SumBytes(*u);
  }
  return 4096 + (extent.last - extent.first) * per_element + of_sum;
}

// What of its CostBytes a task's TaskResult::seconds are of; 0: it has none.
inline uint64_t TimedBytes(const DeviceTask& task, uint64_t cost_bytes) {
  if (std::holds_alternative<SumTask>(task) || std::holds_alternative<EncodeWeightsTask>(task)) return 0;
  const auto* u = std::get_if<UpdateTask>(&task);
  return cost_bytes - (u != nullptr ? SumBytes(*u) : 0);
}

struct DeviceJob {
  DeviceTask task;
  DeviceQueue::Completion done;
  uint64_t cost_bytes = 0;
  std::optional<uint32_t> tensor = {};
  uint64_t timed_bytes = 0;  // of a processor's job: TimedBytes
};

// A device's clock: the largest served_bytes at which one of its queues was served.
using FairClock = uint64_t;

struct FairQueue {
  // What costs so much is not worth waiting for Wake: one job; all that wait.
  static constexpr uint64_t kLargeBytes = 32 << 10, kWakeBytes = 256 << 10;

  RingBuffer<DeviceJob> jobs = {};
  uint64_t served_bytes = 0;
  uint64_t waiting_bytes = 0;  // what the jobs cost
  bool woken = false;          // so that they are to be served

  // `idle`: nothing of this queue waits or is at work.
  void Add(DeviceJob job, bool idle, FairClock clock) {
    if (idle) served_bytes = std::max(served_bytes, clock);
    waiting_bytes += job.cost_bytes;
    woken = woken || job.cost_bytes >= kLargeBytes || waiting_bytes >= kWakeBytes;
    jobs.push(std::move(job));
  }
  void Wake() { woken = !jobs.empty(); }
  // Requires a job in the queue.
  DeviceJob Take(FairClock* clock) {
    DeviceJob job = jobs.pop();
    *clock = std::max(*clock, served_bytes);
    served_bytes += job.cost_bytes;
    waiting_bytes -= job.cost_bytes;
    woken = woken && !jobs.empty();
    return job;
  }
  // jobs.back(later), which another job does, so that it is not served.
  DeviceJob TakeLate(size_t later) {
    waiting_bytes -= jobs.back(later).cost_bytes;
    return jobs.take_back(later);
  }
};

// The queue to serve next, of those that have jobs and for which `may` is true (as a rule, that are woken); nullptr: none.
template <typename Queue, typename May>
Queue* NextFairQueue(const std::vector<Queue*>& all, May may) {
  Queue* next = nullptr;
  for (Queue* q : all) {
    if (q->jobs.empty() || !may(*q)) continue;
    if (next == nullptr || q->served_bytes < next->served_bytes) next = q;
  }
  return next;
}

}  // namespace ballast
