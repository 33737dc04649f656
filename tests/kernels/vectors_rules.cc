// Records of rules and of Collage's arithmetic, and the bytes that each combination keeps.
#include "tests/kernels/decoded.h"
#include "tests/kernels/records.h"

namespace ballast::kernels {
namespace {

WireIndex Fp32() { return FindWireFormat("fp32"); }

double Bytes(std::span<const Plane> planes) {
  double sum = 0;
  for (const Plane& p : planes) sum += static_cast<double>(p.bytes) / p.per;
  return sum;
}
double Bytes(const char* rule, const char* master, const char* state) {
  return Bytes(FindKernel(rule, master, state)->planes);
}
double Bytes(const char* state) {
  return Bytes(FindMomentFormat(state)->momentum.planes) + Bytes(FindMomentFormat(state)->variance.planes);
}

// What the registry has is counted from its planes; the rest are sums of formats that it has or that are named here.
void BytesPerParameter(const YAML::Node& record) {
  const double bf16 = 2, fp32 = 4, four_bits = 0.5 + 4.0 / 128;
  const std::map<std::string, double> wanted = {{"flash_adamw_24", Bytes("adamw", "flash24", "flash8")},
                                                {"flash_adamw_32", Bytes("adamw", "flash32", "flash8")},
                                                {"flash_sgdm_lion_24", Bytes("lion", "split24", "companded8")},
                                                {"flash_adamw_noecc", bf16 + Bytes("flash8")},
                                                {"flash_ckpt_default", fp32 + 2 * bf16},
                                                {"flash_ckpt_compressed", fp32 + Bytes("flash8")},
                                                {"fp32_adamw", Bytes("adamw", "fp32", "fp32")},
                                                {"collage_A", Bytes("adamw", "bf16", "bf16")},
                                                {"collage_light_B", Bytes("collage_light", "mcf", "bf16")},
                                                {"collage_plus_C", Bytes("collage_plus", "mcf", "mcf")},
                                                {"collage_D_master", bf16 + Bytes("adamw", "fp32", "bf16")},
                                                {"collage_D_fp32_states", bf16 + Bytes("adamw", "fp32", "fp32")},
                                                {"bnb8_adamw_bf16_weights", bf16 + Bytes("dynamic8")},
                                                {"bnb8_fp32_master", Bytes("adamw", "fp32", "dynamic8")},
                                                {"torchao_8bit", Bytes("dynamic8")},
                                                {"torchao_4bit", 2 * four_bits},
                                                {"torchao_fp8", 2 * (1 + 4.0 / 256)}};
  EXPECT_EQ(record["rows"].size(), wanted.size());
  for (const auto& [name, bytes] : wanted) EXPECT_EQ(bytes, record["rows"][name].as<double>()) << name;
  EXPECT_EQ(Bytes("adamw", "split24", "companded8"), record["rows"]["flash_adamw_24"].as<double>());
  EXPECT_EQ(Bytes("adamw", "bf16", "companded8"), record["rows"]["flash_adamw_noecc"].as<double>());
  EXPECT_EQ(Bytes("sgd", "split24", "companded8"), record["rows"]["flash_sgdm_lion_24"].as<double>());
}

// After a long quiet history one gradient makes RMS the limit.
void RmsBound(const YAML::Node& record) {
  for (const char* rule : {"adam", "adamw", "stable_adamw"}) {
    const Kernel& kernel = *FindKernel(rule, "fp32", "fp32");
    for (const YAML::Node& row : record["rows"]) {
      Tensor tensor(kernel, 1);
      const std::vector<double> hyper = Hypers(kernel, {{"beta2", row["beta2"].as<double>()}});
      const Statistics s = Combine(tensor.Step(Encoded(Fp32(), {1.0f}), {.hyper = hyper, .t = 1000000}), true);
      ExpectWithin(std::sqrt(s.rms_sq), row["limit"], 1e-5);
    }
  }
}

// A buffer of 1 and no gradient: what is left of it is the debiased beta.
void BetaHat(const YAML::Node& record) {
  const Kernel& kernel = *FindKernel("stable_adamw", "fp32", "fp32");
  for (const YAML::Node& row : record["rows"]) {
    const double beta = row["beta"].as<double>();
    for (const auto& entry : row["vals"]) {
      const uint64_t t = std::stoull(entry.first.as<std::string>());
      EXPECT_NEAR(oracle::DebiasedBeta(beta, t), entry.second.as<double>(), 1e-15);
      for (const char* name : {"beta1", "beta2"}) {
        const size_t plane = MomentPlane(kernel, name[4] == '1' ? PlaneKind::kMomentum : PlaneKind::kVariance);
        Tensor tensor(kernel, 1);
        const float one = 1;
        std::memcpy(tensor.plane(plane), &one, sizeof one);
        tensor.Step(Encoded(Fp32(), {0.0f}), {.hyper = Hypers(kernel, {{name, beta}}), .t = t});
        ExpectWithin(Wide(ReadPlane<float>(tensor, plane, 0)), entry.second, 0x1p-24);
      }
    }
  }
}

void SgdDampening(const YAML::Node& record) {
  for (const char* rule : {"sgd", "sgdw"}) {
    const Kernel& kernel = *FindKernel(rule, "fp32", "fp32");
    Tensor tensor(kernel, 1);
    StepOptions options{.hyper = Hypers(kernel, {{"momentum", 0.9}, {"dampening", 0.5}})};
    for (const float wanted : Floats(record["torch"])) {
      tensor.Step(Encoded(Fp32(), {1.0f}), options);
      EXPECT_EQ(ReadPlane<float>(tensor, 1, 0), wanted) << rule;
      ++options.t;
    }
  }
  // The other convention, which is not ours: dampening from the start.
  double buffer = 0;
  for (const float other : Floats(record["flash"])) {
    buffer = 0.9 * buffer + 0.5;
    EXPECT_NEAR(Wide(other), buffer, 1e-7);
  }
}

void CollageGrow(const YAML::Node& record) {
  const double step = oracle::R(0.1);
  oracle::Expansion x = {200, 0};
  double plain = 200;
  for (const YAML::Node& row : record["trace"]) {
    x = oracle::Grow(x, step);
    plain = oracle::R(plain + step);
    EXPECT_EQ(x.hi, row[0].as<double>());
    EXPECT_EQ(x.lo, row[1].as<double>());
  }
  EXPECT_EQ(plain, record["plain"].as<double>());
  EXPECT_EQ(x.hi + x.lo, record["true"].as<double>());
  // What the published product, aliased in place, gets wrong: 1 times .95 as expansions. The right one:
  // kernels/NUMERICS.md, "collage_light and collage_plus".
  const oracle::Expansion product = oracle::Mul({1, 0}, oracle::ExpansionOf(0.95));
  EXPECT_NEAR(product.hi + product.lo, 0.95, 1e-5);
}

// The kernel's constants hold both components of beta2.
void BetaExpansions(const YAML::Node& record) {
  const Kernel& kernel = *FindKernel("collage_plus", "mcf", "mcf");
  for (const YAML::Node& row : record["rows"]) {
    const double beta = row["beta"].as<double>();
    const oracle::Expansion e = oracle::ExpansionOf(beta);
    EXPECT_EQ(e.hi, row["hi"].as<double>());
    EXPECT_EQ(e.lo, row["lo"].as<double>());
    EXPECT_NEAR(beta - e.hi - e.lo, row["resid"].as<double>(), 1e-16);
    // The published code rounds beta to fp32 before it takes the difference.
    EXPECT_NEAR(std::abs(Wide(static_cast<float>(beta)) - beta), std::abs(row["released_code_lo"].as<double>()), 1e-10);
    float constants[kMaxConstants] = {};
    kernel.prepare(Hypers(kernel, {{"beta2", beta}}), 5, constants);
    for (const double part : {e.hi, e.lo}) {
      EXPECT_NE(std::find(std::begin(constants), std::end(constants), static_cast<float>(part)), std::end(constants));
    }
  }
}

// Weights of .02 N, updates of 1e-5 N, in bf16: how many are lost, and how much of the update arrives.
struct Lost {
  double unchanged = 0, plain_ratio = 0, grown_ratio = 0, norm = 0;
};
Lost MeasureLost() {
  constexpr int kN = 1000000;
  Normals random(61);
  double dot = 0, grown_dot = 0, squares = 0, unchanged = 0;
  for (int i = 0; i < kN; ++i) {
    const double x = oracle::R(0.02 * random.Next()), d = oracle::R(1e-5 * random.Next());
    const double plain = oracle::R(x + d);
    const oracle::Expansion grown = oracle::Grow({x, 0}, d);
    unchanged += plain == x ? 1 : 0;
    dot += d * (plain - x);
    grown_dot += d * (grown.hi - x + grown.lo);
    squares += d * d;
  }
  return {100 * unchanged / kN, dot / squares, grown_dot / squares, std::sqrt(squares)};
}
// The record's samples are ten times fewer and torch's: its ratio has an error of some per cent.
void CollageEdq(const YAML::Node& record) {
  const Lost lost = MeasureLost();
  EXPECT_NEAR(lost.unchanged, record["imprecision_pct"].as<double>(), 0.6);
  EXPECT_NEAR(lost.plain_ratio, record["edq_over_norm"].as<double>(), 0.03);
  ExpectWithin(lost.norm / std::sqrt(10), record["raw_norm"], 0.01);
  EXPECT_NEAR(record["edq"].as<double>() / record["raw_norm"].as<double>(), record["edq_over_norm"].as<double>(), 1e-9);
}
void CollageLightEdq(const YAML::Node& record) {
  const Lost lost = MeasureLost();
  EXPECT_NEAR(lost.unchanged, record["hi_unchanged_pct"].as<double>(), 0.6);
  EXPECT_NEAR(lost.grown_ratio, record["edq_over_norm"].as<double>(), 1e-5);
}

}  // namespace

Checks RuleChecks() {
  return {{"bytes_per_param", BytesPerParameter},
          {"rms_upper_bound", RmsBound},
          {"beta_hat", BetaHat},
          {"sgd_dampening", SgdDampening},
          {"collage_grow", CollageGrow},
          {"beta_expansions", BetaExpansions},
          {"collage_edq", CollageEdq},
          {"collage_light_edq", CollageLightEdq}};
}

}  // namespace ballast::kernels
