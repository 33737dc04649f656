// One update of every kernel against the oracle, element by element, from states that updates have made: the stored
// words lie between those of the oracle's result less and plus what fp32 arithmetic may do to it, with the oracle's own
// random bits; the statistics are the oracle's sums.
#include <gtest/gtest.h>

#include "tests/kernels/decoded.h"
#include "tests/oracle/random.h"

namespace ballast::kernels {
namespace {

constexpr uint64_t kElements = kTile + 333;

// Blocks of very different sizes, exact zeros among them, and a block of nothing else.
std::vector<float> MixedGradient(Normals* random, uint64_t n) {
  std::vector<float> grad(n);
  double scale = 0;
  for (uint64_t i = 0; i < n; ++i) {
    if (i % kBlock == 0) scale = std::pow(10, 1 - 6 * random->Uniform());
    const bool zero = i / kBlock == 7 || i % 16 == 3;
    grad[i] = zero ? 0.0f : static_cast<float>(scale * random->Next());
  }
  return grad;
}

// One element's part in a step: where it was, where the oracle puts it.
struct Expectation {
  std::vector<oracle::Element> before;
  std::vector<oracle::Stepped> after;
  oracle::RoundedSum measured;
};

// Decoding is a few fp32 roundings where the oracle has none.
oracle::Rounded DecodedAs(std::string_view format, double value) {
  const bool exact = format == "fp32" || format == "bf16" || format.starts_with("split");
  return {value, exact ? 0 : std::abs(value) * 0x1p-21 + (value == 0 ? 0 : 0x1p-149)};
}

Expectation Expect(const Tensor& tensor, const std::vector<float>& grad, const StepOptions& options) {
  const Kernel& kernel = tensor.kernel();
  const oracle::Hypers h = HypersOf(kernel, options.hyper);
  const std::vector<double> weights = DecodeWeights(tensor);
  const DecodedMoment m = DecodeMoment(tensor, PlaneKind::kMomentum), v = DecodeMoment(tensor, PlaneKind::kVariance);
  Expectation x;
  for (uint64_t i = 0; i < tensor.size(); ++i) {
    x.before.push_back({DecodedAs(kernel.master, weights[i]), DecodedAs(kernel.state, m.values[i]),
                        v.values.empty() ? oracle::Rounded{} : DecodedAs(kernel.state, v.values[i])});
    if (kernel.finish == nullptr) continue;
    const double g = static_cast<double>(grad[i]);
    x.measured.Add(oracle::StableAdamWMoments(h, g, options.t, x.before[i]).rms_term);
  }
  const double n = static_cast<double>(tensor.size());
  const oracle::TensorMean mean = {{x.measured.value / n, x.measured.Bound() / n}};
  for (uint64_t i = 0; i < tensor.size(); ++i) {
    const double g = static_cast<double>(grad[i]);
    x.after.push_back(oracle::Step(kernel.rule, h, g, options.t, x.before[i], mean));
  }
  return x;
}

oracle::Rounding RoundingOf(const StepOptions& options, uint32_t bits) { return {options.stochastic, bits}; }

// How many of a comparison's answers were in doubt: two neighbouring codes would both have been right.
struct Doubt {
  uint64_t open = 0, all = 0;

  void Add(bool is_open) {
    open += is_open ? 1 : 0;
    ++all;
  }
};

void ExpectWeights(const Tensor& after, const Expectation& x, const StepOptions& options, Doubt* doubt) {
  const char* master = after.kernel().master;
  const std::vector<double> stored = DecodeWeights(after);
  for (uint64_t i = 0; i < after.size(); ++i) {
    const oracle::RandomFields bits = oracle::RandomAt(options.tensor_key, options.t, i);
    const oracle::Rounding rounding = RoundingOf(options, bits.master);
    const oracle::Rounded wanted = x.after[i].weight;
    const double low = oracle::Store(master, wanted.value - wanted.error, rounding).value;
    const double high = oracle::Store(master, wanted.value + wanted.error, rounding).value;
    ASSERT_LE(low, stored[i]) << "weight " << i << " of " << wanted.value << " +- " << wanted.error;
    ASSERT_GE(high, stored[i]) << "weight " << i << " of " << wanted.value << " +- " << wanted.error;
    doubt->Add(low != high);
  }
}

// The moment as it is encoded: the value or its root.
oracle::Rounded EncodedMoment(const oracle::Stepped& s, PlaneKind kind, bool of_root) {
  if (kind == PlaneKind::kMomentum) return s.m;
  return of_root ? oracle::Sqrt(s.v) : s.v;
}

uint32_t FieldOf(const StepOptions& options, PlaneKind kind, uint64_t i) {
  const oracle::RandomFields bits = oracle::RandomAt(options.tensor_key, options.t, i);
  return kind == PlaneKind::kMomentum ? bits.m : bits.v;
}

void ExpectNumbers(const Tensor& after, PlaneKind kind, const Expectation& x, const StepOptions& options,
                   Doubt* doubt) {
  const char* state = after.kernel().state;
  const DecodedMoment moment = DecodeMoment(after, kind);
  for (uint64_t i = 0; i < after.size(); ++i) {
    const oracle::Rounded wanted = EncodedMoment(x.after[i], kind, false);
    const oracle::Rounding rounding = RoundingOf(options, FieldOf(options, kind, i));
    const double low = oracle::Kept(state, wanted.value - wanted.error, rounding);
    const double high = oracle::Kept(state, wanted.value + wanted.error, rounding);
    ASSERT_LE(low, moment.values[i]) << "moment " << i << " of " << wanted.value << " +- " << wanted.error;
    ASSERT_GE(high, moment.values[i]) << "moment " << i << " of " << wanted.value << " +- " << wanted.error;
    doubt->Add(low != high);
  }
}

// The scale of a block whose largest magnitude the oracle knows to within an error; and the code of each element for
// the scale that is stored. Computing a position takes a few more fp32 roundings.
void ExpectCodes(const Tensor& after, PlaneKind kind, const Expectation& x, const StepOptions& options, Doubt* doubt) {
  const char* state = after.kernel().state;
  const oracle::FormatOfMoment format = oracle::FormatOf(state, MomentOf(kind));
  const DecodedMoment moment = DecodeMoment(after, kind);
  const uint64_t size = static_cast<uint64_t>(format.block);
  for (uint64_t first = 0; first < after.size(); first += size) {
    const uint64_t last = std::min(first + size, after.size());
    double most = 0, error = 0;
    for (uint64_t i = first; i < last; ++i) {
      const oracle::Rounded wanted = EncodedMoment(x.after[i], kind, format.of_root);
      most = std::max(most, std::abs(wanted.value));
      error = std::max(error, std::abs(wanted.value) + wanted.error - most);
    }
    const double stored = ScaleAt(state, after.plane(MomentPlane(after.kernel(), kind) + 1), first / size);
    ASSERT_LE(format.scale(std::max(0.0, most - error)), stored) << "scale of " << most;
    ASSERT_GE(format.scale(most + error), stored) << "scale of " << most;
    for (uint64_t i = first; i < last; ++i) {
      const oracle::Rounded wanted = EncodedMoment(x.after[i], kind, format.of_root);
      const oracle::Rounding rounding = RoundingOf(options, FieldOf(options, kind, i));
      const double slack = wanted.error + std::abs(wanted.value) * (0x1p-20 + (most > 0 ? error / most : 0));
      const double least = format.of_root ? std::max(0.0, wanted.value - slack) : wanted.value - slack;
      const int low = format.code(least, {most, stored}, rounding);
      const int high = format.code(wanted.value + slack, {most, stored}, rounding);
      ASSERT_LE(low, moment.codes[i]) << "code " << i << " of " << wanted.value << " +- " << slack << " in " << stored;
      ASSERT_GE(high, moment.codes[i]) << "code " << i << " of " << wanted.value << " +- " << slack << " in " << stored;
      doubt->Add(low != high);
    }
  }
}

void ExpectMoment(const Tensor& after, PlaneKind kind, const Expectation& x, const StepOptions& options, Doubt* doubt) {
  if (MomentPlane(after.kernel(), kind) == kMaxPlanes) return;
  if (oracle::FormatOf(after.kernel().state, MomentOf(kind)).block > 0) {
    ExpectCodes(after, kind, x, options, doubt);
  } else {
    Doubt ordinary;  // fp32 keeps every digit, so each is in doubt
    ExpectNumbers(after, kind, x, options, &ordinary);
  }
}

bool SameWeight(const Tensor& a, const Tensor& b, uint64_t i) {
  if (a.kernel().master == std::string_view("mcf8")) {  // two pairs may stand for one value
    const auto value = [i](const Tensor& t) {
      const std::byte* planes[] = {t.plane(0), t.plane(1)};
      return WeightAt("mcf8", planes, i);
    };
    return value(a) == value(b);
  }
  for (size_t p = 0; p < FindMasterFormat(a.kernel().master)->planes.size(); ++p) {
    const uint32_t bytes = a.kernel().planes[p].bytes;
    if (std::memcmp(a.plane(p) + i * bytes, b.plane(p) + i * bytes, bytes) != 0) return false;
  }
  return true;
}

// The step's statistics as the oracle sums them, given what was stored.
void ExpectStatistics(const Tensor& before, const Tensor& after, const std::vector<float>& grad, const Expectation& x,
                      const Statistics& got) {
  const std::vector<double> from = DecodeWeights(before), to = DecodeWeights(after);
  oracle::RoundedSum grad_sq, update_sq, rms_sq, weight_sq, stored_dot;
  uint64_t unchanged = 0;
  double absmax = 0;
  for (uint64_t i = 0; i < before.size(); ++i) {
    const oracle::Rounded g = oracle::Exact(static_cast<double>(grad[i])), d = x.after[i].wanted;
    const double decoding = x.before[i].weight.error;  // both decodings are rounded
    grad_sq.Add(g * g);
    update_sq.Add(d * d);
    if (before.kernel().has_rms) rms_sq.Add(x.after[i].rms_term);
    weight_sq.Add(x.before[i].weight * x.before[i].weight);
    stored_dot.Add(d * (oracle::Rounded{to[i], decoding} - oracle::Rounded{from[i], decoding}));
    unchanged += SameWeight(before, after, i) ? 1 : 0;
    absmax = std::max(absmax, std::abs(g.value));
  }
  EXPECT_NEAR(got.grad_sq, grad_sq.value, grad_sq.Bound());
  EXPECT_NEAR(got.update_sq, update_sq.value, update_sq.Bound());
  EXPECT_NEAR(got.rms_sq, rms_sq.value, rms_sq.Bound());
  EXPECT_NEAR(got.weight_sq, weight_sq.value, weight_sq.Bound());
  EXPECT_NEAR(got.stored_dot, stored_dot.value, stored_dot.Bound());
  EXPECT_EQ(got.hi_dot, got.stored_dot);
  EXPECT_EQ(got.grad_absmax, absmax);
  EXPECT_EQ(got.unchanged, unchanged);
  EXPECT_EQ(got.hi_unchanged, got.unchanged);
  EXPECT_EQ(got.saturated,
            DecodeMoment(after, PlaneKind::kMomentum).saturated + DecodeMoment(after, PlaneKind::kVariance).saturated);
  EXPECT_EQ(got.nonfinite + got.rejected, 0u);
}

// Ordinary values, and every other hyperparameter the rules have.
std::vector<std::vector<double>> HyperChoices(const Kernel& kernel) {
  return {DefaultHypers(kernel),
          Hypers(kernel, {{"lr", 0.02},
                          {"weight_decay", 0.1},
                          {"beta1", 0.8},
                          {"beta2", 0.95},
                          {"eps", 1e-4},
                          {"momentum", 0.9},
                          {"dampening", 0.3},
                          {"lr_peak", 0.05}}),
          Hypers(kernel, {{"weight_decay", 0}, {"beta1", 0}, {"beta2", 0.9999}, {"momentum", 0.99}, {"nesterov", 1}})};
}

// With nearly all of fp32's digits kept, each result is in doubt.
bool KeepsFp32(std::string_view master) { return master == "fp32" || master.ends_with("32"); }

void CheckSteps(const Kernel& kernel, StepOptions options, Doubt* doubt) {
  Normals random(kElements);
  Tensor tensor(kernel, kElements);
  tensor.SetWeights(random.Vector(kElements, 0.3));
  for (const uint64_t t : {1ull, 2ull, 3ull, 400ull, 1000000ull}) {
    SCOPED_TRACE("step " + std::to_string(t));
    options.t = t;
    const Tensor before = tensor;
    const std::vector<float> grad = MixedGradient(&random, kElements);
    const Payload payload = Encoded(FindWireFormat("fp32"), grad);
    const Expectation x = Expect(before, grad, options);
    if (kernel.finish != nullptr) {
      EXPECT_NEAR(tensor.Measured(tensor.MakeUpdate(payload, options)), x.measured.value, x.measured.Bound());
    }
    const Statistics got = Combine(tensor.Step(payload, options), true);
    ExpectWeights(tensor, x, options, doubt);
    ExpectMoment(tensor, PlaneKind::kMomentum, x, options, doubt);
    ExpectMoment(tensor, PlaneKind::kVariance, x, options, doubt);
    ExpectStatistics(before, tensor, grad, x, got);
    if (testing::Test::HasFailure()) return;
  }
}

// All but Collage's, which has its own test below.
std::vector<const char*> ElementwiseRules() {
  std::vector<const char*> rules;
  for (const char* rule : RuleNames()) {
    if (!std::string_view(rule).starts_with("collage")) rules.push_back(rule);
  }
  return rules;
}

class StepTest : public testing::TestWithParam<const char*> {};

TEST_P(StepTest, IsTheOracles) {
  Doubt doubt;
  for (const Kernel& kernel : Kernels()) {
    if (kernel.rule != std::string_view(GetParam()) || IsCollage(kernel)) continue;
    for (const std::vector<double>& hyper : HyperChoices(kernel)) {
      for (const bool stochastic : {false, true}) {
        SCOPED_TRACE(NameOf(kernel) + (stochastic ? " stochastic" : " nearest"));
        Doubt of_kernel;
        CheckSteps(kernel, {.hyper = hyper, .stochastic = stochastic}, &of_kernel);
        if (HasFailure()) return;
        if (KeepsFp32(kernel.master)) continue;
        doubt.open += of_kernel.open, doubt.all += of_kernel.all;
      }
    }
  }
  // A comparison that leaves much in doubt says little.
  EXPECT_LT(static_cast<double>(doubt.open), 0.02 * static_cast<double>(doubt.all)) << doubt.all;
}

INSTANTIATE_TEST_SUITE_P(Rules, StepTest, testing::ValuesIn(ElementwiseRules()),
                         [](const auto& instance) { return std::string(instance.param); });

// torch keeps no buffer then, so dampening has nothing to act on.
TEST(SgdTest, WithoutMomentumNothingIsDampened) {
  for (const char* rule : {"sgd", "sgdw"}) {
    const Kernel& kernel = *FindKernel(rule, "fp32", "fp32");
    Tensor tensor(kernel, 1);
    StepOptions options{.hyper = Hypers(kernel, {{"lr", 0.25}, {"dampening", 0.5}, {"weight_decay", 0}})};
    for (options.t = 1; options.t <= 2; ++options.t) tensor.Step(Encoded(FindWireFormat("fp32"), {1.0f}), options);
    EXPECT_EQ(tensor.Weights()[0], -0.5f) << rule;
  }
}

// Collage is exact: the stored bf16 numbers are the oracle's.
oracle::CollageElement CollageAt(const Tensor& tensor, bool plus, uint64_t i) {
  const auto at = [&](size_t plane) {
    return oracle::ValueOf(ReadPlane<uint16_t>(tensor, plane, i), oracle::kBf16, 16);
  };
  return {{at(0), at(1)}, at(2), {at(3), plus ? at(4) : 0}};
}

void ExpectCollageStep(const Tensor& before, const Tensor& after, const std::vector<float>& grad,
                       const StepOptions& options, const Statistics& got) {
  const bool plus = before.kernel().state == std::string_view("mcf");
  const oracle::Hypers h = HypersOf(before.kernel(), options.hyper);
  oracle::RoundedSum update_sq, rms_sq, stored_dot, hi_dot;
  uint64_t unchanged = 0, hi_unchanged = 0;
  for (uint64_t i = 0; i < before.size(); ++i) {
    const oracle::CollageElement from = CollageAt(before, plus, i), to = CollageAt(after, plus, i);
    const auto [wanted, d, rms_term] = oracle::CollageStep(plus, h, static_cast<double>(grad[i]), options.t, from);
    ASSERT_EQ(to.weight.hi, wanted.weight.hi) << i;
    ASSERT_EQ(to.weight.lo, wanted.weight.lo) << i;
    ASSERT_EQ(to.m, wanted.m) << i;
    ASSERT_EQ(to.v.hi, wanted.v.hi) << i;
    ASSERT_EQ(to.v.lo, wanted.v.lo) << i;
    const double x = std::abs(to.weight.hi), hi_moved = to.weight.hi - from.weight.hi;
    update_sq.Add(oracle::Exact(d) * oracle::Exact(d));
    rms_sq.Add(rms_term);
    stored_dot.Add(oracle::Exact(d) * oracle::Rounded{hi_moved + to.weight.lo - from.weight.lo, x * 0x1p-22});
    hi_dot.Add(oracle::Exact(d) * oracle::Exact(hi_moved));
    hi_unchanged += hi_moved == 0 ? 1 : 0;
    unchanged += hi_moved == 0 && to.weight.lo == from.weight.lo ? 1 : 0;
  }
  EXPECT_NEAR(got.update_sq, update_sq.value, update_sq.Bound());
  EXPECT_NEAR(got.rms_sq, rms_sq.value, rms_sq.Bound());
  EXPECT_NEAR(got.stored_dot, stored_dot.value, stored_dot.Bound());
  EXPECT_NEAR(got.hi_dot, hi_dot.value, hi_dot.Bound());
  EXPECT_EQ(got.unchanged, unchanged);
  EXPECT_EQ(got.hi_unchanged, hi_unchanged);
  EXPECT_EQ(got.rejected + got.saturated, 0u);
}

TEST(CollageStepTest, IsTheOraclesBitForBit) {
  int kernels = 0;
  for (const Kernel& kernel : Kernels()) {
    if (!IsCollage(kernel)) continue;
    ++kernels;
    for (const std::vector<double>& hyper : HyperChoices(kernel)) {
      SCOPED_TRACE(NameOf(kernel));
      Normals random(3);
      Tensor tensor(kernel, kElements);
      tensor.SetWeights(random.Vector(kElements, 0.3));
      StepOptions options{.hyper = hyper};
      for (options.t = 1; options.t <= 30; ++options.t) {
        const Tensor before = tensor;
        const std::vector<float> grad = MixedGradient(&random, kElements);
        const Statistics got = Combine(tensor.Step(Encoded(FindWireFormat("fp32"), grad), options), true);
        ExpectCollageStep(before, tensor, grad, options, got);
        if (HasFailure()) return;
      }
    }
  }
  EXPECT_EQ(kernels, 2);
}

}  // namespace
}  // namespace ballast::kernels
