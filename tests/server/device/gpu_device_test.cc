// The GPU's device against the CPU's: the same tasks, the same bits, whatever is joined into one launch.
#include "server/device/gpu_device.h"

#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include <cstring>
#include <random>
#include <string_view>
#include <vector>

#include "absl/synchronization/notification.h"

#include "server/device/cpu_device.h"
#include "tests/server/device/fake_gpu.h"

namespace ballast {
namespace {

using kernels::TileStatistics;
using ::testing::HasSubstr;

void NoFailure(const absl::Status& status) { ADD_FAILURE() << status; }

// Tensors of one kernel on a device, in buffers as a run has them: all planes of a kind in one, gradients in a pool.
class Model {
 public:
  Model(Device* device, const kernels::Kernel& kernel, std::vector<uint64_t> sizes)
      : kernel_(kernel), sizes_(std::move(sizes)), device_(device) {
    uint64_t largest = 0, pool = 0;
    for (const uint64_t n : sizes_) {
      std::vector<DeviceBuffer> planes;
      for (const kernels::Plane& plane : kernel.planes) {
        planes.push_back(
            device->Allocate(std::max<uint64_t>(kernels::PlaneBytes(plane, n), 64), Place::kDevice).value());
      }
      planes_.push_back(std::move(planes));
      scales_.push_back(device->Allocate(sizeof(float) * (n + 1), Place::kDevice).value());
      largest = std::max(largest, n);
      at_.push_back(pool);
      pool += (n * sizeof(float) + 63) / 64 * 64;
    }
    pool_ = device->Allocate(pool + 64, Place::kHost).value();
    tiles_.resize(kernels::TilesOf(largest) + 1);
    queue_ =
        device->NewQueue({.tiles = kernels::TilesOf(largest), .payload_bytes = 4 * kPiece, .scales = kPiece}).value();
  }
  ~Model() { queue_->WaitIdle(); }

  void Load() {
    loaded_.resize(sizes_.size());
    for (size_t i = 0; i < sizes_.size(); ++i) {
      std::mt19937 random(static_cast<uint32_t>(i));
      std::normal_distribution<float> normal(0, 1);
      loaded_[i].resize(sizes_[i]);
      for (float& x : loaded_[i]) x = normal(random);
      for (uint64_t first = 0; first < sizes_[i]; first += kPiece) {
        queue_->Submit(LoadTask{.master = master(),
                                .planes = MasterPlanes(i),
                                .format = kernels::FindWireFormat("fp32"),
                                .first = first,
                                .last = std::min(sizes_[i], first + kPiece),
                                .in = reinterpret_cast<const std::byte*>(loaded_[i].data() + first)},
                       [](const TaskResult& r) { EXPECT_TRUE(r.finite); });
      }
    }
  }
  // Updates every tensor with gradients of its own and keeps the statistics.
  void Step(uint64_t t) {
    Fill(t);
    UpdateAll(t, /*measured=*/false);
  }
  // Likewise, but every gradient is measured first.
  void JudgedStep(uint64_t t) {
    Fill(t);
    for (size_t i = 0; i < sizes_.size(); ++i) {
      queue_->Submit(MeasureTask{.gradient = pool_.data() + at_[i],
                                 .format = kernels::FindWireFormat("fp32"),
                                 .elements = sizes_[i],
                                 .scale = 1,
                                 .tiles = tiles_.data()},
                     [this](const TaskResult& r) { statistics_.push_back(r.statistics); });
    }
    UpdateAll(t, /*measured=*/true);
  }
  void Fill(uint64_t t) {
    queue_->WaitIdle();  // the pool's bytes are free
    for (size_t i = 0; i < sizes_.size(); ++i) {
      std::mt19937 random(static_cast<uint32_t>(100 * t + i));
      std::normal_distribution<float> normal(0, 0.1f);
      float* const grad = reinterpret_cast<float*>(pool_.data() + at_[i]);
      for (uint64_t e = 0; e < sizes_[i]; ++e) grad[e] = normal(random);
    }
  }
  void UpdateAll(uint64_t t, bool measured) {
    for (size_t i = 0; i < sizes_.size(); ++i) {
      UpdateTask task = MakeUpdate(i, t);
      task.measured = measured;
      queue_->Submit(task, [this](const TaskResult& r) { statistics_.push_back(r.statistics); });
    }
  }
  void EncodeWeights(std::string_view format, uint64_t row_length) {
    const kernels::WireIndex wire = kernels::FindWireFormat(format);
    const bool scaled = kernels::WireFormats()[static_cast<size_t>(wire)].scaling != kernels::Scaling::kNone;
    for (size_t i = 0; i < sizes_.size(); ++i) {
      if (sizes_[i] == 0) continue;
      const uint64_t row = sizes_[i] % row_length == 0 ? row_length : sizes_[i];
      float* const scales = reinterpret_cast<float*>(scales_[i].data());
      if (scaled) {
        queue_->Submit(ScaleTask{.master = master(),
                                 .planes = MasterPlanes(i),
                                 .elements = sizes_[i],
                                 .row_length = row,
                                 .scales = scales},
                       [](const TaskResult&) {});
      }
      for (uint64_t first = 0; first < sizes_[i]; first += kPiece) {
        const uint64_t last = std::min(sizes_[i], first + kPiece);
        Piece& piece = served_.emplace_back();
        piece.data.resize((last - first) * kernels::WireFormats()[static_cast<size_t>(wire)].bytes);
        if (scaled) piece.scales.resize((last - 1) / row + 1 - first / row);
        queue_->Submit(EncodeWeightsTask{.master = master(),
                                         .planes = MasterPlanes(i),
                                         .format = wire,
                                         .first = first,
                                         .last = last,
                                         .out = piece.data.data(),
                                         .scales = scaled ? scales : nullptr,
                                         .row_length = row,
                                         .scales_out = piece.scales.data()},
                       [](const TaskResult&) {});
      }
    }
  }
  void WaitIdle() { queue_->WaitIdle(); }

  struct Piece {
    std::vector<std::byte> data;
    std::vector<float> scales;
    bool operator==(const Piece&) const = default;
  };
  const std::deque<Piece>& served() const { return served_; }
  const std::vector<kernels::Statistics>& statistics() const { return statistics_; }
  DeviceQueue* queue() { return queue_.get(); }
  UpdateTask MakeUpdate(size_t i, uint64_t t) {
    UpdateTask task{.kernel = &kernel_, .tiles = tiles_.data()};
    for (size_t p = 0; p < planes_[i].size(); ++p) task.update.planes[p] = planes_[i][p].data();
    task.update.grad = pool_.data() + at_[i];
    task.update.grad_format = kernels::FindWireFormat("fp32");
    task.update.n = sizes_[i];
    task.update.grad_scale = 1;
    task.update.clip = 1;
    task.update.random_key = kernels::RandomKey(i, t);
    task.update.stochastic = true;
    task.update.statistics = kernels::StatisticsLevel::kFull;
    std::vector<double> hyper;
    for (const kernels::Hyper& h : kernel_.hypers) hyper.push_back(h.value);
    kernel_.prepare(hyper, t, task.update.constants);
    return task;
  }

 private:
  static constexpr uint64_t kPiece = 2 * kernels::kTile;
  const kernels::MasterFormat* master() const { return kernels::FindMasterFormat(kernel_.master); }
  std::array<std::byte*, kernels::kMaxPlanes> MasterPlanes(size_t i) {
    std::array<std::byte*, kernels::kMaxPlanes> planes = {};
    for (size_t p = 0; p < master()->planes.size(); ++p) planes[p] = planes_[i][p].data();
    return planes;
  }

  const kernels::Kernel& kernel_;
  const std::vector<uint64_t> sizes_;
  Device* const device_;
  std::vector<std::vector<DeviceBuffer>> planes_;
  std::vector<DeviceBuffer> scales_;
  std::vector<uint64_t> at_;
  DeviceBuffer pool_;
  std::vector<TileStatistics> tiles_;
  std::vector<std::vector<float>> loaded_;
  std::deque<Piece> served_;
  std::vector<kernels::Statistics> statistics_;
  std::unique_ptr<DeviceQueue> queue_;
};

// A model trained and served on a device.
struct Outcome {
  std::deque<Model::Piece> served;
  std::vector<kernels::Statistics> statistics;
};
Outcome TrainOn(Device* device, const kernels::Kernel& kernel) {
  Model model(device, kernel, {30000, 1, 0, 256, 4096, 5000, 33, 9216});
  model.Load();
  for (uint64_t t = 1; t <= 3; ++t) {
    model.Step(t);
    for (const char* format : {"fp32", "bf16", "fp8-e4m3", "int8-row", "int8-tensor"}) model.EncodeWeights(format, 24);
  }
  model.WaitIdle();
  return {model.served(), model.statistics()};
}

void Hold(FakeGpuState* state, bool held) {
  absl::MutexLock lock(&state->mu);
  state->held = held;
}

TEST(GpuDeviceTest, EveryKernelGivesTheCpusBits) {
  CpuDevice cpu({.threads = 2});
  FakeGpuState state;
  GpuDevice gpu(std::make_unique<FakeGpu>(&state));
  gpu.Watch(NoFailure);
  for (const kernels::Kernel& kernel : kernels::Kernels()) {
    SCOPED_TRACE(std::string(kernel.rule) + " " + kernel.master + " " + kernel.state);
    const Outcome wanted = TrainOn(&cpu, kernel), got = TrainOn(&gpu, kernel);
    ASSERT_TRUE(wanted.served == got.served);
    ASSERT_EQ(wanted.statistics.size(), got.statistics.size());
    for (size_t i = 0; i < wanted.statistics.size(); ++i) {
      EXPECT_EQ(wanted.statistics[i].update_sq, got.statistics[i].update_sq);
      EXPECT_EQ(wanted.statistics[i].stored_dot, got.statistics[i].stored_dot);
      EXPECT_EQ(wanted.statistics[i].unchanged, got.statistics[i].unchanged);
    }
  }
}

TEST(GpuDeviceTest, MeasuredGradientsGiveTheCpusBitsAndAreCopiedOnce) {
  CpuDevice cpu({.threads = 2});
  FakeGpuState state;
  GpuDevice gpu(std::make_unique<FakeGpu>(&state));
  gpu.Watch(NoFailure);
  const kernels::Kernel& kernel = *kernels::FindKernel("stable_adamw", "split24", "companded8");
  const std::vector<uint64_t> sizes = {30000, 1, 0, 256, 4096, 5000, 33, 9216};
  Model a(&cpu, kernel, sizes), b(&gpu, kernel, sizes);
  for (Model* model : {&a, &b}) {
    model->Load();
    for (uint64_t t = 1; t <= 2; ++t) {
      model->WaitIdle();
      Hold(&state, true);  // until all of it waits
      model->JudgedStep(t);
      Hold(&state, false);
    }
    model->EncodeWeights("fp32", 24);
    model->WaitIdle();
  }
  EXPECT_TRUE(a.served() == b.served());
  ASSERT_EQ(a.statistics().size(), 4 * sizes.size());
  ASSERT_EQ(b.statistics().size(), 4 * sizes.size());
  for (size_t i = 0; i < a.statistics().size(); ++i) {
    EXPECT_EQ(a.statistics()[i].grad_sq, b.statistics()[i].grad_sq) << i;
    EXPECT_EQ(a.statistics()[i].grad_absmax, b.statistics()[i].grad_absmax) << i;
    EXPECT_EQ(a.statistics()[i].update_sq, b.statistics()[i].update_sq) << i;
  }
  for (size_t i = 0; i < sizes.size(); ++i) {  // what is measured is what the update then says
    EXPECT_EQ(b.statistics()[i].grad_sq, b.statistics()[sizes.size() + i].grad_sq) << i;
  }
  EXPECT_LT(state.measure_launches, 2 * static_cast<int>(sizes.size()));  // together, where they wait together
}

TEST(GpuDeviceTest, WhatWaitsTogetherIsLaunchedTogether) {
  FakeGpuState state;
  GpuDevice gpu(std::make_unique<FakeGpu>(&state));
  gpu.Watch(NoFailure);
  Model model(&gpu, *kernels::FindKernel("adamw", "split24", "companded8"), std::vector<uint64_t>(200, 100));
  model.Load();
  model.WaitIdle();
  Hold(&state, true);
  model.Step(1);
  Hold(&state, false);
  model.WaitIdle();
  EXPECT_EQ(model.statistics().size(), 200u);
  // While nothing was computed, three batches could start: the first ones small, the last with all that had come.
  EXPECT_LE(state.update_launches, 4 * GpuDevice::kStagings);
}

TEST(GpuDeviceTest, AQueueKeepsItsOrder) {
  FakeGpuState state;
  GpuDevice gpu(std::make_unique<FakeGpu>(&state));
  gpu.Watch(NoFailure);
  Model model(&gpu, *kernels::FindKernel("lion", "split24", "companded8"), {100, 200, 300});
  std::vector<int> order;
  for (int i = 0; i < 300; ++i) {
    model.queue()->Submit(model.MakeUpdate(static_cast<size_t>(i % 3), static_cast<uint64_t>(i / 3 + 1)),
                          [&order, i](const TaskResult&) { order.push_back(i); });
  }
  model.WaitIdle();
  ASSERT_EQ(order.size(), 300u);
  EXPECT_TRUE(std::is_sorted(order.begin(), order.end()));
}

TEST(GpuDeviceTest, LoadRefusesNan) {
  FakeGpuState state;
  GpuDevice gpu(std::make_unique<FakeGpu>(&state));
  gpu.Watch(NoFailure);
  const kernels::MasterFormat& master = *kernels::FindMasterFormat("fp32");
  const DeviceBuffer plane = gpu.Allocate(4 * 256, Place::kDevice).value();
  const auto queue = gpu.NewQueue({.payload_bytes = 4 * 256}).value();
  std::vector<float> values(256, 1.0f);
  bool finite = true;
  const auto load = [&] {
    queue->Submit(LoadTask{.master = &master,
                           .planes = {plane.data()},
                           .format = kernels::FindWireFormat("fp32"),
                           .first = 0,
                           .last = 256,
                           .in = reinterpret_cast<const std::byte*>(values.data())},
                  [&](const TaskResult& r) { finite = r.finite; });
    queue->WaitIdle();
  };
  values[255] = std::numeric_limits<float>::quiet_NaN();
  load();
  EXPECT_FALSE(finite);
  values[255] = 1;
  load();
  EXPECT_TRUE(finite);
}

TEST(GpuDeviceTest, MemoryThatIsRefusedLeavesNothingBehind) {
  FakeGpuState state;
  {
    GpuDevice gpu(std::make_unique<FakeGpu>(&state));
    gpu.Watch(NoFailure);
    for (int left = 0; left < 2; ++left) {
      state.allocations_left = left;
      const auto buffer = gpu.Allocate(1000, Place::kHost);
      ASSERT_FALSE(buffer.ok());
      EXPECT_THAT(std::string(buffer.status().message()), HasSubstr("full"));
      EXPECT_EQ(gpu.allocated_bytes(), 0u);
      EXPECT_EQ(state.live_bytes, 0);
    }
    for (int left = 0; left < 2 * GpuDevice::kStagings; ++left) {
      state.allocations_left = left;
      EXPECT_FALSE(gpu.NewQueue({.tiles = 5}).ok());
      EXPECT_EQ(gpu.allocated_bytes(), 0u);
      EXPECT_EQ(state.live_bytes, 0);
    }
  }
}

TEST(GpuDeviceTest, AFailedGpuIsReportedOnceAndNothingHangs) {
  FakeGpuState state;
  int reports = 0;
  absl::Status reported;
  GpuDevice gpu(std::make_unique<FakeGpu>(&state));
  const auto watch = [&](const absl::Status& why) {
    ++reports;
    reported = why;
  };
  gpu.Watch(watch);
  Model model(&gpu, *kernels::FindKernel("adamw", "split24", "companded8"), {5000, 5000});
  model.Load();
  model.WaitIdle();
  {
    absl::MutexLock lock(&state.mu);
    state.failure = absl::InternalError("an illegal address");
  }
  model.Step(1);
  model.WaitIdle();
  model.Step(2);
  model.WaitIdle();
  EXPECT_EQ(reports, 1);
  EXPECT_THAT(std::string(reported.message()), HasSubstr("illegal address"));
  EXPECT_TRUE(model.statistics().empty());
  gpu.Watch(watch);  // late, and told at once
  EXPECT_EQ(reports, 2);
}

}  // namespace
}  // namespace ballast
