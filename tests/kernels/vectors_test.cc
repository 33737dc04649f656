// tests/oracle/vectors.json: the records that formats and rules of today can be held against, and those that wait.
#include <gtest/gtest.h>
#include <yaml-cpp/yaml.h>

#include <functional>
#include <map>
#include <set>

#include "tests/kernels/decoded.h"

namespace ballast::kernels {
namespace {

const Kernel& Plain() { return *FindKernel("adamw", "fp32", "fp32"); }

float OneVariance(const Tensor& tensor) { return ReadPlane<float>(tensor, SlotPlane(Plain(), Kind::kVariance), 0); }

void BytesPerParameter(const YAML::Node& record) {
  const auto bytes = [](const char* master, const char* state) {
    double sum = 0;
    for (const Plane& p : FindKernel("adamw", master, state)->planes) sum += static_cast<double>(p.bytes) / p.per;
    return sum;
  };
  EXPECT_EQ(bytes("fp32", "fp32"), record["rows"]["fp32_adamw"].as<double>());
  EXPECT_EQ(bytes("split24", "companded8"), record["rows"]["flash_adamw_24"].as<double>());
  EXPECT_EQ(bytes("split32", "companded8"), record["rows"]["flash_adamw_32"].as<double>());
}

// `exact`: v from 1 under a constant g^2, in fp32 state.
void VarianceFromOne(const YAML::Node& record) {
  for (const YAML::Node& row : record["rows"]) {
    Tensor tensor(Plain(), 1);
    const float one = 1;
    std::memcpy(tensor.plane(SlotPlane(Plain(), Kind::kVariance)), &one, sizeof one);
    const Payload grad = Encoded(0, {static_cast<float>(std::sqrt(row["g2"].as<double>()))});
    StepOptions options{.hyper = Hypers(Plain(), {{"beta2", row["beta2"].as<double>()}})};
    const uint64_t steps = row["steps"].as<uint64_t>();
    for (; options.t <= steps; ++options.t) tensor.Step(grad, options);
    EXPECT_NEAR(static_cast<double>(OneVariance(tensor)), row["exact"].as<double>(), 1e-3 * row["exact"].as<double>());
  }
}

void SpikedNeighbour(const YAML::Node& record) {
  Tensor tensor(Plain(), 1);
  StepOptions options{.hyper = Hypers(Plain(), {{"weight_decay", 0}})};
  const Payload usual = Encoded(0, {1e-4f}), zero = Encoded(0, {0.0f});
  std::vector<double> steps;
  for (; options.t <= 401; ++options.t) {
    tensor.SetWeights({0});
    tensor.Step(options.t < 401 ? usual : zero, options);
    steps.push_back(std::abs(static_cast<double>(tensor.Weights()[0])));
  }
  EXPECT_NEAR(steps[399], record["exact_t399"].as<double>(), 1e-7);
  EXPECT_NEAR(steps[400], record["exact_t400"].as<double>(), 2e-6);
}

// After a long quiet history one gradient makes RMS the limit.
void RmsBound(const YAML::Node& record) {
  for (const YAML::Node& row : record["rows"]) {
    Tensor tensor(Plain(), 1);
    const std::vector<double> hyper = Hypers(Plain(), {{"beta2", row["beta2"].as<double>()}});
    const Statistics s = Combine(tensor.Step(Encoded(0, {1.0f}), {.hyper = hyper, .t = 1000000}), true);
    EXPECT_NEAR(std::sqrt(s.rms_sq), row["limit"].as<double>(), 1e-5 * row["limit"].as<double>());
  }
}

const std::map<std::string, std::function<void(const YAML::Node&)>> kAsserted = {
    {"bytes_per_param", BytesPerParameter},
    {"variance_ema_stall", VarianceFromOne},
    {"adam_zero_variance_blowup", SpikedNeighbour},
    {"rms_upper_bound", RmsBound},
};

// What each record waits for.
const std::map<std::string, std::string> kWaiting = {
    {"split_exact", "flash24"},
    {"split_every_exponent_bf16", "flash24"},
    {"split16_inexact", "flash32"},
    {"split8_levels", "flash24"},
    {"split_idempotent_N127", "flash24"},
    {"split_idempotent_N32767", "flash32"},
    {"bf16_only_rel_rmse", "bf16 master"},
    {"min_effective_update", "flash24"},
    {"momentum_probe", "flash8"},
    {"variance_probe", "flash8"},
    {"momentum_err_bound", "flash8"},
    {"variance_err_bound", "flash8"},
    {"gauss_nmse_variance", "flash8"},
    {"heavy_tail_momentum", "flash8"},
    {"momentum_scale_fp16_edges", "flash8"},
    {"variance_scale_fp16_edges", "flash8"},
    {"collage_grow", "mcf"},
    {"beta_expansions", "mcf"},
    {"collage_edq", "mcf"},
    {"collage_light_edq", "mcf"},
    {"beta_hat", "stable_adamw"},
    {"unit_scaling_factors", "unit scaling"},
    {"umup_lr", "unit scaling"},
    {"unit_scaling_fpformat", "fp8"},
    {"bnb_dynamic_map", "dynamic8"},
    {"bnb_gauss_nmse", "dynamic8"},
    {"variance_codec_bias", "flash8"},
    {"frozen_unit_weight", "flash24"},
    {"check_numerics_threshold", "flash24"},
    {"sgd_dampening", "sgd"},
    {"rounding_modes", "int8 serving"},
    {"variance_step_response", "flash8"},
};

TEST(VectorsTest, EveryRecordOfTodaysFormatsHoldsAndTheOthersAreListed) {
  std::set<std::string> seen;
  for (const YAML::Node& record : YAML::LoadFile(BALLAST_VECTORS)) {
    const std::string id = record["id"].as<std::string>();
    SCOPED_TRACE(id);
    seen.insert(id);
    const auto check = kAsserted.find(id);
    EXPECT_NE(check != kAsserted.end(), kWaiting.contains(id)) << "an id is in exactly one list";
    if (check != kAsserted.end()) check->second(record);
  }
  EXPECT_EQ(seen.size(), kAsserted.size() + kWaiting.size());
}

}  // namespace
}  // namespace ballast::kernels
