// Records that no kernel computes: factors of unit scaling and u-muP's table, which are the Python client's, number
// formats and thresholds. They are held against the oracle's formulas.
#include "tests/kernels/decoded.h"
#include "tests/kernels/planes.h"
#include "tests/kernels/records.h"
#include "tests/oracle/unit_scaling.h"

namespace ballast::kernels {
namespace {

// Each name of the record against its formula; all of them.
void ExpectAll(const YAML::Node& record, const std::map<std::string, double>& wanted) {
  EXPECT_EQ(record.size(), wanted.size());
  for (const auto& [name, value] : wanted) ExpectWithin(value, record[name], 1e-9);
}

void UnitScalingFactors(const YAML::Node& record) {
  ExpectAll(record["linear"], {{"out", oracle::LinearOut(1024)},
                               {"grad_in_free", oracle::LinearGradInFree(4096)},
                               {"grad_in_default", oracle::LinearOut(1024)},
                               {"gmean", oracle::LinearGeometricMean(1024, 4096)},
                               {"grad_w", oracle::LinearGradWeight(8192)}});
  ExpectAll(record["residual_tau_half"], {{"res", oracle::ResidualBranch(0.5)}, {"skip", oracle::SkipBranch(0.5)}});
  for (const auto& [name, value] :
       std::map<std::string, double>{{"readout_out", oracle::ReadoutOut(1024)},
                                     {"xent_grad_V50257", oracle::CrossEntropyGrad(50257)},
                                     {"embedding_grad_V50257_B8192", oracle::EmbeddingGrad(50257, 8192)},
                                     {"add_out", oracle::AddOut(2)},
                                     {"mse_grad", oracle::MseGrad()},
                                     {"dropout_p1", oracle::DropoutOut(0.1)}}) {
    ExpectWithin(value, record[name], 1e-9);
  }
  ExpectWithin(oracle::GeluOut(1), record["gelu_m1"][0], 1e-9);
  ExpectWithin(oracle::GeluGrad(1), record["gelu_m1"][1], 1e-9);
  ExpectWithin(oracle::SiluOut(1), record["silu_m1"][0], 1e-9);
  ExpectWithin(oracle::SiluGrad(1), record["silu_m1"][1], 1e-9);
  ExpectWithin(oracle::SoftmaxOut(64, 1), record["softmax_64_m1"][0], 1e-9);
  ExpectWithin(oracle::SoftmaxOut(64, 1), record["softmax_64_m1"][1], 1e-9);
}

void UmupLearningRates(const YAML::Node& record) {
  ExpectAll(record["rows"], {{"weight_1024", oracle::AdamWeight(1024, 24)},
                             {"bias_norm", oracle::AdamBiasOrNorm(24)},
                             {"output", oracle::AdamOutput()},
                             {"embedding_1024", oracle::AdamEmbedding(1024)}});
  ExpectAll(record["sgd_to_output_scale"], {{"weight_1024", oracle::SgdWeight(1024, 24)},
                                            {"bias_1024", oracle::SgdBias(1024, 24)},
                                            {"output", oracle::AdamOutput()}});
}

void ExpectFormat(const YAML::Node& row, const oracle::Float& format) {
  EXPECT_EQ(format.largest, row["max"].as<double>());
  EXPECT_EQ(std::ldexp(1.0, format.least), row["min_normal"].as<double>());
  EXPECT_EQ(oracle::Spacing(0, format), row["min_sub"].as<double>());
  for (const YAML::Node& q : row["q"]) EXPECT_EQ(oracle::Nearest(q.as<double>(), format), q.as<double>());
}
// The library's formats keep the top exponent free and have one more below; ours are OCP's, and the kernels serve e4m3.
void FpFormats(const YAML::Node& record) {
  ExpectFormat(record["e4m3"], {3, -7, 240});
  ExpectFormat(record["e5m2"], {2, -15, 57344});
  ExpectFormat(record["ocp_e4m3"], oracle::kE4M3);
  ExpectFormat(record["ocp_e5m2"], oracle::kE5M2);
  const YAML::Node ocp = record["ocp_e4m3"];
  const float largest = ocp["max"].as<float>(), normal = ocp["min_normal"].as<float>(),
              sub = ocp["min_sub"].as<float>();
  Weights w("fp32", std::vector<float>{largest, 2 * largest, normal, sub, sub / 4});
  EXPECT_EQ(w.Served<uint8_t>("fp8-e4m3"), (std::vector<uint8_t>{0x7e, 0x7e, 0x08, 0x01, 0x00}));
}

// The step below which the checked code warns: as coded, log2(.49) has the wrong sign.
void CheckNumericsThreshold(const YAML::Node& record) {
  for (const YAML::Node& row : record["rows"]) {
    const int kept = row["bits"].as<int>() - 1 - 8;  // without sign and exponent
    const double step = std::exp2(std::floor(std::log2(row["maxabs"].as<double>())) - kept);
    ExpectWithin(step / 0.49, row["coded"], 1e-12);
    ExpectWithin(step * 0.49, row["intended"], 1e-12);
  }
}

void RoundingModes(const YAML::Node& record) {
  const std::vector<float> halves = {-0.5f, 0.5f, 1.5f, -1.5f, 2.5f, -2.5f};
  const float scale = 127;  // a code is then the rounded weight
  const std::vector<int8_t> codes = Weights("fp32", halves).Served<int8_t>("int8-tensor", &scale, halves.size());
  for (size_t i = 0; i < halves.size(); ++i) {
    const double x = static_cast<double>(halves[i]);
    EXPECT_EQ(std::floor(x + 0.5), record["state_codec_floor_plus_half"][i].as<double>());
    EXPECT_EQ(oracle::RoundHalfAway(x, 1), record["error_bits_half_away"][i].as<double>());
    EXPECT_EQ(oracle::RoundHalfEven(x, 1), record["switchback_llrint_half_even"][i].as<double>());
    EXPECT_EQ(codes[i], record["switchback_llrint_half_even"][i].as<double>());
  }
}

}  // namespace

Checks FormulaChecks() {
  return {{"unit_scaling_factors", UnitScalingFactors},
          {"umup_lr", UmupLearningRates},
          {"unit_scaling_fpformat", FpFormats},
          {"check_numerics_threshold", CheckNumericsThreshold},
          {"rounding_modes", RoundingModes}};
}

}  // namespace ballast::kernels
