// What companded8 must hold over thousands of steps, through the kernel itself.
#include <gtest/gtest.h>

#include "tests/kernels/decoded.h"

namespace ballast::kernels {
namespace {

// Every v of the tensor is 1: the largest code under a scale of 1.
void SetVarianceToOne(Tensor* tensor) {
  const size_t p = MomentPlane(tensor->kernel(), PlaneKind::kVariance);
  std::memset(tensor->plane(p), 0xff, tensor->size());
  const uint16_t one = 0x3f80;
  for (uint64_t b = 0; b < tensor->size() / kBlock; ++b) std::memcpy(tensor->plane(p + 1) + b * 2, &one, 2);
}

double Mean(const std::vector<double>& values) {
  double sum = 0;
  for (const double x : values) sum += x;
  return sum / static_cast<double>(values.size());
}

// Mean of v after 3000 steps of noise from v = 1, over the exact mean for the same gradients.
double RatioToExact(double beta2, double deviation) {
  const Kernel& kernel = *FindKernel("adamw", "split24", "companded8");
  const uint64_t n = 128 * kBlock;
  Tensor tensor(kernel, n);
  SetVarianceToOne(&tensor);
  const std::vector<double> hyper = Hypers(kernel, {{"beta2", beta2}, {"lr", 0}});
  Normals random(5);
  constexpr uint64_t kPool = 1 << 20;
  Payload pool = Encoded(FindWireFormat("fp32"), random.Vector(kPool + n, deviation));
  std::vector<double> squares(n, 1);
  StepOptions options{.hyper = hyper, .statistics = StatisticsLevel::kOff};
  std::vector<TileStatistics> stats(tensor.tiles());
  const auto* values = reinterpret_cast<const float*>(pool.bytes.data());
  for (options.t = 1; options.t <= 3000; ++options.t) {
    const uint64_t offset = random.Word() % kPool;
    Update update = tensor.MakeUpdate(pool, options);
    update.grad = values + offset;
    kernel.update(update, 0, tensor.tiles(), stats.data());
    for (uint64_t i = 0; i < n; ++i) {
      const double g = static_cast<double>(values[offset + i]);
      squares[i] = beta2 * squares[i] + (1 - beta2) * g * g;
    }
  }
  return Mean(DecodeMoment(tensor, PlaneKind::kVariance).values) / Mean(squares);
}

TEST(AcceptanceTest, TheVarianceFollowsSteadyGradients) {
  for (const double beta2 : {0.99, 0.999, 0.9999}) EXPECT_NEAR(RatioToExact(beta2, 1), 1, 0.01) << beta2;
}

TEST(AcceptanceTest, TheVarianceFollowsGradientsThatHalve) {
  for (const double beta2 : {0.99, 0.999, 0.9999}) EXPECT_NEAR(RatioToExact(beta2, 0.5), 1, 0.01) << beta2;
}

struct Steps {
  double rms = 0, largest = 0;  // the worst of all steps, in lr
};

// One element of each block sees g = 1 once, all else is 1e-4, and 400 steps later all gradients are 0.
Steps WorstAfterAnOutlier(uint64_t outlier) {
  constexpr double kLr = 1e-3;
  const Kernel& kernel = *FindKernel("adamw", "fp32", "companded8");
  const uint64_t n = 64 * kBlock;
  Tensor tensor(kernel, n);
  StepOptions options{.hyper = Hypers(kernel, {{"lr", kLr}, {"weight_decay", 0}}), .statistics = StatisticsLevel::kOff};
  std::vector<float> quiet(n, 1e-4f), loud = quiet;
  for (uint64_t i = 0; i < n; i += kBlock) loud[i] = 1;
  const Payload usual = Encoded(FindWireFormat("fp32"), quiet), spike = Encoded(FindWireFormat("fp32"), loud),
                zero = Encoded(FindWireFormat("fp32"), std::vector<float>(n, 0.0f));
  Steps worst;
  std::vector<float> before = tensor.Weights();
  for (options.t = 1; options.t < outlier + 900; ++options.t) {
    tensor.Step(options.t == outlier ? spike : options.t < outlier + 400 ? usual : zero, options);
    const std::vector<float> after = tensor.Weights();
    double sum = 0;
    for (uint64_t i = 0; i < n; ++i) {
      if (i % kBlock == 0) continue;
      const double step = static_cast<double>(after[i] - before[i]) / kLr;
      sum += step * step;
      worst.largest = std::max(worst.largest, std::abs(step));
    }
    worst.rms = std::max(worst.rms, std::sqrt(sum / (static_cast<double>(n) * 31 / 32)));
    before = after;
  }
  return worst;
}

TEST(AcceptanceTest, AnOutlierLeavesItsNeighboursStepsBounded) {
  for (const uint64_t outlier : {1, 200, 2000}) {
    const Steps worst = WorstAfterAnOutlier(outlier);
    printf("outlier at %d: rms %.2f lr, largest %.2f lr\n", static_cast<int>(outlier), worst.rms, worst.largest);
    EXPECT_LE(worst.rms, 2.5) << outlier;
    EXPECT_LE(worst.largest, 20) << outlier;
  }
}

TEST(AcceptanceTest, ACoordinateWithoutGradientNeverMoves) {
  for (const Kernel& kernel : Kernels()) {
    Tensor tensor(kernel, 512);
    tensor.SetWeights(Normals(3).Vector(512));
    const std::vector<float> before = tensor.Weights();
    Normals random(4);
    StepOptions options{.hyper = Hypers(kernel, {{"weight_decay", 0}, {"lr", 0.05}})};
    for (options.t = 1; options.t <= 200; ++options.t) {
      std::vector<float> grad = random.Vector(512);
      for (size_t i = 0; i < 512; i += 3) grad[i] = 0;
      tensor.Step(Encoded(FindWireFormat("fp32"), grad), options);
    }
    const std::vector<float> after = tensor.Weights();
    size_t moved = 0;
    for (size_t i = 0; i < 512; ++i) {
      if (i % 3 == 0) {
        ASSERT_EQ(before[i], after[i]) << NameOf(kernel) << " " << i;
      }
      moved += before[i] != after[i] ? 1 : 0;
    }
    EXPECT_GT(moved, 330u) << NameOf(kernel);
  }
}

}  // namespace
}  // namespace ballast::kernels
