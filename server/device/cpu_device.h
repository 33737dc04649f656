// The device made of the machine's processors: a dispatcher thread takes a task at a time, or several small ones, from
// the run that has been served the fewest bytes. Those of different tensors stand in one line (task_levels.h), of which
// worker threads share the tiles if they are worth it. Every tile's bits are a function of that tile alone, so they do not
// depend on the number of threads, nor on what else is in the line. On a machine of several NUMA nodes each thread stays
// at one, and memory is spread over all of them, page by page, so that no node's is the bottleneck.
//
// Sums of a gradient that still wait when its update comes are made by the update (gradient_sums.h).
//
// Thread-safe. A step takes no memory, except that a queue may grow to its greatest length, and a few bytes for such sums.
#pragma once

#include <atomic>
#include <memory>
#include <string>
#include <thread>
#include <vector>

#include "absl/base/thread_annotations.h"
#include "absl/functional/function_ref.h"
#include "absl/synchronization/mutex.h"
#include "absl/types/span.h"

#include "server/base/host.h"
#include "server/base/processors.h"
#include "server/device/device.h"
#include "server/device/fair_queue.h"
#include "server/device/task_levels.h"
#include "server/device/worker_team.h"

namespace ballast {

class CpuDevice final : public Device {
 public:
  struct Options {
    uint32_t threads = 0;     // the dispatcher counts; 0: as many as the process may use processors
    std::string remark = {};  // why not a GPU; for the description
  };
  explicit CpuDevice(Options options);
  ~CpuDevice() override;

  absl::StatusOr<DeviceBuffer> Allocate(uint64_t bytes, Place place) override;
  absl::StatusOr<std::unique_ptr<DeviceQueue>> NewQueue(const QueueNeeds& needs) override;
  std::string description() const override;
  std::string label() const override { return "cpu"; }
  uint64_t memory_bytes() const override { return MachineMemoryBytes(); }
  bool on_host() const override { return true; }
  uint64_t allocated_bytes() const override { return allocated_.load(std::memory_order_relaxed); }
  double busy_s() const override;
  absl::StatusOr<std::string> MatrixProducts() override;
  void Watch(Watcher) override {}  // a CPU does not fail alone

 private:
  class Queue;
  // Work on tiles [first, last) of a task; false: a NaN or infinity was met.
  using TileWork = absl::FunctionRef<bool(DeviceTask& task, uint64_t first, uint64_t last)>;

  void Free(std::byte* data, uint64_t bytes) override;
  Queue* NextQueue() ABSL_EXCLUSIVE_LOCKS_REQUIRED(mu_);
  void DispatchLoop();
  void TakeTogether(Queue* queue) ABSL_EXCLUSIVE_LOCKS_REQUIRED(mu_);
  void RunJobs();
  size_t FitInRoom(absl::Span<const uint32_t> places) const;
  void Time(absl::Span<const uint32_t> places, absl::FunctionRef<void()> run);
  void RunTogether(absl::Span<const uint32_t> places);
  void Conclude(absl::Span<const uint32_t> places);
  bool LineUp(absl::Span<const uint32_t> places);
  void MeasureLine();
  // The threads share the tiles of the line; false if any of them met a NaN or infinity.
  bool Share(TileWork work);
  bool WorkOnLine(TileWork work, uint64_t first, uint64_t last);

  WorkerTeam team_;
  const std::string remark_;
  const std::vector<NumaNode> nodes_;
  std::atomic<uint64_t> allocated_ = 0;
  std::atomic<double> busy_since_s_ = 0;

  absl::Mutex mu_;  // the queues
  std::vector<Queue*> queues_ ABSL_GUARDED_BY(mu_);
  uint64_t clock_ ABSL_GUARDED_BY(mu_) = 0;  // as in FairClock
  bool stopping_ ABSL_GUARDED_BY(mu_) = false;

  // The dispatcher's; the team reads the line.
  std::vector<DeviceJob> jobs_;
  std::vector<TaskResult> results_;
  std::vector<uint32_t> order_;  // of the jobs where they are done one by one
  TaskLevels levels_;
  std::vector<kernels::TileStatistics> room_;
  std::vector<DeviceTask*> line_;
  std::vector<uint64_t> line_ends_;  // by task of the line: its tiles and those before it
  uint64_t line_elements_ = 0;       // with what beginning the tasks takes

  std::thread dispatcher_;
};

}  // namespace ballast
