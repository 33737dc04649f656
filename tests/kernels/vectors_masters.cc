// Records of FlashOptim's weight codec: flash24 and flash32, and its fp16 form, which is the oracle's alone.
#include <set>

#include "tests/kernels/decoded.h"
#include "tests/kernels/planes.h"
#include "tests/kernels/records.h"

namespace ballast::kernels {
namespace {

double Wide(float x) { return static_cast<double>(x); }
uint32_t BitsOf(float x) { return std::bit_cast<uint32_t>(x); }
double Narrow(Weights* w, uint64_t i) {
  return oracle::ValueOf(ReadAt<uint16_t>(w->planes()[0], i), oracle::kBf16, 16);
}
int Q8(Weights* w, uint64_t i) { return ReadAt<int8_t>(w->planes()[1], i); }
int Q16(Weights* w, uint64_t i) { return ReadAt<int16_t>(w->planes()[1], i); }

// The published code goes on with infinities where `narrow` overflows; the kernels saturate, so those rows say nothing.
void SplitExact(const YAML::Node& record) {
  for (const YAML::Node& row : record["rows"]) {
    const float x = Pattern(row["x_bits"]);
    SCOPED_TRACE(x);
    if (std::isfinite(Pattern(row["bf16_narrow"]))) {
      Weights w8("flash24", std::vector<float>{x}), w16("flash32", std::vector<float>{x});
      EXPECT_EQ(Narrow(&w8, 0), Wide(Pattern(row["bf16_narrow"])));
      EXPECT_EQ(Q8(&w8, 0), row["bf16_q8"].as<int>());
      EXPECT_EQ(Q16(&w16, 0), row["bf16_q16"].as<int>());
      EXPECT_EQ(BitsOf(w8.Values()[0]), BitsOf(Pattern(row["bf16_rec8"])));
      EXPECT_EQ(BitsOf(w16.Values()[0]), BitsOf(Pattern(row["bf16_rec16"])));
    }
    if (!std::isfinite(Pattern(row["fp16_narrow"]))) continue;
    const oracle::FlashWeight f8 = oracle::Flash(Wide(x), 127, oracle::kFp16);
    const oracle::FlashWeight f16 = oracle::Flash(Wide(x), 32767, oracle::kFp16);
    EXPECT_EQ(f8.narrow, Wide(Pattern(row["fp16_narrow"])));
    EXPECT_EQ(f8.q, row["fp16_q8"].as<int>());
    EXPECT_EQ(f16.q, row["fp16_q16"].as<int>());
    EXPECT_NEAR(f8.value, Wide(Pattern(row["fp16_rec8"])), std::abs(f8.value) * 0x1p-23);
    EXPECT_NEAR(f16.value, Wide(Pattern(row["fp16_rec16"])), std::abs(f16.value) * 0x1p-23);
  }
}

struct WorstError {
  double in_spacings = 0, relative = 0;
};
WorstError WorstOfEveryExponent(const char* master) {
  Normals random(3);
  WorstError worst;
  for (uint32_t exponent = 1; exponent < 255; ++exponent) {
    std::vector<float> values;
    for (int i = 0; i < 1 << 12; ++i) {
      const uint32_t bits = exponent << 23 | (static_cast<uint32_t>(random.Word()) & 0x7fffff);
      if (bits < 0x7f7f8000) values.push_back(std::bit_cast<float>(bits));
    }
    const std::vector<float> kept = Weights(master, values).Values();
    for (size_t i = 0; i < values.size(); ++i) {
      const double error = std::abs(Wide(kept[i]) - Wide(values[i]));
      const double narrow = oracle::Nearest(Wide(values[i]), oracle::kBf16);  // whose half spacing is divided
      worst.in_spacings = std::max(worst.in_spacings, error / oracle::Spacing(narrow, oracle::kBf16));
      worst.relative = std::max(worst.relative, error / Wide(values[i]));
    }
  }
  return worst;
}
// The record took 32 times as many samples, so its extremes reach a little further.
void SplitEveryExponent(const YAML::Node& record) {
  const WorstError e8 = WorstOfEveryExponent("flash24"), e16 = WorstOfEveryExponent("flash32");
  for (const auto& [got, wanted] : {std::pair{e8.in_spacings, record["max_err_over_ulp_8"].as<double>()},
                                    {e8.relative, record["max_rel_8"].as<double>()},
                                    {e16.in_spacings, record["max_err_over_ulp_16"].as<double>()},
                                    {e16.relative, record["max_rel_16"].as<double>()}}) {
    EXPECT_LE(got, wanted * 1.002);
    EXPECT_GE(got, wanted * 0.98);
  }
}

// All fp32 neighbours of bf16 0x3f85 that round to it or to the next.
std::vector<float> Interval() {
  std::vector<float> values;
  for (int offset = -32768; offset <= 32768; ++offset) {
    values.push_back(std::bit_cast<float>(static_cast<uint32_t>(0x3f850000 + offset)));
  }
  return values;
}

void Split16Inexact(const YAML::Node& record) {
  const std::vector<float> values = Interval(), kept = Weights("flash32", values).Values();
  std::vector<int> inexact;
  int64_t most = 0;
  for (size_t i = 0; i < values.size(); ++i) {
    const int64_t off = int64_t{BitsOf(kept[i])} - int64_t{BitsOf(values[i])};
    if (off != 0) inexact.push_back(static_cast<int>(i) - 32768);
    most = std::max(most, std::abs(off));
  }
  EXPECT_EQ(values.size(), record["n_total"].as<size_t>());
  ASSERT_EQ(inexact.size(), record["n_inexact"].as<size_t>());
  EXPECT_EQ(std::vector<int>(inexact.begin(), inexact.begin() + 6), Integers(record["first"]));
  EXPECT_EQ(std::vector<int>(inexact.end() - 6, inexact.end()), Integers(record["last"]));
  EXPECT_EQ(most, record["max_ulp32"].as<int64_t>());
}

void Split8Levels(const YAML::Node& record) {
  const std::vector<float> values = Interval();
  Weights w("flash24", values);
  const std::vector<float> kept = w.Values();
  // 0x3f85 is odd, so the ties at both ends go to its neighbours.
  std::set<float> levels;
  std::set<int> codes;
  double most = 0;
  for (size_t i = 0; i < values.size(); ++i) {
    most = std::max(most, std::abs(Wide(kept[i]) - Wide(values[i])));
    if (Narrow(&w, i) != Wide(std::bit_cast<float>(0x3f850000u))) continue;
    levels.insert(kept[i]);
    codes.insert(Q8(&w, i));
  }
  EXPECT_EQ(levels.size(), record["distinct_recon"].as<size_t>());
  EXPECT_EQ(codes.size(), record["distinct_q"].as<size_t>());
  EXPECT_EQ(most, record["max_abs_err"].as<double>());
}

// The record's four million samples are torch's; these are as many of ours, so counts agree as chance has it.
constexpr uint64_t kSamples = 4000000;
const std::vector<float>& Sample() {
  static const std::vector<float> kSample = Normals(0).Vector(kSamples, 0.02);
  return kSample;
}
double RelativeError(const std::vector<float>& got) {
  double error = 0, sum = 0;
  for (size_t i = 0; i < got.size(); ++i) {
    const double x = Wide(Sample()[i]), d = Wide(got[i]) - x;
    error += d * d;
    sum += x * x;
  }
  return std::sqrt(error / sum);
}
void ExpectCount(uint64_t got, const YAML::Node& wanted) {
  const double expected = wanted.as<double>();
  EXPECT_NEAR(static_cast<double>(got), expected, 6 * std::sqrt(2 * expected) + 0.5);
}

void Idempotent(const char* master, const YAML::Node& record) {
  Weights first(master, Sample());
  const std::vector<float> once = first.Values();
  Weights second(master, once);
  const std::vector<float> twice = second.Values();
  uint64_t values = 0, narrow = 0, exact = 0;
  int64_t most = 0;
  for (uint64_t i = 0; i < kSamples; ++i) {
    values += once[i] != twice[i] ? 1 : 0;
    most = std::max(most, std::abs(int64_t{BitsOf(once[i])} - int64_t{BitsOf(twice[i])}));
    narrow += Narrow(&first, i) != Narrow(&second, i) ? 1 : 0;
    exact += once[i] == Sample()[i] ? 1 : 0;
  }
  ExpectCount(values, record["changed_value"]);
  ExpectCount(narrow, record["changed_narrow"]);
  EXPECT_NEAR(static_cast<double>(most), record["max_change_ulp32"].as<double>(), 2);
  ExpectWithin(RelativeError(once), record["rel_rmse"], 0.01);
  const double share = static_cast<double>(exact) / kSamples;
  EXPECT_NEAR(share, record["exact_frac"].as<double>(), 6 * std::sqrt(share * (1 - share) / kSamples) + 1e-4);
}

void Bf16Only(const YAML::Node& record) {
  ExpectWithin(RelativeError(Weights("bf16", Sample()).Values()), record["rel_rmse"], 0.005);
}

// Whether adding u to what is stored of x changes the words.
bool Moves(const char* master, float x, double u) {
  Weights w(master, std::vector<float>{x});
  const std::vector<std::byte> before = w.planes().Bytes();
  w.Load({static_cast<float>(Wide(w.Values()[0]) + u)});
  return w.planes().Bytes() != before;
}
// Both ways: a millionth more than the record's, which lies a hair below a tie, moves it; a thousandth less does not.
void MinEffectiveUpdate(const YAML::Node& record) {
  for (const YAML::Node& row : record["rows"]) {
    const float x = row["x"].as<float>();
    for (const auto& [master, key] : {std::pair{"flash24", "b8"}, {"flash32", "b16"}}) {
      EXPECT_TRUE(Moves(master, x, row[key].as<double>() * 1.000001)) << master << x;
      EXPECT_FALSE(Moves(master, x, row[key].as<double>() * 0.999)) << master << x;
    }
  }
}

void FrozenUnitWeight(const YAML::Node& record) {
  for (const YAML::Node& row : record["rows"]) {
    Weights w(row["N"].as<int>() == 127 ? "flash24" : "flash32", std::vector<float>{1.0f});
    for (int step = 0; step < 1000; ++step) w.Load({w.Values()[0] - row["update"].as<float>()});
    EXPECT_EQ(w.Values()[0], row["final"].as<float>()) << row["update"].as<double>();
    EXPECT_NEAR(row["expected"].as<double>(), 1 - 1000 * row["update"].as<double>(), 1e-12);
  }
}

}  // namespace

Checks MasterChecks() {
  return {{"split_exact", SplitExact},
          {"split_every_exponent_bf16", SplitEveryExponent},
          {"split16_inexact", Split16Inexact},
          {"split8_levels", Split8Levels},
          {"split_idempotent_N127", [](const YAML::Node& record) { Idempotent("flash24", record); }},
          {"split_idempotent_N32767", [](const YAML::Node& record) { Idempotent("flash32", record); }},
          {"bf16_only_rel_rmse", Bf16Only},
          {"min_effective_update", MinEffectiveUpdate},
          {"frozen_unit_weight", FrozenUnitWeight}};
}

}  // namespace ballast::kernels
