// The GPU's device against the CPU's: the same tasks, the same bits, whatever is joined into one launch.
#include "server/device/gpu_device.h"

#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include <array>
#include <cstring>
#include <random>
#include <string_view>
#include <vector>

#include "absl/synchronization/notification.h"

#include "server/device/cpu_device.h"
#include "tests/server/device/device_model.h"
#include "tests/server/device/fake_gpu.h"

namespace ballast {
namespace {

using ::testing::HasSubstr;
using testing::Model;
using testing::TrainOn;
using testing::TrainOutcome;
using testing::WhatDiffers;

void NoFailure(const absl::Status& status) { ADD_FAILURE() << status; }

// What is held against what.
struct Devices {
  CpuDevice cpu{{.threads = 2}};
  FakeGpuState state;
  GpuDevice gpu{std::make_unique<FakeGpu>(&state), 3};
  Devices() { gpu.Watch(NoFailure); }
};

void Hold(FakeGpuState* state, bool held) {
  absl::MutexLock lock(&state->mu);
  state->held = held;
}

// What the two outcomes are compared by can fail.
TEST(GpuDeviceTest, ADifferenceIsNamed) {
  CpuDevice cpu({.threads = 2});
  const kernels::Kernel& kernel = *kernels::FindKernel("adamw", "split24", "companded8");
  const TrainOutcome wanted = TrainOn(&cpu, kernel);
  const auto said = [&](auto change) {
    TrainOutcome got = wanted;
    change(&got);
    return WhatDiffers(wanted, got);
  };
  EXPECT_EQ(said([](TrainOutcome*) {}), "");
  EXPECT_THAT(said([](TrainOutcome* got) { got->served.back().data.back() ^= std::byte{1}; }),
              HasSubstr("int8-tensor"));
  EXPECT_THAT(said([](TrainOutcome* got) { got->statistics[3].saturated ^= 1; }), HasSubstr("statistics of answer 3"));
  EXPECT_THAT(said([](TrainOutcome* got) { got->statistics.pop_back(); }), HasSubstr("were answered of"));
  EXPECT_THAT(said([](TrainOutcome* got) { got->served.pop_back(); }), HasSubstr("were served of"));
  EXPECT_THAT(said([](TrainOutcome* got) { got->finite = false; }), HasSubstr("not finite"));
}

TEST(GpuDeviceTest, MeasuredGradientsGiveTheCpusBitsAndAreCopiedOnce) {
  Devices devices;
  auto& [cpu, state, gpu] = devices;
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
    EXPECT_TRUE(model->finite());
  }
  EXPECT_TRUE(a.served() == b.served());
  EXPECT_TRUE(a.sealed_well() && b.sealed_well());
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

TEST(GpuDeviceTest, AnUpdateReadsTheSumsBeforeIt) {
  Devices devices;
  auto& [cpu, state, gpu] = devices;
  const kernels::Kernel& kernel = *kernels::FindKernel("adamw", "split24", "companded8");
  const std::vector<uint64_t> sizes = {30000, 1, 0, 256, 700000, 5000, 33, 9216};  // one beyond what sums together
  Model a(&cpu, kernel, sizes), b(&gpu, kernel, sizes);
  for (Model* model : {&a, &b}) {
    model->Load();
    for (uint64_t t = 1; t <= 3; ++t) {
      model->WaitIdle();  // the gradients' memory is free
      model->SummedStep(t);
    }
    model->WaitIdle();
    model->JoinedStep(4);
    model->EncodeWeights("fp32", 24);
    model->WaitIdle();
    EXPECT_TRUE(model->finite());
    EXPECT_EQ(model->sums(), 3 * sizes.size());
  }
  EXPECT_TRUE(a.served() == b.served());
  EXPECT_TRUE(a.sealed_well() && b.sealed_well());
  for (size_t i = 0; i < a.statistics().size(); ++i) {
    EXPECT_GT(a.statistics()[i].grad_sq + (sizes[i % sizes.size()] == 0 ? 1 : 0), 0) << i;
    EXPECT_EQ(a.statistics()[i].grad_sq, b.statistics()[i].grad_sq) << i;
  }
}

// Of two micro-batches of a chunk, say: the second is added to what the first made, also where a batch has both.
TEST(GpuDeviceTest, SumsOfOnePlaceAreMadeOneAfterTheOther) {
  Devices devices;
  constexpr uint64_t kElements = 60'000;  // two sums make a batch, and each is shared
  const kernels::WireIndex bf16 = kernels::FindWireFormat("bf16");
  const std::string ones(2 * kElements, '\x3f'), none(2 * kElements, '\0');  // of bf16 0x3f3f, .746, and 0
  const DeviceBuffer to = devices.gpu.Allocate(4 * kElements, Place::kHost).value();
  const auto queue = devices.gpu.NewQueue({}).value();
  for (int round = 0; round < 200; ++round) {
    for (const bool first : {true, false}) {
      SumTask sum{.to = to.data(), .elements = kElements, .format = bf16, .first = first};
      sum.terms.push_back({.payload = Payload(std::string(first ? none : ones)), .first = 0, .last = kElements});
      queue->Enqueue(
          std::move(sum), [](const TaskResult&) {}, 0);
    }
    queue->WaitIdle();  // which wakes the device
    const auto* const made = reinterpret_cast<const float*>(to.data());
    const auto wrong = std::count_if(made, made + kElements, [](float x) { return x != 0x1.7ep-1f; });
    ASSERT_EQ(wrong, 0) << "in round " << round;
  }
}

// A step came to nothing while its sums waited, and the next one has cut their memory otherwise: the later sum stays.
TEST(GpuDeviceTest, SumsOfPlacesThatOverlapAreMadeOneAfterTheOther) {
  Devices devices;
  constexpr uint64_t kElements = 120'000, kApart = kElements / 2 + 32;
  const kernels::WireIndex bf16 = kernels::FindWireFormat("bf16");
  const DeviceBuffer memory = devices.gpu.Allocate(2 * (kApart + kElements), Place::kHost).value();
  const auto queue = devices.gpu.NewQueue({}).value();
  for (int round = 0; round < 200; ++round) {
    for (const char value : {'s', 'n'}) {  // stale, next
      SumTask sum{.to = memory.data() + (value == 's' ? 2 * kApart : 0),
                  .elements = kElements,
                  .format = bf16,
                  .adds = false,
                  .first = true};
      sum.terms.push_back({.payload = Payload(std::string(2 * kElements, value)), .first = 0, .last = kElements});
      queue->Enqueue(
          std::move(sum), [](const TaskResult&) {}, 0);
    }
    queue->WaitIdle();
    const auto wrong =
        std::count_if(memory.data(), memory.data() + 2 * kElements, [](std::byte b) { return b != std::byte{'n'}; });
    ASSERT_EQ(wrong, 0) << "in round " << round;
  }
}

// The launches of 200 small tensors' updates that wait together, and of what else the step asks for. While nothing is
// computed, three batches can start: the first ones small, the last with all that has come.
constexpr int kMostLaunches = 4 * GpuDevice::kStagingsOfSmall;
struct Launches {
  int updates, scales, serves;
};
Launches LaunchesTogether(void (Model::*step)(uint64_t)) {
  FakeGpuState state;
  GpuDevice gpu(std::make_unique<FakeGpu>(&state));
  gpu.Watch(NoFailure);
  Model model(&gpu, *kernels::FindKernel("adamw", "split24", "companded8"), std::vector<uint64_t>(200, 100));
  model.Load();
  model.WaitIdle();
  Hold(&state, true);
  (model.*step)(1);
  Hold(&state, false);
  model.WaitIdle();
  EXPECT_TRUE(model.finite());
  EXPECT_TRUE(model.sealed_well());
  EXPECT_EQ(model.statistics().size(), 200u);
  absl::MutexLock lock(&state.mu);
  return {state.update_launches, state.scales_raised, state.serve_launches};
}

TEST(GpuDeviceTest, WhatWaitsTogetherIsLaunchedTogether) {
  EXPECT_LE(LaunchesTogether(&Model::Step).updates, kMostLaunches);
}

TEST(GpuDeviceTest, SumsDoNotPartSmallUpdates) {
  EXPECT_LE(LaunchesTogether(&Model::SummedStep).updates, kMostLaunches);
}

TEST(GpuDeviceTest, WeightsThatGoOutDoNotPartSmallUpdates) {
  const Launches launches = LaunchesTogether(&Model::ServedStep);
  EXPECT_LE(launches.updates, kMostLaunches);
  EXPECT_LE(launches.serves, kMostLaunches);
}

TEST(GpuDeviceTest, NeitherDoTheirScales) {
  const Launches launches = LaunchesTogether(&Model::ScaledStep);
  EXPECT_LE(launches.updates, kMostLaunches);
  EXPECT_LE(launches.scales, kMostLaunches);
  EXPECT_LE(launches.serves, kMostLaunches);
}

// A few tensors, so that a task often finds its own tensor's in the batch.
TEST(GpuDeviceTest, TasksInAnyOrderGiveTheCpusBits) {
  Devices devices;
  auto& [cpu, state, gpu] = devices;
  const std::vector<uint64_t> sizes = {300, 1, 256, 4096, 1200};
  for (const char* master : {"split24", "fp32"}) {
    const kernels::Kernel& kernel = *kernels::FindKernel("adamw", master, "companded8");
    Model a(&cpu, kernel, sizes), b(&gpu, kernel, sizes);
    for (Model* model : {&a, &b}) {
      model->Load();
      model->Fill(1);
      std::mt19937 random(7);
      for (int round = 0; round < 20; ++round) {
        Hold(&state, true);
        for (int task = 0; task < 60; ++task) {
          const size_t tensor = random() % sizes.size();
          const std::string_view formats[] = {"bf16", "int8-tensor", "int8-row"};
          if (const auto which = random() % 6; which < 3) {
            model->UpdateOne(tensor, static_cast<uint64_t>(1 + round), /*measured=*/false);
          } else {
            model->EncodeTensor(tensor, formats[which - 3], 100);
          }
        }
        Hold(&state, false);
        model->WaitIdle();
      }
    }
    EXPECT_TRUE(a.served() == b.served());
    ASSERT_EQ(a.statistics().size(), b.statistics().size());
    for (size_t i = 0; i < a.statistics().size(); ++i) {
      ASSERT_EQ(a.statistics()[i].update_sq, b.statistics()[i].update_sq) << i;
    }
  }
}

TEST(GpuDeviceTest, AQueueKeepsItsOrder) {
  FakeGpuState state;
  GpuDevice gpu(std::make_unique<FakeGpu>(&state));
  gpu.Watch(NoFailure);
  Model model(&gpu, *kernels::FindKernel("lion", "split24", "companded8"), {100, 200, 300});
  std::vector<int> order;
  std::array<float, 100> weights;
  for (int i = 0; i < 300; ++i) {
    const auto done = [&order, i](const TaskResult&) { order.push_back(i); };
    const UpdateTask update = model.MakeUpdate(static_cast<size_t>(i % 3), static_cast<uint64_t>(i / 3 + 1));
    if (i % 4 == 0) {
      model.queue()->Submit(update, done);
      continue;
    }
    EncodeWeightsTask encode{.master = kernels::FindMasterFormat("split24"),
                             .format = kernels::FindWireFormat("fp32"),
                             .first = 0,
                             .last = weights.size(),
                             .out = reinterpret_cast<std::byte*>(weights.data())};
    std::copy_n(update.update.planes, encode.planes.size(), encode.planes.begin());
    model.queue()->Submit(encode, done);
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
      EXPECT_EQ(state.live_events, 0);
    }
    state.allocations_left = 1 << 30;
    EXPECT_TRUE(gpu.NewQueue({.tiles = 5}).ok());
    EXPECT_EQ(state.live_events, 0);
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
  EXPECT_TRUE(model.finite());
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
