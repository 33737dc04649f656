// The device made of one GPU. Weights and state are in its memory. A gradient is written to pinned host memory, which
// has a twin on the GPU; an update copies it there. A dispatcher thread takes tasks from the run that has been served
// the fewest bytes, puts what waits into batches of a few launches (batch_groups.h), and gives copies and kernels to three
// streams, so that the next batch's gradients come in while this one's update runs and the last one's weights go out. A
// second thread, the finisher, waits for the batches in order, runs their completions, and finds the GPU's failures.
// Gradients are summed in pinned memory, by the dispatcher; weights are copied from pinned memory to where they leave
// from, by the finisher, and their checksums computed. Each has a team of threads for it: one thread copies some 10 GB/s, a
// fifth of what a PCIe 5 bus carries. Sums of small tensors do not part the updates between them.
//
// A sum that is on_device is made by the GPU, in the twin; what a rank sent in host memory goes there by way of the staging.
// Weights may go out to shared memory of the GPU. So a trainer whose GPU reaches this one's memory copies nothing through the
// host.
//
// Each queue has kStagings sets of staging, reserved when it is made. A step allocates nothing except what lists of
// tasks grow by, and never waits for the device as a whole.
//
// Thread-safe.
#pragma once

#include <deque>
#include <map>
#include <memory>
#include <string>
#include <thread>
#include <vector>

#include "absl/base/thread_annotations.h"
#include "absl/synchronization/mutex.h"

#include "server/device/device.h"
#include "server/device/fair_queue.h"
#include "server/device/gpu_batch.h"
#include "server/device/gpu_driver.h"
#include "server/device/worker_team.h"

namespace ballast {

class GpuDevice final : public Device {
 public:
  // One batch comes in, one is at work, one goes out; and as many more for large tasks, which a host's threads and wake-ups
  // take longer to hand on than the GPU to do. Small ones wait meanwhile, so that more of them are joined.
  static constexpr int kStagings = 6, kStagingsOfSmall = 3;
  // Weights that go out together, in the largest that a task may want: while another process computes on the GPU, each
  // launch waits for its turn.
  static constexpr uint64_t kPayloadsTogether = 4;
  // As many as it takes to copy faster than the bus carries.
  static constexpr uint32_t kMostThreads = 8;

  // threads: of each of the two teams, the dispatcher and the finisher counting; 0: a quarter of the processors that the
  // process may use, but at most kMostThreads.
  explicit GpuDevice(std::unique_ptr<GpuDriver> gpu, uint32_t threads = 0);
  ~GpuDevice() override;

  absl::StatusOr<DeviceBuffer> Allocate(uint64_t bytes, Place place) override;
  absl::StatusOr<std::unique_ptr<DeviceQueue>> NewQueue(const QueueNeeds& needs) override;
  absl::StatusOr<std::unique_ptr<SharedMemory>> Export(uint64_t bytes) override;
  std::string description() const override { return gpu_->name(); }
  std::string label() const override { return gpu_->label(); }
  uint64_t memory_bytes() const override { return gpu_->memory_bytes(); }
  std::optional<int> cuda_number() const override { return gpu_->number(); }
  bool on_host() const override { return false; }
  uint64_t allocated_bytes() const override { return allocated_.load(std::memory_order_relaxed); }
  uint64_t shared_bytes() const override { return shared_.load(std::memory_order_relaxed); }
  double busy_s() const override;
  absl::StatusOr<std::string> MatrixProducts() override { return gpu_->MatrixProducts(); }
  void Watch(Watcher watcher) override;

 private:
  class Queue;
  class Shared;
  // What was given to the GPU together.
  struct Batch {
    Queue* queue = nullptr;
    GpuStaging* staging = nullptr;
    bool small = false;       // it began with a small task
    uint64_t cost_bytes = 0;  // of its tasks but sums
    std::vector<DeviceJob> jobs = {};
    double given_s = 0;
  };

  void Free(std::byte* data, uint64_t bytes) override;
  absl::StatusOr<DeviceBuffer> AllocateAside(uint64_t bytes);
  std::byte* TwinOf(const void* pinned) const;
  void DispatchLoop();
  void FinishLoop();
  Queue* NextQueue() ABSL_EXCLUSIVE_LOCKS_REQUIRED(mu_);
  Batch NextBatch(Queue* queue) ABSL_EXCLUSIVE_LOCKS_REQUIRED(mu_);
  void RunSums(std::vector<DeviceJob>* jobs);
  void ShareSums();
  // The copies that a staging asks for, to it by the dispatcher's team, from it by the finisher's.
  void CopyIn(const GpuStaging& staging);
  void CopyOut(const GpuStaging& staging);
  void Finish(Batch* batch, double begin_s, double end_s);
  void Fail(const absl::Status& why);

  const std::unique_ptr<GpuDriver> gpu_;
  std::atomic<uint64_t> allocated_ = 0, shared_ = 0;

  struct Pinned {
    std::byte* twin = nullptr;  // none: kAside
    uint64_t bytes = 0;
  };
  mutable absl::Mutex buffers_mu_;
  std::map<const std::byte*, Pinned> pinned_ ABSL_GUARDED_BY(buffers_mu_);

  absl::Mutex watch_mu_;  // held while the watcher is called
  Watcher watcher_ ABSL_GUARDED_BY(watch_mu_);
  absl::Status failure_ ABSL_GUARDED_BY(watch_mu_) = absl::OkStatus();

  mutable absl::Mutex mu_;
  std::vector<Queue*> queues_ ABSL_GUARDED_BY(mu_);
  uint64_t clock_ ABSL_GUARDED_BY(mu_) = 0;  // as in FairClock
  std::deque<Batch> given_ ABSL_GUARDED_BY(mu_);
  bool stopping_ ABSL_GUARDED_BY(mu_) = false;
  bool failed_ ABSL_GUARDED_BY(mu_) = false;

  WorkerTeam adders_;                 // the dispatcher's, like the next
  std::vector<const SumTask*> sums_;  // that the team shares, none into another's place
  uint64_t sum_bytes_ = 0;            // what they cost
  struct SumPart {
    const SumTask* sum;
    uint64_t begin, end;  // elements
  };
  std::vector<SumPart> parts_;  // of those
  std::vector<GpuStaging::HostCopy> arrivals_;
  WorkerTeam copiers_;  // the finisher's, like the next
  std::vector<GpuStaging::HostCopy> copies_;
  std::thread dispatcher_, finisher_;
};

}  // namespace ballast
