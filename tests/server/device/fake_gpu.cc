#include "tests/server/device/fake_gpu.h"

#include <sys/mman.h>
#include <unistd.h>

#include <algorithm>
#include <cstdlib>
#include <cstring>
#include <numeric>

#include "absl/strings/str_cat.h"

#include "kernels/matrix/newton_schulz.h"
#include "tests/kernels/cuda/lockstep_kernels.h"

namespace ballast {

using kernels::DeviceCopy;
using kernels::DeviceUpdate;

FakeGpu::FakeGpu(FakeGpuState* state, int number)
    : state_(state), number_(number), label_(absl::StrCat("cuda:", number)) {
  for (size_t s = 0; s < kStreams; ++s) streams_.emplace_back([this, s] { RunStream(s); });
}

FakeGpu::~FakeGpu() {
  {
    absl::MutexLock lock(&mu_);
    stopping_ = true;
  }
  for (std::thread& stream : streams_) stream.join();
}

absl::StatusOr<std::byte*> FakeGpu::Allocate(uint64_t bytes, Memory) {
  if (state_->allocations_left.fetch_sub(1) <= 0) return absl::ResourceExhaustedError("the fake GPU is full");
  const uint64_t size = (bytes + 255) / 256 * 256;
  auto* const data = static_cast<std::byte*>(std::aligned_alloc(256, size));
  std::memset(data, 0, size);
  state_->live_bytes += static_cast<int64_t>(size);
  absl::MutexLock lock(&mu_);
  sizes_[data] = size;
  return data;
}

void FakeGpu::Free(std::byte* data, Memory) {
  {
    absl::MutexLock lock(&mu_);
    state_->live_bytes -= static_cast<int64_t>(sizes_.at(data));
    sizes_.erase(data);
  }
  std::free(data);
}

absl::StatusOr<GpuDriver::Shared> FakeGpu::AllocateShared(uint64_t bytes) {
  if (!state_->shares)
    return absl::FailedPreconditionError("the CUDA driver has no cuMemCreate: it is older than 11.2");
  if (state_->allocations_left.fetch_sub(1) <= 0) return absl::ResourceExhaustedError("the fake GPU is full");
  constexpr uint64_t kUnit = 2 << 20;
  const uint64_t size = (bytes + kUnit - 1) / kUnit * kUnit;
  const int fd = memfd_create("ballast-fake-gpu", MFD_CLOEXEC);
  void* data = MAP_FAILED;
  if (fd >= 0 && ftruncate(fd, static_cast<off_t>(size)) == 0) {
    data = mmap(nullptr, size, PROT_READ | PROT_WRITE, MAP_SHARED, fd, 0);
  }
  if (data == MAP_FAILED) {
    if (fd >= 0) close(fd);
    return absl::ResourceExhaustedError("the fake GPU finds no memory");
  }
  state_->live_bytes += static_cast<int64_t>(size);
  return Shared{.data = static_cast<std::byte*>(data), .bytes = size, .fd = fd};
}

void FakeGpu::FreeShared(const Shared& shared) {
  state_->live_bytes -= static_cast<int64_t>(shared.bytes);
  munmap(shared.data, shared.bytes);
  close(shared.fd);
}

void FakeGpu::Read(void* to, const void* from, uint64_t bytes) {
  ++state_->reads;
  std::memcpy(to, from, bytes);
}

void FakeGpu::Give(Stream stream, Work work) {
  absl::MutexLock lock(&mu_);
  work_[static_cast<size_t>(stream)].push_back(std::move(work));
}

void FakeGpu::RunStream(size_t stream) {
  const auto ready = [&]() ABSL_EXCLUSIVE_LOCKS_REQUIRED(mu_) { return !work_[stream].empty() || stopping_; };
  while (true) {
    Work work;
    {
      absl::MutexLock lock(&mu_);
      mu_.Await(absl::Condition(&ready));
      if (work_[stream].empty()) return;
      work = std::move(work_[stream].front());
      work_[stream].pop_front();
    }
    AwaitRelease(stream);
    work();
  }
}

void FakeGpu::AwaitRelease(size_t stream) {
  const auto free = [this, stream]() ABSL_EXCLUSIVE_LOCKS_REQUIRED(state_->mu) {
    if (stream == static_cast<size_t>(Stream::kCompute)) return !state_->held;
    return stream != static_cast<size_t>(Stream::kOut) || !state_->out_held;
  };
  absl::MutexLock lock(&state_->mu);
  state_->mu.Await(absl::Condition(&free));
}

void FakeGpu::Copy(Stream stream, void* to, const void* from, uint64_t bytes) {
  if (stream == Stream::kIn) ++state_->copies_in;
  Give(stream, [=] {
    if (bytes > 0) std::memcpy(to, from, bytes);
  });
}
void FakeGpu::Zero(Stream stream, void* to, uint64_t bytes) {
  Give(stream, [=] { std::memset(to, 0, bytes); });
}

bool FakeGpu::IsWrong(const kernels::Update& update) const {
  if (update.dry) return false;
  const Wrong wrong = state_->wrong;
  return wrong == Wrong::kEveryUpdate || (wrong == Wrong::kNearest && !update.stochastic) ||
         (wrong == Wrong::kBf16 && update.grad_format == kernels::FindWireFormat("bf16"));
}

void FakeGpu::Update(size_t kernel, DeviceUpdate* batch, int count, uint64_t, bool ordinary) {
  ++state_->update_launches;
  Give(Stream::kCompute, [=, this] {
    const kernels::LockstepKernel& warp = kernels::LockstepKernels()[kernel];
    for (DeviceUpdate* item = batch; item != batch + count; ++item) {
      const uint64_t tiles = kernels::TilesOf(item->update.n);
      if (const auto finish = kernels::Kernels()[kernel].finish; finish != nullptr) {
        warp.measure(item->update, 0, tiles, item->sums);
        finish(std::accumulate(item->sums, item->sums + tiles, 0.0), item->update.n, item->update.constants);
      }
      (ordinary ? warp.update_ordinary : warp.update)(item->update, 0, tiles, item->tiles);
      if (IsWrong(item->update)) item->update.planes[0][1] ^= std::byte{1};
      if (state_->wrong == Wrong::kDry && item->update.dry) ++item->tiles->nonfinite;
    }
  });
}

absl::StatusOr<std::string> FakeGpu::MatrixProducts() {
  if (!state_->products.empty()) return state_->products;
  return absl::FailedPreconditionError(absl::StrCat(label_, ": cuBLAS is not found"));
}

void FakeGpu::Direct(size_t kernel, const DeviceUpdate* batch, int count, uint64_t) {
  Give(Stream::kCompute, [=] {
    for (const DeviceUpdate* item = batch; item != batch + count; ++item) {
      kernels::LockstepKernels()[kernel].measure(item->update, 0, kernels::TilesOf(item->update.n), item->sums);
    }
  });
}

// With the CPU's bits.
void FakeGpu::Orthogonalize(const kernels::DeviceMatrix& m) {
  Give(Stream::kCompute, [=] {
    const kernels::Update& u = m.update->update;
    const double squares = std::accumulate(m.update->sums, m.update->sums + kernels::TilesOf(u.n), 0.0);
    kernels::OrthogonalizeMatrix(kernels::FastestProduct(), m.rows, m.columns, squares, u.least_norm, m.direction,
                                 reinterpret_cast<float*>(m.room), &kernels::WorkAlone);
  });
}

void FakeGpu::Sum(const kernels::DeviceSum* batch, int count, uint64_t) {
  ++state_->sum_launches;
  Give(Stream::kCompute, [=] { std::for_each(batch, batch + count, &kernels::LockstepSum); });
}

void FakeGpu::Measure(const kernels::DeviceGradient* batch, int count, uint64_t) {
  ++state_->measure_launches;
  Give(Stream::kCompute, [=, this] {
    for (const kernels::DeviceGradient* item = batch; item != batch + count; ++item) {
      kernels::LockstepMeasure(item->format, static_cast<const std::byte*>(item->grad), item->n, item->scale, 0,
                               kernels::TilesOf(item->n), item->tiles);
      if (state_->wrong == Wrong::kMeasure) ++item->tiles->nonfinite;
    }
  });
}

void FakeGpu::ProbeCurvature(size_t kernel, const kernels::DeviceCurvature* batch, int count, uint64_t) {
  ++state_->probe_launches;
  Give(Stream::kCompute, [=, this] {
    for (const kernels::DeviceCurvature* item = batch; item != batch + count; ++item) {
      const uint64_t tiles = kernels::SampledTiles(item->probe.n);
      kernels::LockstepKernels()[kernel].curvature(item->probe, 0, tiles, item->tiles);
      if (state_->wrong == Wrong::kProbe) ++item->tiles->nonfinite;
    }
  });
}

void FakeGpu::MoveAverages(size_t master, const kernels::DeviceAverage* batch, int count, uint64_t) {
  ++state_->average_launches;
  Give(Stream::kCompute, [=, this] {
    for (const kernels::DeviceAverage* item = batch; item != batch + count; ++item) {
      kernels::LockstepMasters()[master].average(item->average, item->first / kernels::kTile,
                                                 kernels::TilesOf(item->last));
      if (state_->wrong == Wrong::kAverage) item->average.planes[0][1] ^= std::byte{1};
    }
  });
}

void FakeGpu::Load(size_t master, const DeviceCopy* batch, int count, uint64_t, kernels::WireIndex format) {
  Give(Stream::kCompute, [=, this] {
    for (const DeviceCopy* item = batch; item != batch + count; ++item) {
      const auto load = kernels::LockstepMasters()[master].load;
      if (!load(item->planes, format, item->payload, item->first, item->last)) *item->refused = 1;
    }
    ++state_->loads_done;
  });
}

void FakeGpu::EncodeWeights(size_t master, const DeviceCopy* batch, int count, uint64_t, kernels::WireIndex format) {
  ++state_->serve_launches;
  Give(Stream::kCompute, [=] {
    for (const DeviceCopy* item = batch; item != batch + count; ++item) {
      kernels::LockstepMasters()[master].encode_weights(item->planes, format, item->scales, item->row_length,
                                                        item->payload, item->first, item->last);
    }
  });
}

void FakeGpu::RaiseScales(size_t master, const DeviceCopy* batch, int count, uint64_t) {
  Give(Stream::kCompute, [=, this] {
    for (const DeviceCopy* item = batch; item != batch + count; ++item) {
      kernels::LockstepMasters()[master].raise(item->planes, item->scales, item->row_length, item->first, item->last);
    }
    absl::MutexLock lock(&state_->mu);
    ++state_->scales_raised;
  });
}

absl::StatusOr<GpuDriver::Event> FakeGpu::NewEvent() {
  absl::MutexLock lock(&mu_);
  ++state_->live_events;
  events_.emplace_back();
  return static_cast<Event>(events_.size() - 1);
}

// Its number is not used again, so that who uses it nevertheless waits for ever.
void FakeGpu::FreeEvent(Event event) {
  absl::MutexLock lock(&mu_);
  --state_->live_events;
  events_[static_cast<size_t>(event)].recorded = UINT64_MAX / 2;
}

void FakeGpu::Record(Event event, Stream stream) {
  uint64_t recorded = 0;
  {
    absl::MutexLock lock(&mu_);
    recorded = ++events_[static_cast<size_t>(event)].recorded;
  }
  Give(stream, [this, event, recorded] {
    absl::MutexLock lock(&mu_);
    events_[static_cast<size_t>(event)].happened = recorded;
  });
}

void FakeGpu::BlockUntil(Event event, uint64_t recorded) {
  const auto happened = [&]() ABSL_EXCLUSIVE_LOCKS_REQUIRED(mu_) {
    return events_[static_cast<size_t>(event)].happened >= recorded;
  };
  absl::MutexLock lock(&mu_);
  mu_.Await(absl::Condition(&happened));
}

void FakeGpu::Wait(Stream stream, Event event) {
  uint64_t recorded = 0;
  {
    absl::MutexLock lock(&mu_);
    recorded = events_[static_cast<size_t>(event)].recorded;
  }
  Give(stream, [this, event, recorded] { BlockUntil(event, recorded); });
}

absl::Status FakeGpu::Await(Event event) {
  uint64_t recorded = 0;
  {
    absl::MutexLock lock(&mu_);
    recorded = events_[static_cast<size_t>(event)].recorded;
  }
  BlockUntil(event, recorded);
  absl::MutexLock lock(&state_->mu);
  return state_->failure;
}

}  // namespace ballast
