#include "server/device/cpu_device.h"

#include <gtest/gtest.h>

#include <algorithm>
#include <atomic>
#include <cmath>
#include <cstring>
#include <span>
#include <string_view>
#include <vector>

#include "absl/synchronization/blocking_counter.h"
#include "absl/synchronization/notification.h"

#include "server/plan/plan.h"
#include "tests/normals.h"
#include "tests/server/device/device_model.h"

namespace ballast {
namespace {

constexpr uint64_t kTensorElements = 300001;  // 74 tiles, the last one short

// One tensor on a device: load, updates, serve.
class Tensor {
 public:
  explicit Tensor(CpuDevice* device, const kernels::Kernel& kernel = kernels::Kernels()[0])
      : kernel_(kernel), queue_(*device->NewQueue({})) {
    for (const kernels::Plane& plane : kernel_.planes) {
      buffers_.push_back(device->Allocate(AlignedPlaneBytes(plane, kTensorElements), Place::kDevice).value());
      if (plane.kind == kernels::PlaneKind::kWeights) master_planes_[masters_++] = buffers_.back().data();
    }
    testing::FillNormal(1, 1, absl::MakeSpan(weights_));
    testing::FillNormal(2, 1, absl::MakeSpan(gradient_));
  }

  void Load() {
    queue_->Submit(LoadTask{.master = Master(),
                            .planes = master_planes_,
                            .format = kernels::FindWireFormat("fp32"),
                            .first = 0,
                            .last = kTensorElements,
                            .in = reinterpret_cast<const std::byte*>(weights_.data())},
                   [](const TaskResult& r) { EXPECT_TRUE(r.finite); });
  }
  UpdateTask MakeUpdate(uint64_t step) {
    UpdateTask task{.kernel = &kernel_, .tiles = tiles_.data()};
    for (size_t i = 0; i < buffers_.size(); ++i) task.update.planes[i] = buffers_[i].data();
    task.update.grad = gradient_.data();
    task.update.grad_format = kernels::FindWireFormat("fp32");
    task.update.n = kTensorElements;
    task.update.grad_scale = 1;
    task.update.clip = 1;
    task.update.random_key = kernels::RandomKey(9, step);
    task.update.stochastic = true;
    task.update.statistics = kernels::StatisticsLevel::kFull;
    kernel_.prepare(Hypers(), step, task.update.constants);
    room_.Give(&task);
    return task;
  }
  void Update(uint64_t step) {
    queue_->Submit(MakeUpdate(step), [this](const TaskResult& r) { norms_.push_back(r.statistics.grad_sq); });
  }
  std::vector<float> EncodeWeights() {
    std::vector<float> out(kTensorElements);
    queue_->Submit(EncodeWeightsTask{.master = Master(),
                                     .planes = master_planes_,
                                     .format = kernels::FindWireFormat("fp32"),
                                     .first = 0,
                                     .last = kTensorElements,
                                     .out = reinterpret_cast<std::byte*>(out.data())},
                   [](const TaskResult&) {});
    queue_->WaitIdle();
    return out;
  }
  std::vector<float> Scales(uint64_t row_length) {
    std::vector<float> scales(kTensorElements / row_length, -1.0f);
    queue_->Submit(ScaleTask{.master = Master(),
                             .planes = master_planes_,
                             .elements = kTensorElements,
                             .row_length = row_length,
                             .scales = scales.data()},
                   [](const TaskResult&) {});
    queue_->WaitIdle();
    return scales;
  }
  kernels::Statistics Measure() {
    kernels::Statistics measured = {};
    queue_->Submit(MeasureTask{.gradient = reinterpret_cast<const std::byte*>(gradient_.data()),
                               .format = kernels::FindWireFormat("fp32"),
                               .elements = kTensorElements,
                               .scale = 0.5f,
                               .tiles = tiles_.data()},
                   [&measured](const TaskResult& r) { measured = r.statistics; });
    queue_->WaitIdle();
    return measured;
  }
  // After so many updates.
  kernels::Curvature ProbeCurvature(uint64_t updates) {
    const std::byte* planes[kernels::kMaxPlanes] = {};
    for (size_t i = 0; i < buffers_.size(); ++i) planes[i] = buffers_[i].data();
    CurvatureTask task{.kernel = &kernel_, .probe = kernels::ProbeOf(kernel_, planes), .tiles = sampled_.data()};
    task.probe.grad = gradient_.data();
    task.probe.grad_format = kernels::FindWireFormat("fp32");
    task.probe.n = kTensorElements;
    task.probe.grad_scale = task.probe.clip = 1;
    task.probe.preconditioner = kernel_.precondition(Hypers(), updates);
    task.probe.first = kept_.empty();
    kept_.resize(kernels::SampledElements(kTensorElements));
    task.probe.before = kept_.data();
    kernels::Curvature curvature = {};
    queue_->Submit(task, [&curvature](const TaskResult& r) { curvature = r.curvature; });
    queue_->WaitIdle();
    return curvature;
  }
  void NextGradient() {
    for (float& g : gradient_) g = 0.5f * g + 0.125f;
  }
  const std::vector<float>& gradient() const { return gradient_; }
  const std::vector<double>& norms() const { return norms_; }
  std::vector<float>& weights() { return weights_; }
  DeviceQueue& queue() { return *queue_; }

 private:
  std::vector<double> Hypers() const {
    std::vector<double> hyper;
    for (const kernels::Hyper& h : kernel_.hypers) hyper.push_back(h.value);
    return hyper;
  }
  const kernels::MasterFormat* Master() const { return kernels::FindMasterFormat(kernel_.master); }

  const kernels::Kernel& kernel_;
  std::vector<DeviceBuffer> buffers_;
  std::array<std::byte*, kernels::kMaxPlanes> master_planes_ = {};
  size_t masters_ = 0;
  std::vector<float> weights_ = std::vector<float>(kTensorElements);
  std::vector<float> gradient_ = std::vector<float>(kTensorElements);
  std::vector<kernels::TileStatistics> tiles_ =
      std::vector<kernels::TileStatistics>(kTensorElements / kernels::kTile + 1);
  std::vector<kernels::TileCurvature> sampled_ =
      std::vector<kernels::TileCurvature>(kernels::SampledTiles(kTensorElements));
  std::vector<float> kept_;
  testing::MatrixRoom room_;
  std::vector<double> norms_;
  std::unique_ptr<DeviceQueue> queue_;
};

struct Trained {
  std::vector<float> weights;
  std::vector<double> norms;
};

Trained TrainedBy(uint32_t threads, const kernels::Kernel& kernel) {
  CpuDevice device({.threads = threads});
  Tensor tensor(&device, kernel);
  tensor.Load();
  for (uint64_t step = 1; step <= 3; ++step) tensor.Update(step);
  return {tensor.EncodeWeights(), tensor.norms()};
}

class CpuDeviceRuleTest : public ::testing::TestWithParam<const char*> {};

TEST_P(CpuDeviceRuleTest, AnyNumberOfThreadsGivesTheSameBits) {
  const kernels::Kernel& kernel = testing::KernelOfRule(GetParam());
  const Trained one = TrainedBy(1, kernel), many = TrainedBy(5, kernel);
  EXPECT_EQ(std::memcmp(one.weights.data(), many.weights.data(), one.weights.size() * sizeof(float)), 0);
  EXPECT_EQ(one.norms, many.norms);
  EXPECT_EQ(one.norms.size(), 3u);
}
INSTANTIATE_TEST_SUITE_P(Rules, CpuDeviceRuleTest,
                         ::testing::ValuesIn(kernels::RuleNames().begin(), kernels::RuleNames().end()));

// Tensors of one tile, of several and of many stand in one line: sums, measures, updates of one pass and two, and weights.
TEST_P(CpuDeviceRuleTest, AnyNumberOfTensorsAtOnceGivesTheSameBits) {
  const kernels::Kernel& kernel = testing::KernelOfRule(GetParam());
  std::vector<uint64_t> sizes;
  for (uint64_t i = 0; i < 300; ++i) sizes.push_back(i % 7 == 0 ? 0 : i % 50 == 1 ? 90001 : 13 * i);
  CpuDevice one({.threads = 1}), many({.threads = 5});
  testing::Model alone(&one, kernel, sizes), together(&many, kernel, sizes);
  for (testing::Model* model : {&alone, &together}) {
    model->Load();
    model->Step(1);
    model->JudgedStep(2);
    model->WaitIdle();
    model->SummedStep(3);
    model->EncodeWeights("int8-row", 13);
    model->EncodeWeights("fp32", 1);
    model->WaitIdle();
    EXPECT_TRUE(model->finite());
  }
  EXPECT_EQ(alone.sums(), sizes.size());
  EXPECT_TRUE(alone.served() == together.served());
  EXPECT_TRUE(alone.sealed_well() && together.sealed_well());
  ASSERT_EQ(alone.statistics().size(), together.statistics().size());
  for (size_t i = 0; i < alone.statistics().size(); ++i) {
    EXPECT_EQ(std::memcmp(&alone.statistics()[i], &together.statistics()[i], sizeof(kernels::Statistics)), 0) << i;
  }
}

// The same by hand: the first pass, its sums in order, then the second.
TEST(CpuDeviceTest, ARuleOfTwoPassesSeesTheWholeTensorBeforeItsUpdate) {
  const auto all = kernels::Kernels();
  const auto found = std::find_if(all.begin(), all.end(), [](const auto& k) { return k.finish != nullptr; });
  ASSERT_NE(found, all.end());
  CpuDevice device({.threads = 3});
  Tensor shared(&device, *found), by_hand(&device, *found);
  shared.Load();
  by_hand.Load();
  by_hand.EncodeWeights();  // waits
  for (uint64_t step = 1; step <= 2; ++step) {
    shared.Update(step);
    UpdateTask task = by_hand.MakeUpdate(step);
    const uint64_t tiles = kTensorElements / kernels::kTile + 1;
    std::vector<float> sums(tiles);
    for (uint64_t tile = tiles; tile-- > 0;) found->measure(task.update, tile, tile + 1, &sums[tile]);
    double sum = 0;
    for (const float s : sums) sum += s;
    found->finish(sum, kTensorElements, task.update.constants);
    found->update(task.update, 0, tiles, task.tiles);
  }
  EXPECT_EQ(shared.EncodeWeights(), by_hand.EncodeWeights());
}

TEST(CpuDeviceTest, ScalesAreTheLargestMagnitudesOfRowsForAnyNumberOfThreads) {
  static_assert(kTensorElements % 13 == 0);
  CpuDevice one({.threads = 1}), many({.threads = 5});
  Tensor a(&one), b(&many);
  a.Load();
  b.Load();
  const std::vector<float> weights = a.EncodeWeights();
  for (const uint64_t row_length : {uint64_t{1}, uint64_t{13}, kTensorElements / 13, kTensorElements}) {
    std::vector<float> wanted(kTensorElements / row_length);
    for (uint64_t e = 0; e < kTensorElements; ++e) {
      wanted[e / row_length] = std::max(wanted[e / row_length], std::abs(weights[e]));
    }
    EXPECT_EQ(a.Scales(row_length), wanted) << row_length;
    EXPECT_EQ(b.Scales(row_length), wanted) << row_length;
  }
}

TEST(CpuDeviceTest, AMeasureIsTheGradientsForAnyNumberOfThreads) {
  CpuDevice one({.threads = 1}), many({.threads = 5});
  Tensor a(&one), b(&many);
  double squares = 0, most = 0;
  for (const float g : a.gradient()) {
    const double scaled = 0.5 * static_cast<double>(g);
    squares += scaled * scaled;
    most = std::max(most, std::abs(scaled));
  }
  const kernels::Statistics measured = a.Measure();
  EXPECT_NEAR(measured.grad_sq, squares, 1e-6 * squares);
  EXPECT_EQ(measured.grad_absmax, most);
  EXPECT_EQ(measured.nonfinite, 0u);
  EXPECT_EQ(b.Measure().grad_sq, measured.grad_sq);
}

// The sampled tiles are shared, and the first probe only keeps the gradient.
TEST(CpuDeviceTest, AProbeIsTheStatesForAnyNumberOfThreads) {
  CpuDevice one({.threads = 1}), many({.threads = 5});
  Tensor a(&one), b(&many);
  for (Tensor* tensor : {&a, &b}) {
    tensor->Load();
    tensor->Update(1);
    EXPECT_EQ(tensor->ProbeCurvature(1).u_pu, 0);
    tensor->NextGradient();
  }
  const kernels::Curvature wanted = a.ProbeCurvature(1), got = b.ProbeCurvature(1);
  EXPECT_GT(wanted.u_pu, 0);
  EXPECT_NE(wanted.u_dg, 0);
  EXPECT_EQ(wanted.u_pu, got.u_pu);
  EXPECT_EQ(wanted.u_dg, got.u_dg);
}

TEST(CpuDeviceTest, AQueueKeepsItsOrderAndEveryQueueIsServed) {
  CpuDevice device({.threads = 2});
  constexpr size_t kQueues = 3;
  constexpr int kTasks = 200;
  std::vector<std::unique_ptr<Tensor>> tensors;
  std::vector<std::vector<int>> order(kQueues);
  absl::BlockingCounter done(kQueues * kTasks);
  for (size_t q = 0; q < kQueues; ++q) tensors.push_back(std::make_unique<Tensor>(&device));
  for (int i = 0; i < kTasks; ++i) {
    for (size_t q = 0; q < kQueues; ++q) {
      std::byte* const nothing = nullptr;
      tensors[q]->queue().Submit(EncodeWeightsTask{.master = &kernels::MasterFormats()[0], .out = nothing},
                                 [&order, &done, q, i](const TaskResult&) {
                                   order[q].push_back(i);
                                   done.DecrementCount();
                                 });
    }
  }
  done.Wait();
  for (const auto& seen : order) {
    ASSERT_EQ(seen.size(), static_cast<size_t>(kTasks));
    EXPECT_TRUE(std::is_sorted(seen.begin(), seen.end()));
  }
}

TEST(CpuDeviceTest, ALongQueueDoesNotHoldUpAShortOne) {
  std::atomic<int> updated = 0;
  CpuDevice device({.threads = 2});
  Tensor busy(&device), brief(&device);
  busy.Load();
  brief.Load();
  brief.EncodeWeights();
  const auto count = [&updated](const TaskResult&) { ++updated; };
  for (uint64_t step = 1; step <= 200; ++step) busy.queue().Submit(busy.MakeUpdate(step), count);
  brief.Update(1);
  brief.EncodeWeights();
  EXPECT_LT(updated, 200);
}

// By several threads, in the ranks' order; the payloads are gone before the answer.
TEST(CpuDeviceTest, ASumIsThatOfItsTermsInOrder) {
  struct Counted : Payload::Lender {
    void GiveBack(uint32_t) override { ++given_back; }
    std::atomic<int> given_back = 0;
  };
  constexpr uint64_t kRanks = 3, kPartBegin = 70001;  // which the last rank has from here on
  std::vector<std::vector<float>> sent;
  for (uint64_t rank = 0; rank < kRanks; ++rank) sent.push_back(testing::NormalValues(rank, 1, kTensorElements));
  for (const uint32_t threads : {1u, 5u}) {
    CpuDevice device({.threads = threads});
    const auto queue = device.NewQueue({}).value();
    std::vector<float> sum(kTensorElements, std::nanf(""));  // what an earlier step left
    const auto lender = std::make_shared<Counted>();
    SumTask task{.to = reinterpret_cast<std::byte*>(sum.data()),
                 .elements = kTensorElements,
                 .format = kernels::FindWireFormat("fp32"),
                 .first = true};
    for (uint64_t r = 0; r < kRanks; ++r) {
      const uint64_t first = r + 1 < kRanks ? 0 : kPartBegin;
      task.terms.push_back({.payload = Payload(lender, 0, std::as_bytes(std::span(sent[r]).subspan(first))),
                            .first = first,
                            .last = kTensorElements});
    }
    int back_when_done = 0;
    queue->Submit(std::move(task), [&](const TaskResult&) { back_when_done = lender->given_back; });
    queue->WaitIdle();
    EXPECT_EQ(back_when_done, static_cast<int>(kRanks));
    for (uint64_t e = 0; e < kTensorElements; ++e) {
      const float two = sent[0][e] + sent[1][e];
      ASSERT_EQ(sum[e], e < kPartBegin ? two : two + sent[2][e]) << e;
    }
  }
}

TEST(CpuDeviceTest, LoadRefusesNan) {
  CpuDevice device({.threads = 2});
  Tensor tensor(&device);
  tensor.weights()[kTensorElements - 1] = std::numeric_limits<float>::quiet_NaN();
  absl::Notification done;
  bool finite = true;
  std::array<std::byte*, kernels::kMaxPlanes> planes = {};
  const kernels::MasterFormat& master = *kernels::FindMasterFormat("fp32");
  DeviceBuffer plane = device.Allocate(kernels::PlaneBytes(master.planes[0], kTensorElements), Place::kDevice).value();
  planes[0] = plane.data();
  tensor.queue().Submit(LoadTask{.master = &master,
                                 .planes = planes,
                                 .format = kernels::FindWireFormat("fp32"),
                                 .first = 0,
                                 .last = kTensorElements,
                                 .in = reinterpret_cast<const std::byte*>(tensor.weights().data())},
                        [&](const TaskResult& r) {
                          finite = r.finite;
                          done.Notify();
                        });
  done.WaitForNotification();
  EXPECT_FALSE(finite);
}

TEST(CpuDeviceTest, AllocatingMoreThanThereIsReturnsAStatus) {
  CpuDevice device({.threads = 1});
  const auto buffer = device.Allocate(uint64_t{1} << 60, Place::kDevice);
  EXPECT_EQ(buffer.status().code(), absl::StatusCode::kResourceExhausted);
  EXPECT_EQ(device.allocated_bytes(), 0u);
}

TEST(CpuDeviceTest, MemoryIsZeroAlignedAndCounted) {
  CpuDevice device({.threads = 1});
  {
    const auto buffer = device.Allocate(10000, Place::kHost).value();
    EXPECT_EQ(reinterpret_cast<uintptr_t>(buffer.data()) % kAlignment, 0u);
    for (uint64_t i = 0; i < buffer.bytes(); ++i) ASSERT_EQ(buffer.data()[i], std::byte{0});
    EXPECT_EQ(device.allocated_bytes(), 10000u);
  }
  EXPECT_EQ(device.allocated_bytes(), 0u);
}

}  // namespace
}  // namespace ballast
