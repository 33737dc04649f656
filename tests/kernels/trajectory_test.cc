// Whole trajectories of the kernels beside the oracle's in double.
#include <gtest/gtest.h>

#include "tests/kernels/decoded.h"

namespace ballast::kernels {
namespace {

struct Difference {
  double weights;  // |kernel - oracle| / |oracle|
  double travel;   // |kernel - oracle| / |oracle - start|
};

// 200 steps with slowly turning, noisy gradients.
Difference Follow(const Kernel& kernel, double weight_decay) {
  constexpr uint64_t kElements = 2048 + 9, kSteps = 200;
  const std::vector<double> hyper = Hypers(kernel, {{"weight_decay", weight_decay}});
  const oracle::Hypers wanted = HypersOf(kernel, hyper);
  Tensor tensor(kernel, kElements);
  Normals random(12);
  tensor.SetWeights(random.Vector(kElements, 0.05));
  const std::vector<float> start = tensor.Weights();
  std::vector<oracle::Element> states(kElements);
  for (uint64_t i = 0; i < kElements; ++i) states[i].weight = oracle::Exact(static_cast<double>(start[i]));
  for (uint64_t t = 1; t <= kSteps; ++t) {
    std::vector<float> grad = random.Vector(kElements, 0.01);
    for (uint64_t i = 0; i < kElements; ++i) {
      grad[i] += 0.01f * std::sin(0.02f * static_cast<float>(t) + static_cast<float>(i));
      const oracle::Stepped s = oracle::Step(kernel.rule, wanted, static_cast<double>(grad[i]), t, states[i], {});
      states[i] = {oracle::Exact(s.weight.value), oracle::Exact(s.m.value), oracle::Exact(s.v.value)};
    }
    tensor.Step(Encoded(FindWireFormat("fp32"), grad), {.hyper = hyper, .t = t});
  }
  const std::vector<float> end = tensor.Weights();
  double error = 0, size = 0, travel = 0;
  for (uint64_t i = 0; i < kElements; ++i) {
    const double x = states[i].weight.value, s = static_cast<double>(start[i]);
    error += (static_cast<double>(end[i]) - x) * (static_cast<double>(end[i]) - x);
    size += x * x;
    travel += (x - s) * (x - s);
  }
  return {std::sqrt(error / size), std::sqrt(error / travel)};
}

// A step rounds the weight once (x + d), by up to 2^-24 of itself: 200 steps random-walk to sqrt(200) * 2^-24 / sqrt(3)
// = 5e-7 of the norm, and the roundings of d (some 2^-22 of steps that add up to the travel, of the order of the weight)
// stay below that.
TEST(TrajectoryTest, ExactFormatsFollowTheOracle) {
  for (const char* master : {"fp32", "split32"}) {
    for (const double decay : {0.0, 0.01, 0.1}) {
      const Difference d = Follow(*FindKernel("adamw", master, "fp32"), decay);
      EXPECT_LE(d.weights, 1e-6) << master << " decay " << decay;
      EXPECT_GT(d.weights, 0) << "nothing was compared";
    }
  }
}

// Where a weight hardly moves, its rounding repeats from step to step: 200 times 2^-25 of it.
TEST(TrajectoryTest, OtherRulesInExactFormatsFollowTheOracle) {
  for (const char* rule : {"adam", "sgd", "sgdw"}) {
    EXPECT_LE(Follow(*FindKernel(rule, "fp32", "fp32"), 0.01).weights, 6e-6) << rule;
  }
}

// split32 stores every fp32 number exactly.
TEST(TrajectoryTest, Split32TakesExactlyTheStepsOfFp32) {
  Tensor split(*FindKernel("adamw", "split32", "fp32"), 1000), plain(*FindKernel("adamw", "fp32", "fp32"), 1000);
  const std::vector<float> start = Normals(1).Vector(1000);
  split.SetWeights(start);
  plain.SetWeights(start);
  Normals random(2);
  for (uint64_t t = 1; t <= 100; ++t) {
    const Payload grad = Encoded(FindWireFormat("fp32"), random.Vector(1000));
    split.Step(grad, {.t = t});
    plain.Step(grad, {.t = t});
  }
  EXPECT_EQ(split.Weights(), plain.Weights());
}

// Rounding to 24 bits is off by at most 2^-15 of the weight a step, with variance at most (2^-16)^2 for the stochastic
// form: sqrt(200) * 2^-16 = 2.2e-4 of the norm.
TEST(TrajectoryTest, Split24FollowsWithinItsRounding) {
  EXPECT_LE(Follow(*FindKernel("adamw", "split24", "fp32"), 0.01).weights, 2.2e-4);
}

// Codes of m err by up to 1/127 of a block's largest and those of v by up to 1/255 of its root, a few per cent of a
// step; errors of different steps are independent, so they stay a few per cent of the travel.
TEST(TrajectoryTest, CompandedStateFollowsWithinAFewPerCentOfTheTravel) {
  for (const char* master : {"fp32", "split24", "split32"}) {
    const Difference d = Follow(*FindKernel("adamw", master, "companded8"), 0.01);
    EXPECT_LE(d.travel, 0.05) << master;
    EXPECT_GT(d.travel, 1e-4) << master;
  }
}

}  // namespace
}  // namespace ballast::kernels
