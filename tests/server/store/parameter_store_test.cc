// What a run asks of its weights before it commits to an update, on the CPU's device and on the GPU's: an update that
// is only tried, and the curvature along the last one. And what the store of an amended run takes over.
#include "server/store/parameter_store.h"

#include <gtest/gtest.h>

#include <algorithm>
#include <cmath>
#include <cstring>
#include <numeric>
#include <random>

#include "absl/synchronization/blocking_counter.h"

#include "server/convert/convert.h"
#include "server/device/cpu_device.h"
#include "server/device/gpu_device.h"
#include "tests/server/device/fake_gpu.h"
#include "tests/server/specs.h"

namespace ballast {
namespace {

struct Kernel {
  const char *rule, *master, *state;
};

// A run of tensors of several sizes, the first with two sampled tiles, and its gradients in the device's memory. With a
// `past` it has a tensor more, and takes the others over.
class Store {
 public:
  Store(Device* device, const Kernel& kernel, Store* past = nullptr) {
    v1::RunSpec wire = testing::MakeSpec("r1", {{"a", {70000}, "fp32"}, {"b", {64, 64}, "fp32"}, {"c", {5}, "fp32"}});
    const auto kept = static_cast<uint32_t>(past == nullptr ? 0 : wire.tensors_size());
    if (past != nullptr) {
      *wire.add_tensors() = wire.tensors(1);
      wire.mutable_tensors(3)->set_name("d");
    }
    wire.mutable_groups(0)->set_rule(kernel.rule);
    wire.mutable_groups(0)->set_master(kernel.master);
    wire.mutable_groups(0)->set_state(kernel.state);
    spec_ = ToRunSpec(wire, {}).value();
    spec_.spikes.curvature = true;
    plan_ = MakePlan(spec_);
    const ParameterStore* const past_store = past == nullptr ? nullptr : past->store_.get();
    store_ = ParameterStore::Create(
                 {.spec = &spec_, .plan = &plan_, .devices = {device}, .strand = &strand_, .past = past_store})
                 .value();
    if (past != nullptr) store_->TakeOver(past->store_.get());
    for (uint32_t i = 0; i < tensors(); ++i) {
      gradients_.push_back(device->Allocate(4 * spec_.tensors[i].elements + 64, Place::kHost).value());
      if (i >= kept) Load(i);
    }
    hyper_ = spec_.groups[0].hyper;
  }
  ~Store() {
    store_->WaitIdle();
    strand_.Stop();
  }

  uint32_t tensors() const { return static_cast<uint32_t>(spec_.tensors.size()); }
  ParameterStore& operator*() { return *store_; }
  ParameterStore* operator->() { return store_.get(); }
  const Plan& plan() const { return plan_; }
  uint64_t gradient_bytes() const {
    return std::accumulate(gradients_.begin(), gradients_.end(), uint64_t{0},
                           [](uint64_t sum, const DeviceBuffer& buffer) { return sum + buffer.bytes(); });
  }
  void Set(std::string_view name, double value) {
    const auto hypers = spec_.groups[0].kernel->hypers;
    for (size_t h = 0; h < hypers.size(); ++h) {
      if (hypers[h].name == name) hyper_[h] = value;
    }
  }

  // Normals of their own for each step.
  void FillGradients(uint64_t step) {
    for (uint32_t i = 0; i < tensors(); ++i) Fill(i, 100 * step + i, 0.1f, Gradient(i));
  }
  float* Gradient(uint32_t tensor) { return reinterpret_cast<float*>(gradients_[tensor].data()); }
  std::vector<float> Weights(uint32_t tensor) {
    const TensorSpec& t = spec_.tensors[tensor];
    std::vector<float> weights(t.elements);
    for (uint64_t first = 0; first < t.elements; first += spec_.chunk_elements) {
      const uint64_t last = std::min(t.elements, first + spec_.chunk_elements);
      WeightPiece piece;
      Wait(1, [&](auto done) { store_->EncodeWeights({tensor, first, last}, &piece, std::move(done)); });
      std::memcpy(weights.data() + first, piece.encoded().data(), piece.encoded().size());
    }
    return weights;
  }

  // Elements of the momentum, of the weights as they are served, and of all that there is of them: the same bits.
  std::vector<std::string> Read(TensorRange range) {
    WeightPiece served, master, momentum;
    StateRoom room;
    Wait(1, [&](auto done) { store_->EncodeWeights(range, &served, std::move(done)); });
    Wait(1, [&](auto done) { store_->EncodeMaster(range, &master, std::move(done)); });
    Wait(1, [&](auto done) {
      constexpr auto kMomentum = kernels::PlaneKind::kMomentum;
      EXPECT_TRUE(store_->DecodeState(range, kMomentum, &momentum, &room, std::move(done)).ok());
    });
    return {served.data, master.data, momentum.data};
  }

  StoreImage Image() {
    StoreImage image = store_->NewImage().value();
    for (uint32_t i = 0; i < tensors(); ++i) {
      Wait(1, [&](auto done) { store_->Save(i, &image, std::move(done)); });
    }
    return image;
  }

  ParameterStore::UpdateValues Values(uint32_t tensor, uint64_t step) {
    return {.step = step,
            .gradient_divisor = 2,
            .hyper = hyper_,
            .gradient = gradients_[tensor].data(),
            .gradient_format = kernels::FindWireFormat("fp32")};
  }
  using Call = void (ParameterStore::*)(uint32_t, const ParameterStore::UpdateValues&, ParameterStore::Done);
  TaskResult Do(Call call, uint32_t tensor, uint64_t step) {
    TaskResult result;
    Wait(1, [&](auto done) {
      (*store_.*call)(tensor, Values(tensor, step), [&result, done = std::move(done)](const TaskResult& r) mutable {
        result = r;
        done(r);
      });
    });
    return result;
  }
  // Makes the call for every tensor, one submitted behind the other.
  std::vector<TaskResult> DoAll(Call call, uint64_t step) {
    std::vector<TaskResult> results(tensors());
    absl::BlockingCounter left(static_cast<int>(tensors()));
    for (uint32_t i = 0; i < tensors(); ++i) {
      (*store_.*call)(i, Values(i, step), [&, i](const TaskResult& r) {
        results[i] = r;
        left.DecrementCount();
      });
    }
    left.Wait();
    return results;
  }

 private:
  void Fill(uint32_t tensor, uint64_t seed, float scale, float* values) const {
    std::mt19937 random(static_cast<uint32_t>(seed));
    std::normal_distribution<float> normal(0, scale);
    for (uint64_t e = 0; e < spec_.tensors[tensor].elements; ++e) values[e] = normal(random);
  }
  void Load(uint32_t tensor) {
    const uint64_t elements = spec_.tensors[tensor].elements;
    std::vector<float> weights(elements);
    Fill(tensor, tensor, 1, weights.data());
    for (uint64_t first = 0; first < elements; first += spec_.chunk_elements) {
      Wait(1, [&](auto done) {
        store_->Load({tensor, first, std::min(elements, first + spec_.chunk_elements)}, kernels::FindWireFormat("fp32"),
                     reinterpret_cast<const std::byte*>(weights.data() + first), std::move(done));
      });
    }
  }
  template <class Submit>
  static void Wait(int count, const Submit& submit) {
    absl::BlockingCounter left(count);
    submit([&left](const TaskResult&) { left.DecrementCount(); });
    left.Wait();
  }

  RunSpec spec_;
  Plan plan_;
  Strand strand_{{.name = "t"}};
  std::vector<double> hyper_;
  std::vector<DeviceBuffer> gradients_;
  std::unique_ptr<ParameterStore> store_;
};

constexpr auto kProbe = &ParameterStore::DryUpdate, kUpdate = &ParameterStore::Update;
constexpr auto kCurvature = &ParameterStore::Curvature;

class ParameterStoreTest : public ::testing::TestWithParam<bool> {
 protected:
  ParameterStoreTest() {
    if (GetParam()) {
      device_ = std::make_unique<GpuDevice>(std::make_unique<FakeGpu>(&gpu_));
    } else {
      device_ = std::make_unique<CpuDevice>(CpuDevice::Options{.threads = 3});
    }
  }
  FakeGpuState gpu_;
  std::unique_ptr<Device> device_;
};

TEST_P(ParameterStoreTest, AProbeSaysWhatTheUpdateThenSaysAndTouchesNothing) {
  for (const Kernel& kernel : {Kernel{"adamw", "split24", "companded8"}, {"stable_adamw", "bf16", "companded8"}}) {
    Store store(device_.get(), kernel);
    for (uint64_t step = 1; step <= 3; ++step) {
      SCOPED_TRACE(step);
      store.FillGradients(step);
      if (step == 2) store.Gradient(0)[77] = NAN;
      std::vector<std::vector<float>> before;
      for (uint32_t i = 0; i < store.tensors(); ++i) before.push_back(store.Weights(i));
      const std::vector<TaskResult> tried = store.DoAll(kProbe, step);
      for (uint32_t i = 0; i < store.tensors(); ++i) {
        EXPECT_EQ(store.Weights(i), before[i]);
        EXPECT_EQ(store->updates(i), step - 1);
        EXPECT_EQ(store->step_of(i), step - 1);
      }
      const std::vector<TaskResult> taken = store.DoAll(kUpdate, step);
      for (uint32_t i = 0; i < store.tensors(); ++i) {
        EXPECT_NE(store.Weights(i), before[i]);
        const kernels::Statistics &a = tried[i].statistics, &b = taken[i].statistics;
        EXPECT_EQ(a.grad_sq, b.grad_sq);
        EXPECT_EQ(a.update_sq, b.update_sq);
        EXPECT_EQ(a.rms_sq, b.rms_sq);
        EXPECT_EQ(a.grad_absmax, b.grad_absmax);
        EXPECT_EQ(a.nonfinite, b.nonfinite);
        EXPECT_EQ(a.rejected, b.rejected);
        EXPECT_GT(a.rms_sq, 0);
        EXPECT_EQ(a.nonfinite, step == 2 && i == 0 ? 1u : 0u);
      }
    }
  }
}

// Blocks and tiles are cut in the middle; 70,000 is one chunk.
TEST_P(ParameterStoreTest, PartsOfAChunkHaveTheBitsOfTheWhole) {
  for (const Kernel& kernel : {Kernel{"adamw", "split24", "companded8"}, {"adamw", "flash24", "flash8"}}) {
    Store store(device_.get(), kernel);
    store.FillGradients(1);
    store.DoAll(kUpdate, 1);
    const std::vector<std::string> whole = store.Read({0, 0, 70000});
    for (const TensorRange range : {TensorRange{0, 0, 1},
                                    {0, 69999, 70000},
                                    {0, 5, 4096},
                                    {0, 4095, 4097},
                                    {0, 4096, 8192},
                                    {0, 12345, 54321},
                                    {0, 1, 70000}}) {
      const std::vector<std::string> part = store.Read(range);
      for (size_t i = 0; i < part.size(); ++i) {
        EXPECT_TRUE(part[i] == whole[i].substr(range.first * 4, (range.last - range.first) * 4))
            << kernel.master << ", [" << range.first << ", " << range.last << "), " << i;
      }
    }
  }
}

TEST_P(ParameterStoreTest, AStoreTakesThePlanesOfAnotherOverAsTheyLie) {
  for (const Kernel& kernel : {Kernel{"adamw", "split24", "companded8"}, {"adamw", "fp32", "fp32"}}) {
    Store past(device_.get(), kernel), twin(device_.get(), kernel);
    const auto update = [](Store* store, uint64_t step) {
      store->FillGradients(step);
      store->DoAll(kUpdate, step);
    };
    for (Store* store : {&past, &twin}) update(store, 1);
    Store grown(device_.get(), kernel, &past);
    EXPECT_EQ(grown->bytes().stored(), grown.plan().bytes.stored());
    EXPECT_EQ(past->bytes().stored(), 0u) << "no weight is there twice";
    EXPECT_EQ(grown->updates(3), 0u);
    for (uint64_t step = 2; step <= 4; ++step) {
      for (uint32_t i = 0; i < past.tensors(); ++i) {
        EXPECT_EQ(grown.Weights(i), twin.Weights(i));
        EXPECT_EQ(grown->updates(i), step - 1);
        EXPECT_EQ(grown->step_of(i), step - 1);
      }
      for (Store* store : {&grown, &twin}) update(store, step);
    }
    const StoreImage image = grown.Image();
    std::vector<std::vector<float>> saved;
    for (uint32_t i = 0; i < grown.tensors(); ++i) saved.push_back(grown.Weights(i));
    update(&grown, 5);
    for (uint32_t i = 0; i < grown.tensors(); ++i) {
      EXPECT_NE(grown.Weights(i), saved[i]);
      grown->Restore(i, image, {grown->updates(i) - 1, 4});
      EXPECT_EQ(grown.Weights(i), saved[i]);
    }
  }
}

// fp32 holds all that the others have.
TEST_P(ParameterStoreTest, WhatIsStoredOtherwiseIsMadeOfThePlanesAsTheyWillBe) {
  Store past(device_.get(), {"adamw", "split24", "companded8"});
  past.FillGradients(1);
  past.DoAll(kUpdate, 1);
  const StoreImage image = past.Image();
  const std::vector<std::string> before = past.Read({0, 0, 70000});
  past.FillGradients(2);
  past.DoAll(kUpdate, 2);
  for (uint32_t i = 0; i < past.tensors(); ++i) past->Restore(i, image, {1, 1});  // nobody has waited for it
  Store wide(device_.get(), {"adamw", "fp32", "fp32"}, &past);
  EXPECT_EQ(wide->bytes().stored(), wide.plan().bytes.stored());
  EXPECT_EQ(wide.Read({0, 0, 70000}), before);
  EXPECT_EQ(wide->updates(0), 1u);
}

// f = sum x^2 / 2, so g is x and the Hessian 1; with an eps that drowns sqrt(vhat), P is eps, and lr kappa lr / eps.
TEST_P(ParameterStoreTest, TheCurvatureOfAKnownLossIsFound) {
  Store store(device_.get(), {"adamw", "fp32", "fp32"});
  constexpr double kEps = 1e6, kLr = 1e5;
  for (const auto& [name, value] : {std::pair{"lr", kLr}, {"eps", kEps}, {"weight_decay", 0.0}, {"beta1", 0.5}}) {
    store.Set(name, value);
  }
  for (uint64_t step = 1; step <= 4; ++step) {
    for (uint32_t i = 0; i < store.tensors(); ++i) {
      const std::vector<float> weights = store.Weights(i);
      for (size_t e = 0; e < weights.size(); ++e) store.Gradient(i)[e] = 2 * weights[e];  // the divisor is 2
      const kernels::Curvature c = store.Do(kCurvature, i, step).curvature;
      EXPECT_EQ(c.nonfinite, 0u);
      if (step == 1) {
        EXPECT_EQ(c.u_dg, 0);
        EXPECT_EQ(c.u_pu, 0);
      } else {
        EXPECT_NEAR(-c.u_dg / c.u_pu, kLr / kEps, 1e-5 * kLr / kEps) << "step " << step << ", tensor " << i;
      }
      store.Do(kUpdate, i, step);
    }
  }
}

// A curvature is defined only if exactly one update lies between the two gradients.
TEST_P(ParameterStoreTest, TheCurvatureIsUndefinedAfterASkippedStepAndALoad) {
  Store store(device_.get(), {"adamw", "split24", "companded8"});
  const auto defined = [&](uint64_t step) { return store.Do(kCurvature, 0, step).curvature.u_pu > 0; };
  store.FillGradients(1);
  EXPECT_FALSE(defined(1));
  EXPECT_FALSE(defined(2));  // no update yet
  store.Do(kUpdate, 0, 2);
  EXPECT_TRUE(defined(3));
  EXPECT_FALSE(defined(4));  // step 3 was skipped
  store.Do(kUpdate, 0, 4);
  EXPECT_TRUE(defined(5));
  store.Do(kUpdate, 0, 5);
  store.Do(kUpdate, 0, 6);  // without a probe before it
  EXPECT_FALSE(defined(7));
  store.Do(kUpdate, 0, 7);
  EXPECT_TRUE(defined(8));
  store.Do(kUpdate, 0, 8);
  store->Load({.tensor = 0, .first = 0, .last = 4096}, kernels::FindWireFormat("fp32"),
              reinterpret_cast<const std::byte*>(store.Gradient(0)), [](const TaskResult&) {});
  EXPECT_FALSE(defined(9));
}

INSTANTIATE_TEST_SUITE_P(Devices, ParameterStoreTest, ::testing::Bool(),
                         [](const auto& test) { return test.param ? "Gpu" : "Cpu"; });

// And what waits together is launched together.
TEST(ParameterStoreOnBothTest, TheGpusDeviceProbesWithTheCpusBits) {
  CpuDevice cpu({.threads = 2});
  FakeGpuState state;
  GpuDevice gpu(std::make_unique<FakeGpu>(&state));
  for (const kernels::Kernel& kernel : kernels::Kernels()) {
    if (kernel.curvature == nullptr) continue;
    SCOPED_TRACE(std::string(kernel.rule) + " " + kernel.master + " " + kernel.state);
    Store a(&cpu, {kernel.rule, kernel.master, kernel.state}), b(&gpu, {kernel.rule, kernel.master, kernel.state});
    for (uint64_t step = 1; step <= 2; ++step) {
      a.FillGradients(step);
      b.FillGradients(step);
      const auto wanted = a.DoAll(kCurvature, step), got = b.DoAll(kCurvature, step);
      const auto tried = a.DoAll(kProbe, step), tried_there = b.DoAll(kProbe, step);
      for (uint32_t i = 0; i < a.tensors(); ++i) {
        EXPECT_EQ(wanted[i].curvature.u_dg, got[i].curvature.u_dg);
        EXPECT_EQ(wanted[i].curvature.u_pu, got[i].curvature.u_pu);
        EXPECT_EQ(got[i].curvature.u_pu > 0, step == 2);
        EXPECT_EQ(tried[i].statistics.update_sq, tried_there[i].statistics.update_sq);
      }
      a.DoAll(kUpdate, step);
      b.DoAll(kUpdate, step);
    }
  }
}

TEST(ParameterStoreOnBothTest, ProbesThatWaitTogetherAreLaunchedTogether) {
  FakeGpuState state;
  GpuDevice gpu(std::make_unique<FakeGpu>(&state));
  Store store(&gpu, {"adamw", "split24", "companded8"});
  store.FillGradients(1);
  {
    absl::MutexLock lock(&state.mu);
    state.held = true;
  }
  constexpr int kRounds = 40;
  absl::BlockingCounter left(kRounds * 3);
  for (int round = 0; round < kRounds; ++round) {
    for (uint32_t i = 0; i < store.tensors(); ++i) {
      store->Curvature(i, store.Values(i, 1), [&left](const TaskResult&) { left.DecrementCount(); });
    }
  }
  {
    absl::MutexLock lock(&state.mu);
    state.held = false;
  }
  left.Wait();
  // Three tensors at most, since a tensor's next probe reads what the one before it kept; the first may go alone.
  EXPECT_GE(state.probe_launches, kRounds);
  EXPECT_LE(state.probe_launches, kRounds + 2 * GpuDevice::kStagings);
}

TEST(ParameterStoreOnBothTest, KeptGradientsAreReservedWhereTheRunAsks) {
  CpuDevice device({.threads = 1});
  {
    Store store(&device, {"adamw", "split24", "companded8"});
    // Tiles 0 and 16 of the first; the second whole; a row of the third.
    const uint64_t kept = 4 * (4096 + 4096 + 4096 + 256);
    EXPECT_EQ(store.plan().shards[0].kept_bytes, kept);
    const PlanBytes plan = store.plan().bytes;
    EXPECT_EQ(device.allocated_bytes() - store.gradient_bytes(),
              plan.weights + plan.momentum + plan.variance + store->bytes().staging);
  }
  Store without(&device, {"sgd", "split24", "companded8"});
  EXPECT_EQ(without.plan().shards[0].kept_bytes, 0u);
}

}  // namespace
}  // namespace ballast
