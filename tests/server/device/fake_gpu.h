// A GpuDriver of host memory: every stream is a thread, and its kernels are the GPU's driver run on the CPU
// (tests/kernels/cuda/lockstep.h). As on a GPU, work is done later than it is given, so code that relies on an order
// without asking for it fails. Thread-safe.
#pragma once

#include <array>
#include <atomic>
#include <deque>
#include <functional>
#include <map>
#include <memory>
#include <string>
#include <thread>
#include <vector>

#include "absl/base/thread_annotations.h"
#include "absl/synchronization/mutex.h"

#include "server/device/gpu_driver.h"

namespace ballast {

// What a FakeGpu computes differently from the CPU: the first weight of some updates, or a statistic.
enum class Wrong { kNothing, kEveryUpdate, kNearest, kBf16, kDry, kMeasure, kProbe, kAverage };

// Outlives the device that uses the FakeGpu; tests look at it.
struct FakeGpuState {
  std::atomic<int> allocations_left = 1 << 30;  // then they are refused
  std::atomic<int64_t> live_bytes = 0, live_events = 0;
  std::atomic<Wrong> wrong = Wrong::kNothing;
  std::atomic<int> update_launches = 0, measure_launches = 0, probe_launches = 0, serve_launches = 0,
                   average_launches = 0, sum_launches = 0;
  std::atomic<int> reads = 0;
  std::atomic<bool> shares = true;  // memory; else the driver is too old
  std::atomic<int> copies_in = 0, loads_done = 0;
  std::string products = "products of a fake GPU";  // empty: none; as it was when the device was made

  absl::Mutex mu;
  bool held ABSL_GUARDED_BY(mu) = false;      // kCompute stands still
  bool out_held ABSL_GUARDED_BY(mu) = false;  // kOut does
  int scales_raised ABSL_GUARDED_BY(mu) = 0;  // launches of RaiseScales that are done
  absl::Status failure ABSL_GUARDED_BY(mu) = absl::OkStatus();
};

class FakeGpu final : public GpuDriver {
 public:
  explicit FakeGpu(FakeGpuState* state, int number = 0);
  ~FakeGpu() override;
  int number() const override { return number_; }
  std::string label() const override { return label_; }
  std::string name() const override { return label_ + ", a fake"; }
  uint64_t memory_bytes() const override { return 1 << 30; }
  absl::StatusOr<std::byte*> Allocate(uint64_t bytes, Memory memory) override;
  void Free(std::byte* data, Memory memory) override;
  // A memfd, which tests/client/fake_cuda.cc imports.
  absl::StatusOr<Shared> AllocateShared(uint64_t bytes) override;
  void FreeShared(const Shared& shared) override;
  void Read(void* to, const void* from, uint64_t bytes) override;
  void Copy(Stream stream, void* to, const void* from, uint64_t bytes) override;
  void Zero(Stream stream, void* to, uint64_t bytes) override;
  void Update(size_t kernel, kernels::DeviceUpdate* batch, int count, uint64_t tiles, bool ordinary) override;
  absl::StatusOr<std::string> MatrixProducts() override;
  void Direct(size_t kernel, const kernels::DeviceUpdate* batch, int count, uint64_t tiles) override;
  void Orthogonalize(const kernels::DeviceMatrix& matrix) override;
  void Sum(const kernels::DeviceSum* batch, int count, uint64_t tiles) override;
  void Measure(const kernels::DeviceGradient* batch, int count, uint64_t tiles) override;
  void ProbeCurvature(size_t kernel, const kernels::DeviceCurvature* batch, int count, uint64_t tiles) override;
  void MoveAverages(size_t master, const kernels::DeviceAverage* batch, int count, uint64_t tiles) override;
  void Load(size_t master, const kernels::DeviceCopy* batch, int count, uint64_t tiles,
            kernels::WireIndex format) override;
  void EncodeWeights(size_t master, const kernels::DeviceCopy* batch, int count, uint64_t tiles,
                     kernels::WireIndex format) override;
  void RaiseScales(size_t master, const kernels::DeviceCopy* batch, int count, uint64_t tiles) override;
  absl::StatusOr<Event> NewEvent() override;
  void FreeEvent(Event event) override;
  void Record(Event event, Stream stream) override;
  void Wait(Stream stream, Event event) override;
  absl::Status Await(Event event) override;

 private:
  using Work = std::function<void()>;
  void Give(Stream stream, Work work);
  bool IsWrong(const kernels::Update& update) const;
  void RunStream(size_t stream);
  void AwaitRelease(size_t stream);
  void BlockUntil(Event event, uint64_t recorded);

  FakeGpuState* const state_;
  const int number_;
  const std::string label_;
  absl::Mutex mu_;
  std::array<std::deque<Work>, kStreams> work_ ABSL_GUARDED_BY(mu_);
  bool stopping_ ABSL_GUARDED_BY(mu_) = false;
  struct Times {
    uint64_t recorded = 0, happened = 0;
  };
  std::deque<Times> events_ ABSL_GUARDED_BY(mu_);
  std::map<std::byte*, uint64_t> sizes_ ABSL_GUARDED_BY(mu_);
  std::vector<std::thread> streams_;
};

}  // namespace ballast
