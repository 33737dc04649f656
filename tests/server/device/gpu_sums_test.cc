// Sums that a GPU makes, of what ranks sent in its own memory and in the host's, and weights that go out in its memory: with
// the CPU's bits.
#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include <cstring>
#include <thread>
#include <vector>

#include "server/device/cpu_device.h"
#include "server/device/gpu_device.h"
#include "tests/server/device/device_model.h"
#include "tests/server/device/fake_gpu.h"
#include "tests/server/device/shared_slots.h"

namespace ballast {
namespace {

using ::testing::HasSubstr;
using testing::Model;
using testing::SharedSlots;

constexpr auto kNoAnswer = [](const TaskResult&) {};

class GpuSumsTest : public ::testing::Test {
 protected:
  GpuSumsTest() {
    gpu_.Watch([](const absl::Status& why) { ADD_FAILURE() << why; });
  }
  void Hold(bool held) {
    absl::MutexLock lock(&state_.mu);
    state_.held = held;
  }
  const kernels::Kernel& kernel_ = *kernels::FindKernel("adamw", "split24", "companded8");
  CpuDevice cpu_{{.threads = 2}};
  FakeGpuState state_;
  GpuDevice gpu_{std::make_unique<FakeGpu>(&state_), 3};
};

// Which of a sum's terms lie in the GPU's memory.
enum class Lies { kHost, kDevice, kMixed };

void Place(Lies where, SharedSlots* slots, SumTask* sum) {
  for (size_t i = 0; i < sum->terms.size(); ++i) {
    const bool there = where == Lies::kDevice || (where == Lies::kMixed && i % 2 == 1);
    if (there) sum->terms[i].payload = slots->Put(sum->terms[i].payload.bytes());
  }
}

TEST_F(GpuSumsTest, AnUpdateOfThemGivesTheCpusBits) {
  const std::vector<uint64_t> sizes = {30000, 1, 0, 256, 4096, 5000, 33, 9216};
  for (const Lies where : {Lies::kHost, Lies::kDevice, Lies::kMixed}) {
    Model a(&cpu_, kernel_, sizes), b(&gpu_, kernel_, sizes);
    const auto slots = std::make_shared<SharedSlots>(&gpu_, 8 << 20);
    a.Load(), b.Load();
    for (uint64_t t = 1; t <= 3; ++t) {
      b.WaitIdle();
      a.BroughtStep(t);
      for (size_t i = 0; i < sizes.size(); ++i) {
        for (SumTask& sum : b.MakeParts(i, t)) {
          Place(where, slots.get(), &sum);
          sum.on_device = true;
          b.SubmitSum(i, std::move(sum));
        }
        b.UpdateOne(i, t, /*there=*/true);
      }
    }
    for (Model* model : {&a, &b}) {
      model->EncodeWeights("fp32", 24);
      model->WaitIdle();
    }
    EXPECT_TRUE(a.served() == b.served());
    EXPECT_EQ(slots->given_back(), slots->lent());
    ASSERT_EQ(a.statistics().size(), b.statistics().size());
    for (size_t i = 0; i < a.statistics().size(); ++i) {
      EXPECT_EQ(a.statistics()[i].grad_sq, b.statistics()[i].grad_sq) << i;
    }
  }
}

TEST_F(GpuSumsTest, EveryKindOfUpdateGivesTheCpusBits) {
  for (const char* rule : {"adamw", "stable_adamw", "lion", "muon"}) {
    const kernels::Kernel& kernel = testing::KernelOfRule(rule);
    EXPECT_EQ(testing::WhatDiffers(testing::TrainOn(&cpu_, kernel, &Model::BroughtStep),
                                   testing::TrainOn(&gpu_, kernel, &Model::ThereStep)),
              "")
        << rule;
  }
}

// What a measure says of one gradient of so many elements, which these make of `terms`.
class Measured {
 public:
  Measured(Device* device, uint64_t elements)
      : elements_(elements),
        pool_(device->Allocate(4 * elements + 64, Place::kHost).value()),
        tiles_(kernels::TilesOf(elements)),
        queue_(device->NewQueue({.tiles = tiles_.size(), .payload_bytes = 4 * elements}).value()) {}
  ~Measured() { queue_->WaitIdle(); }
  SumTask Sum(bool first, bool on_device) const {
    return {.to = pool_.data(),
            .elements = elements_,
            .format = kernels::FindWireFormat("fp32"),
            .first = first,
            .on_device = on_device};
  }
  void Submit(SumTask sum) { queue_->Submit(std::move(sum), kNoAnswer, 0); }
  double Squares(bool there) {
    double squares = -1;
    queue_->Submit(
        MeasureTask{.gradient = pool_.data(),
                    .format = kernels::FindWireFormat("fp32"),
                    .elements = elements_,
                    .tiles = tiles_.data(),
                    .there = there},
        [&](const TaskResult& r) { squares = r.statistics.grad_sq; }, 0);
    queue_->WaitIdle();
    return squares;
  }
  DeviceQueue* queue() { return queue_.get(); }

 private:
  const uint64_t elements_;
  const DeviceBuffer pool_;
  std::vector<kernels::TileStatistics> tiles_;
  const std::unique_ptr<DeviceQueue> queue_;
};

std::string Values(uint64_t elements, float value) {
  const std::vector<float> values(elements, value);
  return {reinterpret_cast<const char*>(values.data()), 4 * elements};
}
SumTask::Term TermOf(uint64_t elements, float value) {
  return {.payload = Payload(Values(elements, value)), .first = 0, .last = elements};
}

// More terms than a staging takes from the host go there in portions, in their order: 1e8 swallows what comes before -1e8.
TEST_F(GpuSumsTest, ManyTermsAreAddedInTheirOrder) {
  constexpr uint64_t kElements = 5000;
  const std::vector<float> terms = {1, 2, 1e8f, 3, 1, 1, -1e8f, 5, 7, 11, 13};
  float wanted = terms[0];
  for (size_t i = 1; i < terms.size(); ++i) wanted += terms[i];
  Measured gradient(&gpu_, kElements);
  for (const bool together : {true, false}) {
    SumTask all = gradient.Sum(true, true);
    for (size_t i = 0; i < terms.size(); ++i) {
      if (together) {
        all.terms.push_back(TermOf(kElements, terms[i]));
        continue;
      }
      SumTask one = gradient.Sum(i == 0, true);
      one.terms.push_back(TermOf(kElements, terms[i]));
      gradient.Submit(std::move(one));
    }
    if (together) gradient.Submit(std::move(all));
    EXPECT_EQ(gradient.Squares(/*there=*/true), static_cast<double>(kElements) * wanted * wanted) << together;
  }
}

// The GPU may still be at sums of a step that came to nothing when the host's sum of the next is brought to the same place.
TEST_F(GpuSumsTest, AStaleSumDoesNotOverwriteTheHosts) {
  constexpr uint64_t kElements = 70'000;
  Measured gradient(&gpu_, kElements);
  const auto slots = std::make_shared<SharedSlots>(&gpu_, 64 << 20);
  for (int round = 0; round < 20; ++round) {
    Hold(true);
    const int copies = state_.copies_in;
    for (const bool stale : {true, false}) {
      SumTask sum = gradient.Sum(true, /*on_device=*/stale);
      sum.terms.push_back(TermOf(kElements, stale ? 2 : 1));
      Place(stale ? Lies::kDevice : Lies::kHost, slots.get(), &sum);
      gradient.Submit(std::move(sum));
      gradient.queue()->Wake();
    }
    std::thread release([&] {  // when the host's sum is on its way
      while (state_.copies_in < copies + 3) std::this_thread::yield();
      Hold(false);
    });
    EXPECT_EQ(gradient.Squares(/*there=*/false), kElements) << round;
    release.join();
  }
}

// A rank of a step whose sums are the host's may have sent to the GPU's memory all the same.
TEST_F(GpuSumsTest, TheHostSumsWhatLiesInTheGpusMemory) {
  constexpr uint64_t kElements = 5000;
  Measured gradient(&gpu_, kElements);
  const auto slots = std::make_shared<SharedSlots>(&gpu_, 1 << 20);
  SumTask sum = gradient.Sum(true, /*on_device=*/false);
  for (const float value : {1.0f, 2.0f, 3.0f}) sum.terms.push_back(TermOf(kElements, value));
  Place(Lies::kMixed, slots.get(), &sum);
  gradient.Submit(std::move(sum));
  EXPECT_EQ(gradient.Squares(/*there=*/false), 36.0 * kElements);
  EXPECT_EQ(state_.reads, 1);
  EXPECT_EQ(slots->given_back(), 1u);
}

TEST_F(GpuSumsTest, WhatWaitsTogetherIsLaunchedTogether) {
  const std::vector<uint64_t> sizes(200, 100);
  Model model(&gpu_, kernel_, sizes);
  const auto slots = std::make_shared<SharedSlots>(&gpu_, 8 << 20);
  model.Load();
  model.WaitIdle();
  Hold(true);
  for (size_t i = 0; i < sizes.size(); ++i) {
    SumTask sum = model.MakeSum(i, 1);
    Place(Lies::kDevice, slots.get(), &sum);
    sum.on_device = true;
    model.SubmitSum(i, std::move(sum));
    model.UpdateOne(i, 1, /*there=*/true);
  }
  Hold(false);
  model.WaitIdle();
  EXPECT_EQ(model.statistics().size(), sizes.size());
  EXPECT_LE(state_.sum_launches, 4 * GpuDevice::kStagingsOfSmall);
  EXPECT_LE(state_.update_launches, 4 * GpuDevice::kStagingsOfSmall);
}

TEST_F(GpuSumsTest, WeightsGoOutInSharedMemoryWithTheSameBits) {
  constexpr uint64_t kElements = 5000, kFirst = kernels::kTile;
  Model model(&gpu_, kernel_, {kElements});
  model.Load();
  model.Step(1);
  for (const char* format : {"bf16", "fp32"}) {
    model.EncodeTensor(0, format, 24);
    model.WaitIdle();
    const auto shared = gpu_.Export(1 << 20).value();
    EncodeWeightsTask task{.master = kernels::FindMasterFormat("split24"),
                           .format = kernels::FindWireFormat(format),
                           .first = 0,
                           .last = kElements,
                           .out = shared->data() + kFirst,
                           .out_on_device = true};
    const UpdateTask update = model.MakeUpdate(0, 1);
    std::copy_n(update.update.planes, task.planes.size(), task.planes.begin());
    model.queue()->Submit(task, kNoAnswer, 0);
    model.WaitIdle();
    const auto& piece = model.served()[model.served().size() - 1];  // the tensor is one piece
    std::vector<std::byte> got(piece.data.size());
    shared->Read(shared->data() + kFirst, got.size(), got.data());
    EXPECT_TRUE(got == piece.data) << format;
  }
}

TEST_F(GpuSumsTest, SharedMemoryIsCountedAndGivenBack) {
  EXPECT_THAT(std::string(cpu_.Export(1).status().message()), HasSubstr("processors"));
  const int64_t before = state_.live_bytes;
  {
    const auto shared = gpu_.Export(3 << 20).value();
    EXPECT_EQ(shared->bytes(), 4u << 20);
    EXPECT_EQ(gpu_.allocated_bytes(), 4u << 20);
    EXPECT_GE(shared->fd(), 0);
  }
  EXPECT_EQ(gpu_.allocated_bytes(), 0u);
  EXPECT_EQ(state_.live_bytes, before);
  state_.allocations_left = 0;
  EXPECT_EQ(gpu_.Export(1).status().code(), absl::StatusCode::kResourceExhausted);
  state_.shares = false;
  EXPECT_THAT(std::string(gpu_.Export(1).status().message()), HasSubstr("cuMemCreate"));
}

}  // namespace
}  // namespace ballast
