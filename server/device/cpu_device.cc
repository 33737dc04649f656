#include "server/device/cpu_device.h"

#include <pthread.h>
#include <sys/mman.h>
#include <sys/syscall.h>
#include <unistd.h>

#include <algorithm>
#include <cerrno>
#include <cstring>
#include <numeric>
#include <utility>
#include <variant>

#include "absl/strings/str_cat.h"

#include "kernels/matrix/product.h"
#include "server/base/clock.h"
#include "server/device/cpu_tasks.h"

namespace ballast {
namespace {

// A grain is what a thread takes at once. Waking the workers costs some 10 us, about what one thread needs for 4 tiles.
constexpr uint64_t kGrainTiles = 8;
constexpr uint64_t kLeastSharedElements = 16 * kernels::kTile;
constexpr uint64_t kTaskElements = 512;  // what beginning a task takes, in elements
// What is done together takes so long, some 50 us of one thread, or of several, which are woken for it, 200 us of each.
constexpr uint64_t kTogetherBytes = 1 << 20, kSharedBytes = 4 << 20;
constexpr uint64_t kRoomTiles = 1024;  // of a thread; more than so many bytes of updates have, however small

// Has the pages, none of which exists yet, come from all nodes in turn. Where the system does not let us (in a container,
// say), each comes from the node of the thread that touches it first.
void Spread(std::byte* data, uint64_t bytes, const std::vector<NumaNode>& nodes) {
  constexpr int kInterleave = 3;  // MPOL_INTERLEAVE, without libnuma's headers
  constexpr size_t kWordBits = 8 * sizeof(unsigned long);
  std::vector<unsigned long> mask(nodes.back().id / kWordBits + 1);
  for (const NumaNode& node : nodes) mask[node.id / kWordBits] |= 1ul << node.id % kWordBits;
  syscall(SYS_mbind, data, bytes, kInterleave, mask.data(), mask.size() * kWordBits + 1, 0);
}

void KeepAt(const NumaNode& node, std::thread* thread) {
  cpu_set_t set;
  CPU_ZERO(&set);
  for (const uint32_t i : node.processors) CPU_SET(i, &set);
  pthread_setaffinity_np(thread->native_handle(), sizeof set, &set);  // if it fails, the thread runs anywhere
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

  void Enqueue(DeviceTask task, Completion done, std::optional<uint32_t> tensor) override {
    const uint64_t cost_bytes = CostBytes(task), timed_bytes = TimedBytes(task, cost_bytes);
    DeviceJob job{std::move(task), std::move(done), cost_bytes, tensor, timed_bytes};
    absl::MutexLock lock(&device_->mu_);
    JoinSums(this, &job);
    Add(std::move(job), idle(), device_->clock_);
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

CpuDevice::CpuDevice(Options options)
    : team_(options.threads != 0 ? options.threads : UsableProcessors(), "cpu-worker"),
      remark_(std::move(options.remark)),
      nodes_(NumaNodes()),
      room_(team_.threads() > 1 ? team_.threads() * kRoomTiles : 0) {
  dispatcher_ = std::thread([this] { DispatchLoop(); });
  pthread_setname_np(dispatcher_.native_handle(), "cpu-device");
  if (nodes_.size() < 2) return;
  const std::vector<size_t> places = SpreadThreads(nodes_, team_.threads());
  KeepAt(nodes_[places[0]], &dispatcher_);
  for (size_t i = 0; i < team_.workers().size(); ++i) KeepAt(nodes_[places[1 + i]], &team_.workers()[i]);
}

CpuDevice::~CpuDevice() {
  {
    absl::MutexLock lock(&mu_);
    stopping_ = true;
  }
  dispatcher_.join();
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
  if (nodes_.size() > 1) Spread(static_cast<std::byte*>(data), bytes, nodes_);
  allocated_.fetch_add(bytes, std::memory_order_relaxed);
  DeviceBuffer buffer(this, static_cast<std::byte*>(data), bytes);
  if (absl::Status s = TouchAll({buffer.data(), bytes}, team_.threads()); !s.ok()) {
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

absl::StatusOr<std::string> CpuDevice::MatrixProducts() { return kernels::FastestProduct().library; }

std::string CpuDevice::description() const {
  return absl::StrCat("cpu, ", team_.threads(), team_.threads() == 1 ? " thread, " : " threads, ",
                      nodes_.size() > 1 ? absl::StrCat(nodes_.size(), " NUMA nodes, ") : "", kernels::IsaName(),
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
  while (true) {
    Queue* queue = nullptr;
    {
      absl::MutexLock lock(&mu_);
      mu_.Await(absl::Condition(&ready));
      queue = NextQueue();
      if (queue == nullptr) return;
      TakeTogether(queue);
    }
    busy_since_s_.store(MonotonicSeconds(), std::memory_order_relaxed);
    RunJobs();
    for (size_t i = 0; i < jobs_.size(); ++i) jobs_[i].done(results_[i]);
    jobs_.clear();
    busy_since_s_.store(0, std::memory_order_relaxed);
    absl::MutexLock lock(&mu_);
    queue->running = false;
  }
}

// Small tasks are done several at a time, so that who waits for them is woken once, and all threads have work.
void CpuDevice::TakeTogether(Queue* queue) {
  const uint64_t most_bytes = team_.threads() == 1 ? kTogetherBytes : team_.threads() * kSharedBytes;
  uint64_t cost_bytes = 0;
  do {
    jobs_.push_back(queue->Take(&clock_));
    cost_bytes += jobs_.back().cost_bytes;
  } while (!queue->jobs.empty() && cost_bytes + queue->jobs.front().cost_bytes <= most_bytes);
  queue->running = true;
}

void CpuDevice::RunJobs() {
  results_.resize(jobs_.size());
  if (team_.threads() == 1 || jobs_.size() == 1) {
    order_.resize(jobs_.size());
    std::iota(order_.begin(), order_.end(), 0);
    return Time(order_, [this] {
      for (const uint32_t& place : order_) RunTogether({&place, 1});
    });
  }
  levels_.Plan(jobs_);
  for (size_t l = 0; l < levels_.size(); ++l) {
    absl::Span<const uint32_t> left = levels_[l];
    while (!left.empty()) {
      const absl::Span<const uint32_t> places = left.first(FitInRoom(left));
      Time(places, [&] { RunTogether(places); });
      left.remove_prefix(places.size());
    }
  }
}

// What `run` takes for the jobs at these places is shared out by the bytes that they move: telling the time for each is dear.
// Nobody asks for that of sums and of weights that go out.
void CpuDevice::Time(absl::Span<const uint32_t> places, absl::FunctionRef<void()> run) {
  const auto timed = [this](uint32_t place) { return jobs_[place].timed_bytes > 0; };
  if (std::none_of(places.begin(), places.end(), timed)) return run();
  const double begin_s = MonotonicSeconds();
  run();
  uint64_t bytes = 0;
  for (const uint32_t place : places) bytes += jobs_[place].cost_bytes;
  const double byte_s = (MonotonicSeconds() - begin_s) / static_cast<double>(std::max<uint64_t>(bytes, 1));
  for (const uint32_t place : places) {
    if (timed(place)) results_[place].seconds = byte_s * static_cast<double>(jobs_[place].timed_bytes);
  }
}

// How many of the jobs, from the first on, find room for their tiles; one needs none.
size_t CpuDevice::FitInRoom(absl::Span<const uint32_t> places) const {
  uint64_t tiles = CpuTilesOf(jobs_[places.front()].task);
  size_t n = 1;
  while (n < places.size()) {
    tiles += CpuTilesOf(jobs_[places[n]].task);
    if (tiles > room_.size()) break;
    ++n;
  }
  return n;
}

void CpuDevice::RunTogether(absl::Span<const uint32_t> places) {
  if (LineUp(places)) MeasureLine();
  const bool finite =
      Share([](DeviceTask& task, uint64_t first, uint64_t last) { return RunTiles(task, first, last); });
  Conclude(places);
  results_[places.front()].finite = finite;  // a load, which can tell, is alone
}

void CpuDevice::Conclude(absl::Span<const uint32_t> places) {
  const auto conclude = [&](uint64_t i) { results_[places[i]] = ConcludeTask(jobs_[places[i]].task); };
  if (line_elements_ >= kLeastSharedElements) return team_.Share(places.size(), conclude);
  for (size_t i = 0; i < places.size(); ++i) conclude(i);
}

// Puts the jobs' tiles one behind another. Whether some of them are measured first.
bool CpuDevice::LineUp(absl::Span<const uint32_t> places) {
  line_.clear();
  line_ends_.clear();
  line_elements_ = 0;
  bool measures = false;
  uint64_t end = 0;
  for (const uint32_t place : places) {
    DeviceTask& task = jobs_[place].task;
    if (places.size() > 1) UseRoom(task, room_.data() + end);
    PrepareTask(task);
    measures = measures || MeasuresFirst(task);
    const Extent extent = ExtentOf(task);
    line_elements_ += extent.last - extent.first + kTaskElements;
    end += CpuTilesOf(task);
    line_.push_back(&task);
    line_ends_.push_back(end);
  }
  return measures;
}

void CpuDevice::MeasureLine() {
  Share([](DeviceTask& task, uint64_t first, uint64_t last) {
    if (MeasuresFirst(task)) MeasureTiles(task, first, last);
    return true;
  });
  // A large matrix takes minutes, of which each part is work that gets on.
  const kernels::ShareWork share = [this](uint64_t count, const std::function<void(uint64_t)>& act) {
    team_.Share(count, [&](uint64_t part) {
      act(part);
      busy_since_s_.store(MonotonicSeconds(), std::memory_order_relaxed);
    });
  };
  for (DeviceTask* task : line_) {
    if (MeasuresFirst(*task)) EndMeasure(*task, share);
  }
}

bool CpuDevice::Share(TileWork work) {
  const uint64_t tiles = line_ends_.back();
  if (team_.threads() == 1 || line_elements_ < kLeastSharedElements) return WorkOnLine(work, 0, tiles);
  std::atomic<bool> finite = true;
  team_.Share((tiles + kGrainTiles - 1) / kGrainTiles, [&](uint64_t grain) {
    const uint64_t first = grain * kGrainTiles;
    if (!WorkOnLine(work, first, std::min(tiles, first + kGrainTiles))) finite.store(false, std::memory_order_relaxed);
  });
  return finite.load(std::memory_order_relaxed);
}

// On tiles [first, last) of the line, each by the task that it belongs to.
bool CpuDevice::WorkOnLine(TileWork work, uint64_t first, uint64_t last) {
  auto i = static_cast<size_t>(std::upper_bound(line_ends_.begin(), line_ends_.end(), first) - line_ends_.begin());
  bool finite = true;
  for (; first < last; ++i) {
    const uint64_t begin = i == 0 ? 0 : line_ends_[i - 1], end = std::min(last, line_ends_[i]);
    if (first < end) finite = work(*line_[i], first - begin, end - begin) && finite;
    first = end;
  }
  return finite;
}

}  // namespace ballast
