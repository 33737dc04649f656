// Inputs at the edge of what can be asked: nothing but zeros, steps and elements far out, eps that fp32 does not have.
#include <gtest/gtest.h>
#include <sys/mman.h>

#include <cmath>

#include "tests/kernels/decoded.h"
#include "tests/oracle/random.h"

namespace ballast::kernels {
namespace {

WireIndex Fp32() { return FindWireFormat("fp32"); }

TEST(BadInputTest, ZeroGradientsOnFreshStateMoveNothing) {
  for (const Kernel& kernel : Kernels()) {
    for (const bool stochastic : {false, true}) {
      SCOPED_TRACE(NameOf(kernel));
      Tensor tensor(kernel, 600);
      tensor.SetWeights(Normals(1).Vector(600));
      const std::vector<float> before = tensor.Weights();
      StepOptions options{.hyper = Hypers(kernel, {{"weight_decay", 0}}), .stochastic = stochastic};
      for (options.t = 1; options.t <= 3; ++options.t) {
        const Statistics s = Combine(tensor.Step(Encoded(Fp32(), std::vector<float>(600)), options), true);
        EXPECT_EQ(s.grad_sq + s.update_sq + s.rms_sq + s.grad_absmax + s.stored_dot, 0);
        EXPECT_EQ(s.rejected + s.nonfinite + s.saturated, 0u);
        EXPECT_EQ(s.unchanged, 600u);
      }
      EXPECT_EQ(tensor.Weights(), before);
      for (const double m : DecodeMoment(tensor, PlaneKind::kMomentum).values) ASSERT_EQ(m, 0);
      for (const double v : DecodeMoment(tensor, PlaneKind::kVariance).values) ASSERT_EQ(v, 0);
    }
  }
}

TEST(BadInputTest, TheSmallestGradientsStayFinite) {
  for (const Kernel& kernel : Kernels()) {
    for (const float g : {0x1p-149f, 0x1p-126f, 0x1p-75f, 0x1p-63f}) {
      SCOPED_TRACE(NameOf(kernel) + " " + std::to_string(std::ilogb(g)));
      Tensor tensor(kernel, 64);
      tensor.SetWeights(std::vector<float>(64, 1.0f));
      for (uint64_t t = 1; t <= 20; ++t) {
        const Statistics s = Combine(tensor.Step(Encoded(Fp32(), std::vector<float>(64, g)), {.t = t}), true);
        ASSERT_EQ(s.rejected, 0u);
        ASSERT_TRUE(std::isfinite(s.update_sq) && std::isfinite(s.rms_sq) && std::isfinite(s.stored_dot));
      }
    }
  }
}

TEST(BadInputTest, AnEpsBelowFp32IsStillAboveZero) {
  for (const Kernel& kernel : Kernels()) {
    if (!kernel.has_rms) continue;
    const std::vector<double> hyper = Hypers(kernel, {{"eps", 1e-300}});
    Tensor tensor(kernel, 64);
    const TileStatistics s = tensor.Step(Encoded(Fp32(), std::vector<float>(64)), {.hyper = hyper})[0];
    EXPECT_EQ(s.rejected, 0u) << NameOf(kernel);
    EXPECT_EQ(s.rms_sq, 0.0f) << NameOf(kernel);
  }
}

TEST(BadInputTest, HugeStepNumbersGiveFiniteConstants) {
  for (const Kernel& kernel : Kernels()) {
    for (const uint64_t t : {1000000ull, 1ull << 40, ~0ull}) {
      float constants[kMaxConstants] = {};
      kernel.prepare(Hypers(kernel, {{"beta1", 0.9999999}, {"beta2", 0.9999999}}), t, constants);
      for (const float c : constants) ASSERT_TRUE(std::isfinite(c)) << NameOf(kernel) << " " << t;
    }
  }
}

// Address space for arrays of a tensor of which a few tiles are touched.
class SparseArray {
 public:
  explicit SparseArray(uint64_t bytes) : bytes_(bytes) {
    void* p = mmap(nullptr, bytes, PROT_READ | PROT_WRITE, MAP_PRIVATE | MAP_ANONYMOUS | MAP_NORESERVE, -1, 0);
    if (p != MAP_FAILED) data_ = static_cast<std::byte*>(p);
  }
  SparseArray(SparseArray&& other) noexcept : bytes_(other.bytes_), data_(std::exchange(other.data_, nullptr)) {}
  ~SparseArray() {
    if (data_ != nullptr) munmap(data_, bytes_);
  }
  std::byte* data() { return data_; }

 private:
  uint64_t bytes_;
  std::byte* data_ = nullptr;
};

// The last two tiles of a tensor of almost 2^33 elements, filled from a small tensor of those tiles alone.
constexpr uint64_t kSmall = 2 * kTile - 100, kHuge = (uint64_t{1} << 33) - 100, kFirstTile = kHuge / kTile - 1;
class FarTiles {
 public:
  FarTiles(const Tensor& small, const Payload& grad)
      : kernel_(small.kernel()), wire_(WireFormats()[static_cast<size_t>(grad.format)]), grad_(kHuge * wire_.bytes) {
    for (const Plane& plane : kernel_.planes) planes_.emplace_back(PlaneBytes(plane, kHuge));
    if (!Mapped()) return;
    for (size_t p = 0; p < planes_.size(); ++p) {
      std::memcpy(At(p), small.plane(p), PlaneBytes(kernel_.planes[p], kSmall));
    }
    std::memcpy(grad_.data() + kFirstTile * kTile * wire_.bytes, grad.bytes.data(), grad.bytes.size());
  }
  bool Mapped() {
    bool all = grad_.data() != nullptr;
    for (SparseArray& plane : planes_) all = all && plane.data() != nullptr;
    return all;
  }
  // The small tensor's place in a plane.
  std::byte* At(size_t p) {
    const Plane& plane = kernel_.planes[p];
    return planes_[p].data() + kFirstTile * kTile / plane.per * plane.bytes;
  }
  // `update` as for the small tensor.
  std::vector<TileStatistics> Step(Update update) {
    for (size_t p = 0; p < planes_.size(); ++p) update.planes[p] = planes_[p].data();
    update.grad = grad_.data();
    update.n = kHuge;
    std::vector<TileStatistics> stats(2);
    kernel_.update(update, kFirstTile, kFirstTile + 2, stats.data());
    return stats;
  }

 private:
  const Kernel& kernel_;
  const WireFormat& wire_;
  SparseArray grad_;
  std::vector<SparseArray> planes_;
};

Tensor Prepared(const Kernel& kernel) {
  Tensor tensor(kernel, kSmall);
  tensor.SetWeights(Normals(5).Vector(kSmall, 0.1));
  return tensor;
}

TEST(FarTileTest, BeyondTwoToThe32ElementsTheBitsAreThoseOfASmallTensor) {
  const Payload grad = Encoded(FindWireFormat("bf16"), Normals(6).Vector(kSmall, 0.01));
  for (const Kernel& kernel : Kernels()) {
    if (kernel.measure != nullptr) continue;  // a mean over all of 2^33 elements
    SCOPED_TRACE(NameOf(kernel));
    Tensor small = Prepared(kernel);
    FarTiles far(small, grad);
    if (!far.Mapped()) GTEST_SKIP() << "no address space";
    const Update update = small.MakeUpdate(grad, {.stochastic = false});
    const std::vector<TileStatistics> got = far.Step(update), wanted = small.Step(grad, {.stochastic = false});
    EXPECT_EQ(std::memcmp(got.data(), wanted.data(), sizeof(TileStatistics) * 2), 0);
    for (size_t p = 0; p < kernel.planes.size(); ++p) {
      EXPECT_EQ(std::memcmp(far.At(p), small.plane(p), PlaneBytes(kernel.planes[p], kSmall)), 0) << p;
    }
  }
}

// With random bits it is the element's index in 64 bits that counts.
TEST(FarTileTest, TheRandomBitsAreThoseOfTheWholeIndex) {
  const Payload grad = Encoded(Fp32(), Normals(7).Vector(kSmall, 0.01));
  Tensor small = Prepared(*FindKernel("adamw", "split24", "fp32"));
  Tensor exact(*FindKernel("adamw", "fp32", "fp32"), kSmall);
  exact.SetWeights(small.Weights());
  exact.Step(grad, {});
  FarTiles far(small, grad);
  if (!far.Mapped()) GTEST_SKIP() << "no address space";
  const StepOptions options{.tensor_key = 99};
  far.Step(small.MakeUpdate(grad, options));
  const std::byte* planes[] = {far.At(0), far.At(1)};
  const std::vector<double> weights = DecodeWeights(exact);
  for (uint64_t i = 0; i < kSmall; ++i) {
    const uint32_t bits = oracle::RandomAt(99, 1, kFirstTile * kTile + i).master;
    ASSERT_EQ(WeightAt("split24", planes, i), oracle::Store("split24", weights[i], {true, bits}).value) << i;
  }
}

}  // namespace
}  // namespace ballast::kernels
