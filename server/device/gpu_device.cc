#include "server/device/gpu_device.h"

#include <pthread.h>

#include <algorithm>
#include <array>
#include <iterator>
#include <utility>

#include "server/base/clock.h"
#include "server/base/processors.h"
#include "server/base/status_macros.h"

namespace ballast {
namespace {

constexpr size_t kMostJobs = 4 * BatchGroups::kMostTasks;  // of a batch: sums, updates, scales, weights
constexpr uint64_t kLargeTaskBytes = 1 << 20;
// Of each thread: some 100 us, in which the GPU may have nothing to do.
constexpr uint64_t kSumsTogetherBytes = 1 << 20;

uint32_t TeamThreads(uint32_t asked) {
  return asked != 0 ? asked : std::clamp(UsableProcessors() / 4, 1u, GpuDevice::kMostThreads);
}

// How many of the terms from `first` on a task may have, of which those in host memory take at most `capacity`.
size_t TermsTogether(const SumTask& sum, size_t first, uint64_t capacity) {
  const uint64_t room = RoomOfTerm(sum.elements, sum.format);
  size_t next = first;
  for (uint64_t taken = 0; next < sum.terms.size() && next - first < BatchGroups::kMostTerms; ++next) {
    taken += sum.terms[next].payload.on_device() ? 0 : room;
    if (taken > capacity) break;
  }
  return next - first;
}

}  // namespace

// mu_ of the device guards everything here but what Reserve does before the queue is listed.
class GpuDevice::Queue final : public DeviceQueue, public FairQueue {
 public:
  Queue(GpuDevice* device, const QueueNeeds& needs) : device_(device) {
    QueueNeeds together = needs;
    together.payload_bytes = std::max(
        needs.payload_bytes, std::min(kPayloadsTogether * needs.payload_bytes, needs.elements * sizeof(float)));
    together.scales = std::max(needs.scales, std::min(kPayloadsTogether * needs.scales, needs.elements));
    for (auto& staging : stagings) {
      staging = std::make_unique<GpuStaging>(device->gpu_.get(), together,
                                             [device](const void* pinned) { return device->TwinOf(pinned); });
    }
  }
  ~Queue() override {
    WaitIdle();
    absl::MutexLock lock(&device_->mu_);
    if (std::erase(device_->queues_, this) == 0) return;
    for (const auto& s : stagings) device_->allocated_.fetch_sub(s->bytes(), std::memory_order_relaxed);
  }
  absl::Status Reserve() {
    for (const auto& staging : stagings) RETURN_IF_ERROR(staging->Reserve());
    for (const auto& s : stagings) device_->allocated_.fetch_add(s->bytes(), std::memory_order_relaxed);
    absl::MutexLock lock(&device_->mu_);
    device_->queues_.push_back(this);
    return absl::OkStatus();
  }

  void Enqueue(DeviceTask task, Completion done, std::optional<uint32_t>) override {
    if (const auto* copy = std::get_if<CopyTask>(&task); copy != nullptr && copy->saves) {
      return EnqueueSave(*copy, std::move(done));
    }
    if (auto* sum = std::get_if<SumTask>(&task); sum != nullptr) return GiveSum(std::move(*sum), std::move(done));
    if (auto* update = std::get_if<UpdateTask>(&task); update != nullptr && update->sums != nullptr) {
      const std::shared_ptr<GradientSums> sums = std::exchange(update->sums, nullptr);
      for (SumTask& sum : *sums) GiveSum(std::move(sum), [](const TaskResult&) {});
    }
    Give(std::move(task), std::move(done));
  }
  void Wake() override {
    absl::MutexLock lock(&device_->mu_);
    FairQueue::Wake();
  }
  void WaitIdle() override {
    absl::MutexLock lock(&device_->mu_);
    FairQueue::Wake();
    device_->mu_.Await(absl::Condition(this, &Queue::idle));
  }

  // In portions that staging holds; `done` hears the seconds of all.
  void EnqueueSave(const CopyTask& save, Completion done) {
    const uint64_t most = stagings[0]->payload_capacity();
    const auto seconds = std::make_shared<double>(0);
    CopyTask portion{.saves = true};
    uint64_t filled = 0;
    size_t pieces = 0;
    const auto give = [&](Completion then) {
      Give(std::exchange(portion, CopyTask{.saves = true}), std::move(then));
      filled = pieces = 0;
    };
    for (const CopyTask::Piece& piece : save.pieces) {
      for (uint64_t begin = 0; begin < piece.bytes;) {
        if (filled == most) give([seconds](const TaskResult& r) { *seconds += r.seconds; });
        const uint64_t bytes = std::min(piece.bytes - begin, most - filled);
        portion.pieces[pieces++] = {piece.to + begin, piece.from + begin, bytes};
        begin += bytes;
        filled += GpuStaging::RoomOfPiece(bytes);
      }
    }
    give([seconds, done = std::move(done)](TaskResult result) mutable {
      result.seconds += *seconds;
      done(result);
    });
  }

  // For the next job, which there is; none: a batch under way must end before.
  GpuStaging* FreeStaging() const {
    if (next_is_small() && small_under_way >= kStagingsOfSmall) return nullptr;
    for (const auto& staging : stagings) {
      if (!staging->busy) return staging.get();
    }
    return nullptr;
  }

  std::array<std::unique_ptr<GpuStaging>, kStagings> stagings;
  // Of a queue that has jobs.
  bool next_is_small() const { return jobs.front().cost_bytes < kLargeTaskBytes; }
  int under_way = 0, small_under_way = 0;  // batches; of those, that began with a small task
  bool summed = false;                     // as in GpuStaging::Give; the dispatcher's alone

 private:
  bool idle() const { return jobs.empty() && under_way == 0; }
  // One that the GPU makes in portions of terms that a staging holds.
  void GiveSum(SumTask sum, Completion done) {
    size_t first = 0;
    if (sum.on_device) {
      for (size_t count = 0;
           count = TermsTogether(sum, first, stagings[0]->payload_capacity()), first + count < sum.terms.size();
           first += count) {
        SumTask portion{.to = sum.to,
                        .elements = sum.elements,
                        .format = sum.format,
                        .adds = sum.adds,
                        .first = sum.first && first == 0,
                        .on_device = true};
        std::move(&sum.terms[first], &sum.terms[first] + count, std::back_inserter(portion.terms));
        Give(std::move(portion), [](const TaskResult&) {});
      }
    }
    sum.first = sum.first && first == 0;
    sum.terms.erase(sum.terms.begin(), sum.terms.begin() + static_cast<std::ptrdiff_t>(first));
    Give(std::move(sum), std::move(done));
  }
  void Give(DeviceTask task, Completion done) {
    const uint64_t cost_bytes = CostBytes(task);
    absl::MutexLock lock(&device_->mu_);
    if (device_->failed_) return;
    Add({std::move(task), std::move(done), cost_bytes}, idle(), device_->clock_);
  }
  GpuDevice* const device_;
};

GpuDevice::GpuDevice(std::unique_ptr<GpuDriver> gpu, uint32_t threads)
    : gpu_(std::move(gpu)), adders_(TeamThreads(threads), "gpu-adder"), copiers_(TeamThreads(threads), "gpu-copier") {
  dispatcher_ = std::thread([this] { DispatchLoop(); });
  finisher_ = std::thread([this] { FinishLoop(); });
  pthread_setname_np(dispatcher_.native_handle(), "gpu-dispatch");
  pthread_setname_np(finisher_.native_handle(), "gpu-finish");
}

GpuDevice::~GpuDevice() {
  {
    absl::MutexLock lock(&mu_);
    stopping_ = true;
  }
  dispatcher_.join();
  finisher_.join();
}

absl::StatusOr<DeviceBuffer> GpuDevice::Allocate(uint64_t bytes, Place place) {
  if (bytes == 0) return DeviceBuffer();
  if (place == Place::kAside) return AllocateAside(bytes);
  // Room for the last row of a gradient, as kernels/cuda/cuda_kernels.h wants it.
  ASSIGN_OR_RETURN(std::byte* const on_device,
                   gpu_->Allocate(bytes + kernels::kPad * sizeof(float), GpuDriver::Memory::kDevice));
  allocated_.fetch_add(bytes, std::memory_order_relaxed);
  DeviceBuffer buffer(this, on_device, bytes);
  if (place == Place::kDevice) return buffer;
  ASSIGN_OR_RETURN(std::byte* const pinned, gpu_->Allocate(bytes, GpuDriver::Memory::kPinned));
  allocated_.fetch_add(bytes, std::memory_order_relaxed);
  DeviceBuffer pinned_buffer(this, pinned, bytes);
  absl::MutexLock lock(&buffers_mu_);
  pinned_[pinned] = {buffer.Release(), bytes};
  return pinned_buffer;
}

absl::StatusOr<DeviceBuffer> GpuDevice::AllocateAside(uint64_t bytes) {
  ASSIGN_OR_RETURN(std::byte* const pinned, gpu_->Allocate(bytes, GpuDriver::Memory::kPinned));
  allocated_.fetch_add(bytes, std::memory_order_relaxed);
  absl::MutexLock lock(&buffers_mu_);
  pinned_[pinned] = {.twin = nullptr, .bytes = bytes};
  return DeviceBuffer(this, pinned, bytes);
}

void GpuDevice::Free(std::byte* data, uint64_t bytes) {
  allocated_.fetch_sub(bytes, std::memory_order_relaxed);
  std::byte* twin = nullptr;
  bool pinned = false;
  {
    absl::MutexLock lock(&buffers_mu_);
    if (const auto found = pinned_.find(data); found != pinned_.end()) {
      pinned = true;
      twin = found->second.twin;
      pinned_.erase(found);
    }
  }
  gpu_->Free(data, pinned ? GpuDriver::Memory::kPinned : GpuDriver::Memory::kDevice);
  if (twin == nullptr) return;
  allocated_.fetch_sub(bytes, std::memory_order_relaxed);
  gpu_->Free(twin, GpuDriver::Memory::kDevice);
}

std::byte* GpuDevice::TwinOf(const void* pinned) const {
  const std::byte* const at = static_cast<const std::byte*>(pinned);
  absl::MutexLock lock(&buffers_mu_);
  const auto next = pinned_.upper_bound(at);
  if (next == pinned_.begin()) return nullptr;  // the gradient of a tensor without elements
  const auto& [begin, buffer] = *std::prev(next);
  return buffer.twin + (at - begin);
}

absl::StatusOr<std::unique_ptr<DeviceQueue>> GpuDevice::NewQueue(const QueueNeeds& needs) {
  auto queue = std::make_unique<Queue>(this, needs);
  RETURN_IF_ERROR(queue->Reserve());
  return queue;
}

double GpuDevice::busy_s() const {
  absl::MutexLock lock(&mu_);
  return given_.empty() ? 0 : MonotonicSeconds() - given_.front().given_s;
}

GpuDevice::Queue* GpuDevice::NextQueue() {
  return NextFairQueue(queues_, [](const Queue& q) { return q.woken && q.FreeStaging() != nullptr; });
}

// A sum may be made before the GPU's tasks that are ahead of it in the batch: none of them reads what it writes.
GpuDevice::Batch GpuDevice::NextBatch(Queue* queue) {
  Batch batch{.queue = queue, .staging = queue->FreeStaging(), .small = queue->next_is_small()};
  GpuStaging* const staging = batch.staging;
  staging->Begin();
  uint64_t sum_bytes = 0;
  batch.jobs.reserve(std::min(queue->jobs.size(), kMostJobs));  // so that tasks stay where they are
  const auto fits = [&](const DeviceJob& next) {
    if (HostSumOf(next.task) != nullptr) {
      return sum_bytes + next.cost_bytes <= kSumsTogetherBytes * adders_.threads();
    }
    return staging->CanJoin(next.task);
  };
  do {
    const DeviceJob& job = batch.jobs.emplace_back(queue->Take(&clock_));
    if (HostSumOf(job.task) != nullptr) {
      sum_bytes += job.cost_bytes;
    } else {
      staging->Join(&job.task);
      batch.cost_bytes += std::holds_alternative<SumTask>(job.task) ? 0 : job.cost_bytes;
    }
  } while (!queue->jobs.empty() && batch.jobs.size() < kMostJobs && fits(queue->jobs.front()));
  batch.staging->busy = true;
  ++queue->under_way;
  queue->small_under_way += batch.small ? 1 : 0;
  return batch;
}

void GpuDevice::DispatchLoop() {
  const auto ready = [this]() ABSL_EXCLUSIVE_LOCKS_REQUIRED(mu_) { return NextQueue() != nullptr || stopping_; };
  while (true) {
    Batch batch;
    {
      absl::MutexLock lock(&mu_);
      mu_.Await(absl::Condition(&ready));
      Queue* const queue = NextQueue();
      if (queue == nullptr) return;
      batch = NextBatch(queue);
    }
    RunSums(&batch.jobs);
    CopyIn(*batch.staging);
    batch.given_s = MonotonicSeconds();
    batch.staging->Give(&batch.queue->summed);
    absl::MutexLock lock(&mu_);
    given_.push_back(std::move(batch));
  }
}

// Of a batch that the GPU was at from begin_s to end_s.
void GpuDevice::Finish(Batch* batch, double begin_s, double end_s) {
  GpuStaging* const staging = batch->staging;
  CopyOut(*staging);
  for (DeviceJob& job : batch->jobs) {
    TaskResult result;
    if (auto* const sum = std::get_if<SumTask>(&job.task)) {
      sum->terms.clear();
    } else {
      result = staging->Take(job.task);
      result.seconds = (end_s - begin_s) * static_cast<double>(job.cost_bytes) / static_cast<double>(batch->cost_bytes);
    }
    job.done(result);
  }
}

void GpuDevice::FinishLoop() {
  const auto ready = [this]() ABSL_EXCLUSIVE_LOCKS_REQUIRED(mu_) { return !given_.empty() || stopping_; };
  double last_end_s = 0;
  while (true) {
    Batch* batch = nullptr;
    {
      absl::MutexLock lock(&mu_);
      mu_.Await(absl::Condition(&ready));
      if (given_.empty()) return;
      batch = &given_.front();  // stays where it is until it is taken off below
    }
    if (const absl::Status status = gpu_->Await(batch->staging->out()); !status.ok()) {
      Fail(status);
    } else {
      const double end_s = MonotonicSeconds();
      Finish(batch, std::max(batch->given_s, last_end_s), end_s);
      last_end_s = end_s;
    }
    batch->jobs.clear();
    absl::MutexLock lock(&mu_);
    batch->staging->busy = false;
    --batch->queue->under_way;
    batch->queue->small_under_way -= batch->small ? 1 : 0;
    given_.pop_front();
  }
}

void GpuDevice::Fail(const absl::Status& why) {
  std::vector<DeviceJob> dropped;
  {
    absl::MutexLock lock(&mu_);
    failed_ = true;
    for (Queue* q : queues_) {
      while (!q->jobs.empty()) dropped.push_back(q->jobs.pop());
    }
  }
  absl::MutexLock lock(&watch_mu_);
  if (!failure_.ok()) return;
  failure_ = why;
  if (watcher_) watcher_(failure_);
}

void GpuDevice::Watch(Watcher watcher) {
  absl::MutexLock lock(&watch_mu_);
  watcher_ = std::move(watcher);
  if (watcher_ && !failure_.ok()) watcher_(failure_);
}

}  // namespace ballast
