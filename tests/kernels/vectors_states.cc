// Records of state codecs, one shot at a time: flash8, dynamic8, and the linear codes they are compared with.
#include "tests/kernels/decoded.h"
#include "tests/kernels/planes.h"
#include "tests/kernels/records.h"

namespace ballast::kernels {
namespace {

constexpr PlaneKind kM = PlaneKind::kMomentum, kV = PlaneKind::kVariance;
std::vector<int> Codes(Moment* moment, const char* state, PlaneKind kind) {
  std::vector<int> codes;
  for (uint64_t i = 0; i < moment->size(); ++i) codes.push_back(CodeAt(state, kind, moment->planes()[0], i));
  return codes;
}

void Probe(PlaneKind kind, const std::vector<float>& values, const YAML::Node& record) {
  Moment moment("flash8", kind, values.size());
  EXPECT_EQ(moment.RoundTrip(values), Floats(record["rec"]));
  EXPECT_EQ(Codes(&moment, "flash8", kind), Integers(record["q"]));
}
void MomentumProbe(const YAML::Node& record) {
  Probe(kM, Floats(record["x"]), record);
  EXPECT_EQ(oracle::flash8::Scale(1), record["scale_fp16"].as<double>());
}
void VarianceProbe(const YAML::Node& record) { Probe(kV, Floats(record["v"]), record); }

// A fine sweep of [least, most], every block led by a 1 so that the scale is 1.
struct Sweep {
  std::vector<float> in, out;
};
Sweep SweepOf(PlaneKind kind, double least, double most, uint64_t count) {
  Sweep s;
  for (uint64_t i = 0; i < count; ++i) {
    const double part = static_cast<double>(i) / static_cast<double>(count - 1);
    s.in.push_back(i % kBlock == 0 ? 1.0f : static_cast<float>(least + part * (most - least)));
  }
  Moment moment("flash8", kind, count);
  s.out = moment.RoundTrip(s.in);
  return s;
}
double Worst(const Sweep& s) {
  double worst = 0;
  for (size_t i = 0; i < s.in.size(); ++i) worst = std::max(worst, std::abs(Wide(s.in[i]) - Wide(s.out[i])));
  return worst;
}

struct Nmse {
  double codec, linear, zeros, linear_zeros;
};
// `linear`: codes evenly spread up to a block's largest, `top` of them.
Nmse NmseOf(const char* state, PlaneKind kind, const std::vector<float>& values, int top) {
  Moment moment(state, kind, values.size());
  const std::vector<float> got = moment.RoundTrip(values);
  Nmse e{};
  double sum = 0, most = 0;
  for (size_t i = 0; i < values.size(); ++i) {
    if (i % kBlock == 0) {
      most = 0;
      for (size_t j = i; j < i + kBlock; ++j) most = std::max(most, std::abs(Wide(values[j])));
    }
    const double x = Wide(values[i]), linear = std::floor(x / most * top + 0.5) * most / top;
    e.codec += (Wide(got[i]) - x) * (Wide(got[i]) - x);
    e.linear += (linear - x) * (linear - x);
    e.zeros += got[i] == 0 ? 1 : 0;
    e.linear_zeros += linear == 0 ? 1 : 0;
    sum += x * x;
  }
  const double n = static_cast<double>(values.size());
  return {e.codec / sum, e.linear / sum, e.zeros / n, e.linear_zeros / n};
}
std::vector<float> Gauss(PlaneKind kind) {
  std::vector<float> values = Normals(41).Vector(1 << 20);
  for (float& x : values) x = kind == kM ? x : x * x;
  return values;
}

void MomentumErrorBound(const YAML::Node& record) {
  ExpectWithin(Worst(SweepOf(kM, -1, 1, 1 << 20)), record["max_abs_err"], 0.005);
  EXPECT_LE(Worst(SweepOf(kM, -1, 1, 1 << 20)), 0.0078740);  // the record's "analytic"
  ExpectWithin(Worst(SweepOf(kM, -0.00198, 0.00198, 1 << 20)), record["max_abs_err_near0"], 0.005);
  const Nmse e = NmseOf("flash8", kM, Gauss(kM), 127);
  ExpectWithin(e.codec, record["rel_rmse_gauss"]["softsign_nmse"], 0.02);
  ExpectWithin(e.linear, record["rel_rmse_gauss"]["linear_int8_nmse"], 0.02);
}
void VarianceErrorBound(const YAML::Node& record) {
  ExpectWithin(Worst(SweepOf(kV, 0, 1, 1 << 20)), record["max_abs_err"], 0.005);
  const Sweep s = SweepOf(kV, 0, 1e-5, 1 << 20);
  for (size_t i = 0; i < s.in.size(); ++i) {
    if (s.out[i] == 0) {
      ASSERT_LE(Wide(s.in[i]), record["zero_threshold"].as<double>() * 1.0001);
    } else {
      ASSERT_GE(Wide(s.in[i]), record["zero_threshold"].as<double>() * 0.9999);
      ASSERT_GE(Wide(s.out[i]), record["smallest_nonzero"].as<double>() * 0.99999);
    }
  }
}
void GaussVariance(const YAML::Node& record) {
  const Nmse e = NmseOf("flash8", kV, Gauss(kV), 255);
  ExpectWithin(e.codec, record["sqrt_u8_nmse"], 0.03);
  ExpectWithin(e.linear, record["linear_u8_nmse"], 0.03);
  ExpectWithin(e.zeros, record["zeros_sqrt"], 0.1);
  ExpectWithin(e.linear_zeros, record["zeros_linear"], 0.02);
}
void HeavyTail(const YAML::Node& record) {
  Normals random(43);
  std::vector<float> values(1 << 20);
  for (float& x : values) {
    const double e = -std::log(random.Uniform());
    x = static_cast<float>(std::copysign(e * e, random.Uniform() - 0.5));
  }
  const Nmse e = NmseOf("flash8", kM, values, 127);
  ExpectWithin(e.codec, record["softsign_nmse"], 0.05);
  ExpectWithin(e.linear, record["linear_nmse"], 0.05);
  ExpectWithin(e.zeros, record["zeros_softsign"], 0.02);
  ExpectWithin(e.linear_zeros, record["zeros_linear"], 0.02);
}

// Where the published scale is infinite and the block would be lost, ours is refused.
void MomentumScaleEdges(const YAML::Node& record) {
  for (const YAML::Node& row : record["rows"]) {
    const float a = static_cast<float>(Number(row["absmax"]));
    SCOPED_TRACE(a);
    std::vector<float> values(kBlock);
    values[0] = a, values[1] = -a / 2;
    Moment moment("flash8", kM, kBlock);
    EXPECT_EQ(moment.Encode(values), std::isfinite(Number(row["scale"])));
    if (!std::isfinite(Number(row["scale"]))) continue;
    EXPECT_EQ(ScaleAt("flash8", moment.planes()[1], 0), Number(row["scale"]));
    const std::vector<float> decoded = moment.Decode(), wanted = Floats(row["rec"]);
    const std::vector<int> codes = Codes(&moment, "flash8", kM), q = Integers(row["q"]);
    for (size_t i = 0; i < 3; ++i) {
      EXPECT_EQ(decoded[i], wanted[i]);
      EXPECT_EQ(codes[i], q[i]);
    }
  }
}
void VarianceScaleEdges(const YAML::Node& record) {
  for (const YAML::Node& row : record["rows"]) {
    const std::vector<float> values(kBlock, static_cast<float>(Number(row["v"])));
    SCOPED_TRACE(values[0]);
    Moment moment("flash8", kV, kBlock);
    EXPECT_EQ(moment.Encode(values), std::isfinite(Number(row["scale"])));
    if (!std::isfinite(Number(row["scale"]))) continue;
    EXPECT_EQ(ScaleAt("flash8", moment.planes()[1], 0), Number(row["scale"]));
    EXPECT_EQ(Codes(&moment, "flash8", kV)[0], row["q"].as<int>());
    EXPECT_EQ(moment.Decode()[0], static_cast<float>(Number(row["rec"])));
  }
}

// The map as the codec has it: all codes under a scale of 1.
std::vector<float> DynamicMap(PlaneKind kind) {
  Moment moment("dynamic8", kind, 256);
  for (size_t i = 0; i < 256; ++i) moment.planes()[0][i] = static_cast<std::byte>(i);
  const float one = 1;
  std::memcpy(moment.planes()[1], &one, sizeof one);
  return moment.Decode();
}
void ExpectMap(PlaneKind kind, const YAML::Node& record, const char* entries, const char* zero, const char* gap) {
  const std::vector<float> map = DynamicMap(kind), wanted = Floats(record[entries]);
  const std::vector<int> places = Integers(record["idx"]);
  for (size_t i = 0; i < places.size(); ++i) EXPECT_EQ(map[static_cast<size_t>(places[i])], wanted[i]) << places[i];
  EXPECT_EQ(map[record[zero].as<size_t>()], 0.0f);
  float most = 0;
  for (size_t i = 0; i + 1 < map.size(); ++i) {
    most = std::max(most, map[i + 1] - map[i]);
    ASSERT_LT(map[i], map[i + 1]);
  }
  ExpectWithin(Wide(most), record[gap], 1e-6);
}
void BnbMap(const YAML::Node& record) {
  ExpectMap(kM, record, "signed", "signed_zero_index", "max_gap_signed");
  ExpectMap(kV, record, "unsigned", "unsigned_zero_index", "max_gap_unsigned");
  EXPECT_EQ(Integers(record["n"]), (std::vector<int>{256, 256}));
}
void BnbGauss(const YAML::Node& record) {
  ExpectWithin(NmseOf("dynamic8", kM, Gauss(kM), 127).codec, record["m_nmse"], 0.03);
  const Nmse v = NmseOf("dynamic8", kV, Gauss(kV), 255);
  ExpectWithin(v.codec, record["v_nmse"], 0.05);
  ExpectWithin(v.zeros, record["v_zeros"], 0.15);
}

}  // namespace

Checks StateChecks() {
  return {{"momentum_probe", MomentumProbe},
          {"variance_probe", VarianceProbe},
          {"momentum_err_bound", MomentumErrorBound},
          {"variance_err_bound", VarianceErrorBound},
          {"gauss_nmse_variance", GaussVariance},
          {"heavy_tail_momentum", HeavyTail},
          {"momentum_scale_fp16_edges", MomentumScaleEdges},
          {"variance_scale_fp16_edges", VarianceScaleEdges},
          {"bnb_dynamic_map", BnbMap},
          {"bnb_gauss_nmse", BnbGauss}};
}

}  // namespace ballast::kernels
