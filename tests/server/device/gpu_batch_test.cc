// The order of what a batch does on a GPU's streams, with one stream held back, and where its results go.
#include "server/device/gpu_batch.h"

#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include <array>
#include <cstring>
#include <numeric>
#include <vector>

#include "server/device/gpu_device.h"
#include "tests/eventually.h"
#include "tests/server/device/fake_gpu.h"

namespace ballast {
namespace {

using ::testing::Each;

// Results that are copied out late must not be overwritten by a later task in the same memory.
TEST(GpuBatchTest, CodesGoOutWithTheirOwnScales) {
  FakeGpuState state;
  GpuDevice gpu(std::make_unique<FakeGpu>(&state));
  gpu.Watch([](const absl::Status& why) { ADD_FAILURE() << why; });
  constexpr uint64_t kElements = 256, kRow = 64, kRows = kElements / kRow;
  const kernels::MasterFormat& master = *kernels::FindMasterFormat("fp32");
  const DeviceBuffer plane = gpu.Allocate(4 * kElements, Place::kDevice).value();
  const DeviceBuffer scales = gpu.Allocate(4 * kRows, Place::kDevice).value();
  const auto queue = gpu.NewQueue({.payload_bytes = 4 * kElements, .scales = kRows}).value();
  const auto load = [&](const std::vector<float>& values) {
    queue->Submit(LoadTask{.master = &master,
                           .planes = {plane.data()},
                           .format = kernels::FindWireFormat("fp32"),
                           .first = 0,
                           .last = kElements,
                           .in = reinterpret_cast<const std::byte*>(values.data())},
                  [](const TaskResult&) {});
    queue->Submit(ScaleTask{.master = &master,
                            .planes = {plane.data()},
                            .elements = kElements,
                            .row_length = kRow,
                            .scales = reinterpret_cast<float*>(scales.data())},
                  [](const TaskResult&) {});
  };
  const std::vector<float> ones(kElements, 1.0f), twos(kElements, 2.0f);
  load(ones);
  queue->WaitIdle();
  {
    absl::MutexLock lock(&state.mu);
    state.out_held = true;
  }
  std::vector<std::byte> codes(kElements);
  std::vector<float> served(2, 0.0f);
  queue->Submit(EncodeWeightsTask{.master = &master,
                                  .planes = {plane.data()},
                                  .format = kernels::FindWireFormat("int8-row"),
                                  .first = kRow,
                                  .last = 3 * kRow,
                                  .out = codes.data(),
                                  .scales = reinterpret_cast<const float*>(scales.data()),
                                  .row_length = kRow,
                                  .scales_out = served.data()},
                [](const TaskResult&) {});
  load(twos);
  {
    const auto raised = [&state]() ABSL_EXCLUSIVE_LOCKS_REQUIRED(state.mu) { return state.scales_raised == 2; };
    absl::MutexLock lock(&state.mu);
    state.mu.Await(absl::Condition(&raised));
    state.out_held = false;
  }
  queue->WaitIdle();
  EXPECT_THAT(served, Each(1.0f));
  EXPECT_THAT(std::vector(codes.begin(), codes.begin() + 2 * kRow), Each(std::byte{127}));
}

// By several threads, a part each: every byte once, none beyond.
TEST(GpuBatchTest, ALargeTensorsWeightsComeWhole) {
  FakeGpuState state;
  GpuDevice gpu(std::make_unique<FakeGpu>(&state), 3);
  gpu.Watch([](const absl::Status& why) { ADD_FAILURE() << why; });
  constexpr uint64_t kElements = 300'001, kBeyond = 7;
  const kernels::MasterFormat& master = *kernels::FindMasterFormat("fp32");
  const kernels::WireIndex fp32 = kernels::FindWireFormat("fp32");
  const DeviceBuffer plane = gpu.Allocate(4 * kElements, Place::kDevice).value();
  const auto queue = gpu.NewQueue({.payload_bytes = 4 * kElements}).value();
  std::vector<float> sent(kElements), got(kElements + kBeyond, -1.0f);
  std::iota(sent.begin(), sent.end(), 1.0f);
  queue->Submit(LoadTask{.master = &master,
                         .planes = {plane.data()},
                         .format = fp32,
                         .first = 0,
                         .last = kElements,
                         .in = reinterpret_cast<const std::byte*>(sent.data())},
                [](const TaskResult& result) { EXPECT_TRUE(result.finite); });
  queue->Submit(EncodeWeightsTask{.master = &master,
                                  .planes = {plane.data()},
                                  .format = fp32,
                                  .first = 0,
                                  .last = kElements,
                                  .out = reinterpret_cast<std::byte*>(got.data())},
                [](const TaskResult&) {});
  queue->WaitIdle();
  sent.resize(kElements + kBeyond, -1.0f);
  EXPECT_TRUE(got == sent);
}

// Gradients that lie side by side in memory come in one copy, whatever the order of their tasks, and nothing beside them
// does: another task may be summing there.
TEST(GpuBatchTest, GradientsSideBySideComeInOneCopy) {
  FakeGpuState state;
  GpuDevice gpu(std::make_unique<FakeGpu>(&state), 1);
  gpu.Watch([](const absl::Status& why) { ADD_FAILURE() << why; });
  constexpr uint64_t kTensors = 100, kElements = 12, kApart = 16;  // 48 bytes each, on multiples of 64
  const DeviceBuffer memory = gpu.Allocate(4 * kApart * kTensors, Place::kHost).value();
  auto* const values = reinterpret_cast<float*>(memory.data());
  for (uint64_t i = 0; i < kTensors * kApart; ++i) values[i] = static_cast<float>(1 + i / kApart);
  const auto queue = gpu.NewQueue({.tiles = 1}).value();
  std::vector<kernels::TileStatistics> tiles(kTensors);
  std::vector<double> squares(kTensors);
  for (const bool gap : {false, true}) {
    queue->WaitIdle();
    state.copies_in = state.measure_launches = 0;
    {
      absl::MutexLock lock(&state.mu);
      state.held = true;  // so that they wait for each other
    }
    for (uint64_t i = kTensors; i-- > 0;) {
      if (gap && i == 50) continue;
      queue->Enqueue(
          MeasureTask{.gradient = memory.data() + 4 * kApart * i,
                      .format = kernels::FindWireFormat("fp32"),
                      .elements = kElements,
                      .tiles = &tiles[i]},
          [&squares, i](const TaskResult& r) { squares[i] = r.statistics.grad_sq; }, i);
    }
    queue->Wake();
    {
      absl::MutexLock lock(&state.mu);
      state.held = false;
    }
    queue->WaitIdle();
    // Each launch has a copy of its arguments, and one of its gradients, or two around the gap.
    EXPECT_LE(state.copies_in, 2 * state.measure_launches + (gap ? 1 : 0));
    for (uint64_t i = 0; i < kTensors; ++i) EXPECT_EQ(squares[i], static_cast<double>(kElements * (1 + i) * (1 + i)));
  }
}

class GpuSaveTest : public ::testing::Test {
 protected:
  GpuSaveTest() {
    gpu_.Watch([](const absl::Status& why) { ADD_FAILURE() << why; });
  }
  void HoldOut(bool held) {
    absl::MutexLock lock(&state_.mu);
    state_.out_held = held;
  }
  void Load(const std::vector<float>& values, const DeviceBuffer& plane) {
    queue_->Submit(LoadTask{.master = &master_,
                            .planes = {plane.data()},
                            .format = fp32_,
                            .first = 0,
                            .last = values.size(),
                            .in = reinterpret_cast<const std::byte*>(values.data())},
                   [](const TaskResult&) {});
  }
  static CopyTask Copy(const DeviceBuffer& from, const DeviceBuffer& to, bool saves) {
    CopyTask task{.saves = saves};
    task.pieces[0] = {.to = to.data(), .from = from.data(), .bytes = from.bytes()};
    return task;
  }

  static constexpr uint64_t kElements = 5000;
  const kernels::MasterFormat& master_ = *kernels::FindMasterFormat("fp32");
  const kernels::WireIndex fp32_ = kernels::FindWireFormat("fp32");
  FakeGpuState state_;
  GpuDevice gpu_{std::make_unique<FakeGpu>(&state_), 1};
  const DeviceBuffer plane_ = gpu_.Allocate(4 * kElements, Place::kDevice).value();
  const DeviceBuffer aside_ = gpu_.Allocate(4 * kElements, Place::kAside).value();
  const std::unique_ptr<DeviceQueue> queue_ = gpu_.NewQueue({.payload_bytes = 4 * kElements}).value();
};

// A snapshot's bytes take long over the bus.
TEST_F(GpuSaveTest, WhatComesBehindDoesNotWaitForTheBusAndIsNotSaved) {
  const std::vector<float> ones(kElements, 1.0f), twos(kElements, 2.0f);
  Load(ones, plane_);
  queue_->WaitIdle();
  HoldOut(true);
  queue_->Submit(Copy(plane_, aside_, /*saves=*/true), [](const TaskResult&) {});
  Load(twos, plane_);
  EXPECT_TRUE(Soon([&] { return state_.loads_done == 2; })) << "though nothing goes out";
  HoldOut(false);
  queue_->WaitIdle();
  EXPECT_EQ(std::memcmp(aside_.data(), ones.data(), 4 * kElements), 0);
}

TEST_F(GpuSaveTest, WhatReadsWhatWasSavedWaitsForIt) {
  const std::vector<float> ones(kElements, 1.0f), twos(kElements, 2.0f);
  std::vector<float> served(kElements);
  const DeviceBuffer back = gpu_.Allocate(4 * kElements, Place::kDevice).value();
  Load(ones, plane_);
  queue_->WaitIdle();
  HoldOut(true);
  queue_->Submit(Copy(plane_, aside_, /*saves=*/true), [](const TaskResult&) {});
  Load(twos, plane_);
  queue_->Submit(EncodeWeightsTask{.master = &master_,
                                   .planes = {aside_.data()},
                                   .format = fp32_,
                                   .first = 0,
                                   .last = kElements,
                                   .out = reinterpret_cast<std::byte*>(served.data()),
                                   .from_aside = true},
                 [](const TaskResult&) {});
  queue_->Submit(Copy(aside_, back, /*saves=*/false), [](const TaskResult&) {});
  EXPECT_TRUE(Soon([&] { return state_.serve_launches == 1; }));
  HoldOut(false);
  queue_->WaitIdle();
  EXPECT_EQ(served, ones);
  EXPECT_EQ(std::memcmp(back.data(), ones.data(), 4 * kElements), 0);
}

// In portions, and answered once.
TEST_F(GpuSaveTest, ALargeTensorIsSavedWhole) {
  constexpr uint64_t kMany = 40 * kElements + 13;
  std::array<DeviceBuffer, 3> planes, asides;
  CopyTask save{.saves = true};
  std::vector<std::vector<std::byte>> wanted;
  for (size_t p = 0; p < planes.size(); ++p) {
    const uint64_t bytes = kMany / (p + 1);
    planes[p] = gpu_.Allocate(bytes, Place::kDevice).value();
    asides[p] = gpu_.Allocate(bytes, Place::kAside).value();
    save.pieces[p] = {.to = asides[p].data(), .from = planes[p].data(), .bytes = bytes};
    for (uint64_t i = 0; i < bytes; ++i) planes[p].data()[i] = static_cast<std::byte>((i * 7 + p) % 251);
    wanted.emplace_back(planes[p].data(), planes[p].data() + bytes);
  }
  int answers = 0;
  queue_->Submit(save, [&](const TaskResult&) { ++answers; });
  queue_->WaitIdle();
  EXPECT_EQ(answers, 1);
  for (size_t p = 0; p < asides.size(); ++p) {
    EXPECT_EQ(std::vector(asides[p].data(), asides[p].data() + asides[p].bytes()), wanted[p]);
  }
}

TEST_F(GpuSaveTest, ATensorWithoutElementsIsAnsweredToo) {
  int answers = 0;
  queue_->Submit(CopyTask{.saves = true}, [&](const TaskResult&) { ++answers; });
  queue_->WaitIdle();
  EXPECT_EQ(answers, 1);
}

}  // namespace
}  // namespace ballast
