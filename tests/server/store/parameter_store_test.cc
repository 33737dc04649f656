// What a run asks of its weights before it commits to an update, on the CPU's device and on the GPU's: an update that
// is only tried, and the curvature along the last one.
#include "server/store/parameter_store.h"

#include <gtest/gtest.h>

#include <cmath>

#include "tests/server/store/trained_store.h"

namespace ballast::testing {
namespace {

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
  EXPECT_LE(state.probe_launches, kRounds + 2 * GpuDevice::kStagingsOfSmall);
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
}  // namespace ballast::testing
