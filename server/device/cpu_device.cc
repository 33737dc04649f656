#include "server/device/cpu_device.h"

#include <pthread.h>
#include <sys/mman.h>

#include <algorithm>
#include <cerrno>
#include <cstring>
#include <numeric>
#include <type_traits>
#include <utility>

#include "absl/strings/str_cat.h"

#include "server/base/clock.h"

namespace ballast {
namespace {

using kernels::kTile;
using kernels::TilesOf;

// A grain is what a thread takes at once. Waking the workers costs some 10 us, about what one thread needs for 4 tiles.
constexpr uint64_t kGrainTiles = 8;
constexpr uint64_t kLeastSharedTiles = 16;
constexpr uint64_t kTogetherBytes = 1 << 20;  // some 50 us

uint64_t FormatBytes(kernels::WireIndex format) { return kernels::WireFormats()[static_cast<size_t>(format)].bytes; }

// Maxima do not depend on the order in which they are taken.
void Raise(float* at, float value) {
  std::atomic_ref<float> most(*at);
  float seen = most.load(std::memory_order_relaxed);
  while (value > seen && !most.compare_exchange_weak(seen, value, std::memory_order_relaxed)) continue;
}

// Work on tiles [first, last) of a task's elements.
bool RunTiles(const ScaleTask& t, uint64_t first, uint64_t last) {
  const uint64_t end = std::min(t.elements, last * kTile);
  for (uint64_t e = first * kTile; e < end;) {
    const uint64_t row = e / t.row_length, row_end = std::min(end, (row + 1) * t.row_length);
    Raise(t.scales + row, t.master->absmax(t.planes.data(), e, row_end));
    e = row_end;
  }
  return true;
}
bool RunTiles(const EncodeWeightsTask& t, uint64_t first, uint64_t last) {
  const uint64_t begin = t.first + first * kTile;
  std::byte* out = t.out + (begin - t.first) * FormatBytes(t.format);
  t.master->encode_weights(t.planes.data(), t.format, t.scales, t.row_length, out, begin,
                           std::min(t.last, t.first + last * kTile));
  return true;
}
bool RunTiles(const LoadTask& t, uint64_t first, uint64_t last) {
  const uint64_t begin = t.first + first * kTile;
  const std::byte* in = t.in + (begin - t.first) * FormatBytes(t.format);
  return t.master->load(t.planes.data(), t.format, in, begin, std::min(t.last, t.first + last * kTile));
}
// Copies the task's pieces one after another; a tile of words is 16 KiB.
bool RunTiles(const CopyTask& t, uint64_t first, uint64_t last) {
  constexpr uint64_t kTileBytes = kTile * 4;
  uint64_t begin = first * kTileBytes, end = last * kTileBytes;
  for (const CopyTask::Piece& p : t.pieces) {
    if (begin < std::min(end, p.bytes)) std::memcpy(p.to + begin, p.from + begin, std::min(end, p.bytes) - begin);
    begin -= std::min(begin, p.bytes);
    end -= std::min(end, p.bytes);
  }
  return true;
}

bool RunTiles(const SumTask& t, uint64_t first, uint64_t last) {
  RunSum(t, first * kTile, std::min(t.elements, last * kTile));
  return true;
}

// Does what a task needs before its tiles are shared.
void Prepare(const ScaleTask& t) { std::fill_n(t.scales, t.elements / t.row_length, 0.0f); }
void Prepare(const EncodeWeightsTask& t) {
  if (t.scales == nullptr || t.first == t.last) return;
  const uint64_t first = t.first / t.row_length, last = (t.last - 1) / t.row_length + 1;
  std::copy(t.scales + first, t.scales + last, t.scales_out);
}
void Prepare(const LoadTask&) {}
void Prepare(const CopyTask&) {}
void Prepare(const SumTask&) {}

// Does what a task needs after its tiles are done.
void Finish(SumTask& t) { t.terms.clear(); }
template <class Task>
void Finish(Task&) {}

uint32_t ThreadsOr(uint32_t threads) {
  return threads != 0 ? threads : std::max(1u, std::thread::hardware_concurrency());
}

// Pages must exist before a step needs them. Linux before 5.14 lacks the call; then each page is written.
absl::Status Touch(std::byte* data, uint64_t bytes) {
  constexpr int kPopulateWrite = 23;  // MADV_POPULATE_WRITE, which older C libraries do not name
  if (madvise(data, bytes, kPopulateWrite) == 0) return absl::OkStatus();
  if (errno != EINVAL) return absl::ResourceExhaustedError(std::strerror(errno));
  for (uint64_t i = 0; i < bytes; i += 4096) data[i] = std::byte{0};
  return absl::OkStatus();
}

// By several threads: zeroing pages takes longer than all else that a new run needs, or one that is read back.
absl::Status TouchAll(absl::Span<std::byte> memory, uint32_t threads) {
  constexpr uint64_t kPiece = uint64_t{64} << 20;
  std::atomic<uint64_t> next = 0;
  absl::Mutex mu;
  absl::Status first;
  const auto touch = [&] {
    for (uint64_t at = next.fetch_add(kPiece); at < memory.size(); at = next.fetch_add(kPiece)) {
      const absl::Status touched = Touch(memory.data() + at, std::min(kPiece, memory.size() - at));
      absl::MutexLock lock(&mu);
      first.Update(touched);
      if (!first.ok()) return;
    }
  };
  std::vector<std::thread> others;
  for (uint64_t t = 1; t < std::min<uint64_t>(threads, memory.size() / kPiece); ++t) others.emplace_back(touch);
  touch();
  for (std::thread& thread : others) thread.join();
  return first;
}

}  // namespace

// mu_ of the device guards everything here.
class CpuDevice::Queue final : public DeviceQueue, public FairQueue {
 public:
  explicit Queue(CpuDevice* device) : device_(device) {
    absl::MutexLock lock(&device_->mu_);
    device_->queues_.push_back(this);
  }
  ~Queue() override {
    WaitIdle();
    absl::MutexLock lock(&device_->mu_);
    std::erase(device_->queues_, this);
  }

  void Enqueue(DeviceTask task, Completion done) override {
    const uint64_t cost_bytes = CostBytes(task);
    absl::MutexLock lock(&device_->mu_);
    Add({std::move(task), std::move(done), cost_bytes}, idle(), device_->clock_);
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

  bool running = false;

 private:
  bool idle() const { return jobs.empty() && !running; }
  CpuDevice* const device_;
};

CpuDevice::CpuDevice(Options options) : threads_(ThreadsOr(options.threads)), remark_(std::move(options.remark)) {
  for (uint32_t i = 1; i < threads_; ++i) workers_.emplace_back([this] { WorkerLoop(); });
  dispatcher_ = std::thread([this] { DispatchLoop(); });
  pthread_setname_np(dispatcher_.native_handle(), "cpu-device");
  for (std::thread& worker : workers_) pthread_setname_np(worker.native_handle(), "cpu-worker");
}

CpuDevice::~CpuDevice() {
  {
    absl::MutexLock lock(&mu_);
    stopping_ = true;
  }
  dispatcher_.join();
  {
    absl::MutexLock lock(&section_mu_);
    workers_stopping_ = true;
  }
  for (std::thread& worker : workers_) worker.join();
}

absl::StatusOr<DeviceBuffer> CpuDevice::Allocate(uint64_t bytes, Place) {
  if (bytes == 0) return DeviceBuffer();
  void* data = mmap(nullptr, bytes, PROT_READ | PROT_WRITE, MAP_PRIVATE | MAP_ANONYMOUS, -1, 0);
  if (data == MAP_FAILED) {
    return absl::ResourceExhaustedError(
        absl::StrCat("the system refused ", bytes, " bytes of memory: ", std::strerror(errno)));
  }
  // A hint: it saves page faults where the system has huge pages, and nothing is lost where it has not.
  madvise(data, bytes, MADV_HUGEPAGE);
  allocated_.fetch_add(bytes, std::memory_order_relaxed);
  DeviceBuffer buffer(this, static_cast<std::byte*>(data), bytes);
  if (absl::Status s = TouchAll({buffer.data(), bytes}, threads_); !s.ok()) {
    return absl::ResourceExhaustedError(absl::StrCat("the system refused ", bytes, " bytes of memory: ", s.message()));
  }
  return buffer;
}

void CpuDevice::Free(std::byte* data, uint64_t bytes) {
  munmap(data, bytes);
  allocated_.fetch_sub(bytes, std::memory_order_relaxed);
}

absl::StatusOr<std::unique_ptr<DeviceQueue>> CpuDevice::NewQueue(const QueueNeeds&) {
  return std::make_unique<Queue>(this);
}

std::string CpuDevice::description() const {
  return absl::StrCat("cpu, ", threads_, threads_ == 1 ? " thread, " : " threads, ", kernels::IsaName(),
                      remark_.empty() ? "" : absl::StrCat(" (", remark_, ")"));
}

double CpuDevice::busy_s() const {
  const double since = busy_since_s_.load(std::memory_order_relaxed);
  return since == 0 ? 0 : MonotonicSeconds() - since;
}

CpuDevice::Queue* CpuDevice::NextQueue() {
  return NextFairQueue(queues_, [](const Queue& q) { return q.woken; });
}

void CpuDevice::DispatchLoop() {
  const auto ready = [this]() ABSL_EXCLUSIVE_LOCKS_REQUIRED(mu_) { return NextQueue() != nullptr || stopping_; };
  std::vector<DeviceJob> jobs;
  std::vector<TaskResult> results;
  while (true) {
    Queue* queue = nullptr;
    {
      absl::MutexLock lock(&mu_);
      mu_.Await(absl::Condition(&ready));
      queue = NextQueue();
      if (queue == nullptr) return;
      TakeTogether(queue, &jobs);
    }
    busy_since_s_.store(MonotonicSeconds(), std::memory_order_relaxed);
    for (DeviceJob& job : jobs) results.push_back(RunTask(job.task));
    for (size_t i = 0; i < jobs.size(); ++i) jobs[i].done(results[i]);
    jobs.clear();
    results.clear();
    busy_since_s_.store(0, std::memory_order_relaxed);
    absl::MutexLock lock(&mu_);
    queue->running = false;
  }
}

// Small tasks are done several at a time, so that who waits for them is woken once.
void CpuDevice::TakeTogether(Queue* queue, std::vector<DeviceJob>* jobs) {
  uint64_t cost_bytes = 0;
  do {
    jobs->push_back(queue->Take(&clock_));
    cost_bytes += jobs->back().cost_bytes;
  } while (!queue->jobs.empty() && cost_bytes + queue->jobs.front().cost_bytes <= kTogetherBytes);
  queue->running = true;
}

TaskResult CpuDevice::RunTask(DeviceTask& task) {
  // Not of sums and weights that go out: there are as many of them, and telling the time is dear.
  const bool timed = !std::holds_alternative<SumTask>(task) && !std::holds_alternative<EncodeWeightsTask>(task);
  const double begin_s = timed ? MonotonicSeconds() : 0;
  const Extent extent = ExtentOf(task);
  TaskResult result;
  std::visit(
      [&](auto& t) {
        using Task = std::decay_t<decltype(t)>;
        if constexpr (std::is_same_v<Task, UpdateTask> || std::is_same_v<Task, MeasureTask>) {
          result.statistics = Run(t);
        } else if constexpr (std::is_same_v<Task, CurvatureTask>) {
          result.curvature = Run(t);
        } else {
          Prepare(t);
          result.finite = Share(TilesOf(extent.last - extent.first),
                                [&t](uint64_t first, uint64_t last) { return RunTiles(t, first, last); });
          Finish(t);
        }
      },
      task);
  if (timed) result.seconds = MonotonicSeconds() - begin_s;
  return result;
}

kernels::Statistics CpuDevice::Run(UpdateTask& task) {
  const kernels::Kernel& kernel = *task.kernel;
  const uint64_t tiles = TilesOf(task.update.n);
  if (kernel.measure != nullptr) {
    float* const sums = reinterpret_cast<float*>(task.tiles);
    Share(tiles, [&](uint64_t first, uint64_t last) {
      kernel.measure(task.update, first, last, sums + first);
      return true;
    });
    kernel.finish(std::accumulate(sums, sums + tiles, 0.0), task.update.n, task.update.constants);
  }
  Share(tiles, [&](uint64_t first, uint64_t last) {
    kernel.update(task.update, first, last, task.tiles + first);
    return true;
  });
  return kernels::Combine({task.tiles, tiles}, task.update.statistics == kernels::StatisticsLevel::kFull);
}

kernels::Statistics CpuDevice::Run(const MeasureTask& task) {
  const uint64_t tiles = TilesOf(task.elements);
  const auto measure = kernels::WireFormats()[static_cast<size_t>(task.format)].measure;
  Share(tiles, [&](uint64_t first, uint64_t last) {
    measure(task.gradient, task.elements, task.scale, first, last, task.tiles + first);
    return true;
  });
  return kernels::Combine({task.tiles, tiles}, /*full=*/false);
}

kernels::Curvature CpuDevice::Run(const CurvatureTask& task) {
  const uint64_t tiles = kernels::SampledTiles(task.probe.n);
  Share(tiles, [&](uint64_t first, uint64_t last) {
    task.kernel->curvature(task.probe, first, last, task.tiles + first);
    return true;
  });
  return kernels::Combine({task.tiles, tiles});
}

bool CpuDevice::Share(uint64_t tiles, TileWork work) {
  const bool shared = !workers_.empty() && tiles >= kLeastSharedTiles;
  section_.work = &work;
  section_.tiles = tiles;
  section_.grain_tiles = shared ? kGrainTiles : tiles;
  section_.grains = shared ? (tiles + kGrainTiles - 1) / kGrainTiles : 1;
  section_.next.store(0, std::memory_order_relaxed);
  section_.finite.store(true, std::memory_order_relaxed);
  if (shared) {
    absl::MutexLock lock(&section_mu_);
    ++section_number_;
    section_workers_ = static_cast<uint32_t>(workers_.size());
  }
  WorkOn(&section_);
  if (shared) {
    const auto done = [this]() ABSL_SHARED_LOCKS_REQUIRED(section_mu_) { return section_workers_ == 0; };
    absl::MutexLock lock(&section_mu_);
    section_mu_.Await(absl::Condition(&done));
  }
  return section_.finite.load(std::memory_order_relaxed);
}

void CpuDevice::WorkOn(Section* section) {
  while (true) {
    const uint64_t grain = section->next.fetch_add(1, std::memory_order_relaxed);
    if (grain >= section->grains) return;
    const uint64_t first = grain * section->grain_tiles;
    const uint64_t last = std::min(section->tiles, first + section->grain_tiles);
    if (!(*section->work)(first, last)) section->finite.store(false, std::memory_order_relaxed);
  }
}

void CpuDevice::WorkerLoop() {
  uint64_t seen = 0;
  while (true) {
    {
      const auto ready = [&]() ABSL_SHARED_LOCKS_REQUIRED(section_mu_) {
        return section_number_ != seen || workers_stopping_;
      };
      absl::MutexLock lock(&section_mu_);
      section_mu_.Await(absl::Condition(&ready));
      if (section_number_ == seen) return;
      seen = section_number_;
    }
    WorkOn(&section_);
    absl::MutexLock lock(&section_mu_);
    --section_workers_;
  }
}

}  // namespace ballast
