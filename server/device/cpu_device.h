// The device made of the machine's processors: a dispatcher thread takes a task at a time, or several small ones, from
// the run that has been served the fewest bytes, and worker threads share the tiles of a task that is large enough. Every
// tile's bits are a function of that tile alone, so they do not depend on the number of threads.
//
// Thread-safe. A step takes no memory, except that a queue may grow to its greatest length.
#pragma once

#include <atomic>
#include <deque>
#include <memory>
#include <string>
#include <thread>
#include <vector>

#include "absl/base/thread_annotations.h"
#include "absl/functional/function_ref.h"
#include "absl/synchronization/mutex.h"

#include "server/base/host.h"
#include "server/device/device.h"
#include "server/device/fair_queue.h"

namespace ballast {

class CpuDevice final : public Device {
 public:
  struct Options {
    uint32_t threads = 0;     // the dispatcher counts; 0: all processors
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
  void Watch(Watcher) override {}  // a CPU does not fail alone

 private:
  class Queue;
  // Work on tiles [first, last); false: a NaN or infinity was met.
  using TileWork = absl::FunctionRef<bool(uint64_t first, uint64_t last)>;
  // Work while threads share it: grains are taken by counter.
  struct Section {
    const TileWork* work = nullptr;
    uint64_t tiles = 0;
    uint64_t grains = 0;
    uint64_t grain_tiles = 0;
    std::atomic<uint64_t> next = 0;
    std::atomic<bool> finite = true;
  };

  void Free(std::byte* data, uint64_t bytes) override;
  Queue* NextQueue() ABSL_EXCLUSIVE_LOCKS_REQUIRED(mu_);
  void DispatchLoop();
  void TakeTogether(Queue* queue, std::vector<DeviceJob>* jobs) ABSL_EXCLUSIVE_LOCKS_REQUIRED(mu_);
  void WorkerLoop();
  TaskResult RunTask(DeviceTask& task);
  // The threads share the tiles; false if any of them met a NaN or infinity.
  bool Share(uint64_t tiles, TileWork work);
  kernels::Statistics Run(UpdateTask& task);
  kernels::Statistics Run(const MeasureTask& task);
  kernels::Curvature Run(const CurvatureTask& task);
  void WorkOn(Section* section);

  const uint32_t threads_;
  const std::string remark_;
  std::atomic<uint64_t> allocated_ = 0;
  std::atomic<double> busy_since_s_ = 0;

  absl::Mutex mu_;  // the queues
  std::vector<Queue*> queues_ ABSL_GUARDED_BY(mu_);
  uint64_t clock_ ABSL_GUARDED_BY(mu_) = 0;  // as in FairClock
  bool stopping_ ABSL_GUARDED_BY(mu_) = false;

  Section section_;
  absl::Mutex section_mu_;  // who works on section_; never held together with mu_
  uint64_t section_number_ ABSL_GUARDED_BY(section_mu_) = 0;
  uint32_t section_workers_ ABSL_GUARDED_BY(section_mu_) = 0;
  bool workers_stopping_ ABSL_GUARDED_BY(section_mu_) = false;

  std::vector<std::thread> workers_;
  std::thread dispatcher_;
};

}  // namespace ballast
