// The order of what a batch does on a GPU's streams, with one stream held back, and where its results go.
#include "server/device/gpu_batch.h"

#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include <numeric>
#include <vector>

#include "server/device/gpu_device.h"
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

}  // namespace
}  // namespace ballast
