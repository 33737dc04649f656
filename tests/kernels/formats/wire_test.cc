// The payload formats against a reference in double: gradients in, through loading and through an update; weights out,
// through serving.
#include <gtest/gtest.h>

#include <bit>
#include <cmath>

#include "tests/kernels/decoded.h"
#include "tests/kernels/planes.h"

namespace ballast::kernels {
namespace {

float FromBits(uint32_t bits) { return std::bit_cast<float>(bits); }
double Wide(float x) { return static_cast<double>(x); }
// Signs of zeros count.
bool SameValue(double a, double b) { return a == b && std::signbit(a) == std::signbit(b); }

const WireFormat& Format(WireIndex index) { return WireFormats()[static_cast<size_t>(index)]; }
int BitsOf(const WireFormat& wire) { return static_cast<int>(wire.bytes) * 8; }

// All codes of a format below `end` without the sign.
std::vector<std::byte> Codes(const WireFormat& wire, const std::vector<uint32_t>& codes) {
  std::vector<std::byte> bytes(codes.size() * wire.bytes);
  for (size_t i = 0; i < codes.size(); ++i) std::memcpy(bytes.data() + i * wire.bytes, &codes[i], wire.bytes);
  return bytes;
}
struct AllCodes {
  std::vector<uint32_t> finite, other;
};
AllCodes CodesOf(const WireFormat& wire) {
  const uint32_t sign = 1u << (BitsOf(wire) - 1);
  const uint32_t largest = oracle::CodeOf(FloatOf(wire)->largest, *FloatOf(wire), BitsOf(wire));
  AllCodes all;
  for (uint32_t code = 0; code < 2 * sign; ++code) {
    ((code & (sign - 1)) <= largest ? all.finite : all.other).push_back(code);
  }
  return all;
}

TEST(WireTest, TheFormatsAreThese) {
  struct {
    const char* name;
    uint32_t bytes;
    bool gradient;
    Scaling scaling;
  } const known[] = {{"fp32", 4, true, Scaling::kNone},          {"bf16", 2, true, Scaling::kNone},
                     {"fp16", 2, true, Scaling::kNone},          {"fp8-e5m2", 1, true, Scaling::kNone},
                     {"fp8-e4m3", 1, false, Scaling::kNone},     {"int8-row", 1, false, Scaling::kRow},
                     {"int8-tensor", 1, false, Scaling::kTensor}};
  EXPECT_EQ(WireFormats().size(), std::size(known));
  for (const auto& wire : known) {
    ASSERT_GE(FindWireFormat(wire.name), 0) << wire.name;
    const WireFormat& got = Format(FindWireFormat(wire.name));
    EXPECT_EQ(got.bytes, wire.bytes) << wire.name;
    EXPECT_EQ(got.gradient, wire.gradient) << wire.name;
    EXPECT_EQ(got.scaling, wire.scaling) << wire.name;
    EXPECT_EQ(got.serving, std::string_view(wire.name) != "fp8-e5m2") << wire.name;
  }
}

TEST(WireTest, EveryFiniteCodeLoadsAsItsValue) {
  for (const char* name : {"bf16", "fp16", "fp8-e5m2"}) {
    const WireFormat& wire = Format(FindWireFormat(name));
    const AllCodes codes = CodesOf(wire);
    Weights w("fp32", codes.finite.size());
    ASSERT_TRUE(w.Load(FindWireFormat(name), Codes(wire, codes.finite).data()));
    const std::vector<float> values = w.Values();
    for (size_t i = 0; i < values.size(); ++i) {
      const double wanted = oracle::ValueOf(codes.finite[i], *FloatOf(wire), BitsOf(wire));
      ASSERT_TRUE(SameValue(Wide(values[i]), wanted)) << name << " " << codes.finite[i];
    }
    for (const uint32_t code : codes.other) {
      Weights one("fp32", 1);
      ASSERT_FALSE(one.Load(FindWireFormat(name), Codes(wire, {code}).data())) << name << " " << code;
    }
  }
}

// SGD's first buffer is the gradient, so it shows what an update decodes.
TEST(WireTest, EveryFiniteCodeIsTheGradientOfItsValue) {
  const Kernel& kernel = *FindKernel("sgd", "fp32", "fp32");
  for (const char* name : {"bf16", "fp16", "fp8-e5m2"}) {
    const WireFormat& wire = Format(FindWireFormat(name));
    AllCodes codes = CodesOf(wire);
    std::erase_if(codes.finite, [&](uint32_t code) {  // larger ones are refused as results, not as codes
      return std::abs(oracle::ValueOf(code, *FloatOf(wire), BitsOf(wire))) > 0x1p118;
    });
    Tensor tensor(kernel, codes.finite.size());
    const auto stats = tensor.Step({FindWireFormat(name), Codes(wire, codes.finite)}, {});
    EXPECT_EQ(Combine(stats, true).rejected, 0u);
    for (size_t i = 0; i < codes.finite.size(); ++i) {
      const double wanted = oracle::ValueOf(codes.finite[i], *FloatOf(wire), BitsOf(wire));
      ASSERT_EQ(Wide(ReadPlane<float>(tensor, 1, i)), wanted) << name << " " << codes.finite[i];
    }
    for (const uint32_t code : codes.other) {
      Tensor one(kernel, 1);
      ASSERT_EQ(one.Step({FindWireFormat(name), Codes(wire, {code})}, {})[0].nonfinite, 1u) << name << " " << code;
    }
  }
}

// Sums have one rounding a term: of fp32's sum, which a double rounded once more is.
TEST(WireTest, SumsAreRoundedOncePerTerm) {
  for (const char* name : {"bf16", "fp16", "fp8-e5m2"}) {
    const WireFormat& wire = Format(FindWireFormat(name));
    const std::vector<uint32_t> codes = CodesOf(wire).finite, mirrored(codes.rbegin(), codes.rend());
    std::vector<float> sum(codes.size() + 1, 77.0f), wanted(codes.size());
    for (const std::vector<uint32_t>* terms : {&codes, &mirrored, &codes}) {
      const bool first = terms == &codes && sum[0] == 77.0f;
      wire.accumulate(sum.data(), Codes(wire, *terms).data(), codes.size(), first);
      for (size_t i = 0; i < codes.size(); ++i) {
        const double term = oracle::ValueOf((*terms)[i], *FloatOf(wire), BitsOf(wire));
        wanted[i] = static_cast<float>(first ? term : Wide(wanted[i]) + term);
        ASSERT_EQ(std::bit_cast<uint32_t>(sum[i]), std::bit_cast<uint32_t>(wanted[i])) << name << " " << i;
      }
      EXPECT_EQ(sum.back(), 77.0f);  // beyond the end
    }
  }
  for (const WireFormat& wire : WireFormats()) EXPECT_EQ(wire.accumulate != nullptr, wire.gradient) << wire.name;
}

// Serves fp32 weights and holds each code against the oracle's.
void ExpectServedAsTheOracle(const char* name, const std::vector<float>& values) {
  const WireFormat& wire = Format(FindWireFormat(name));
  Weights w("fp32", values);
  std::vector<std::byte> served(values.size() * wire.bytes);
  w.master().encode_weights(w.planes().get(), FindWireFormat(name), nullptr, 1, served.data(), 0, values.size());
  for (size_t i = 0; i < values.size(); ++i) {
    uint32_t code = 0;
    std::memcpy(&code, served.data() + i * wire.bytes, wire.bytes);
    const double nearest = oracle::Nearest(Wide(values[i]), *FloatOf(wire));
    ASSERT_EQ(code, oracle::CodeOf(nearest, *FloatOf(wire), BitsOf(wire))) << name << " of " << values[i];
  }
}

constexpr const char* kServedFloats[] = {"bf16", "fp16", "fp8-e4m3"};

// Every code's value, the middle to the next one, and the fp32 numbers on both sides of each.
TEST(WireTest, ServingRoundsToNearestEvenAroundEveryCode) {
  for (const char* name : kServedFloats) {
    const WireFormat& wire = Format(FindWireFormat(name));
    std::vector<float> values;
    for (const uint32_t code : CodesOf(wire).finite) {
      const double here = oracle::ValueOf(code, *FloatOf(wire), BitsOf(wire));
      const double next = here + std::copysign(oracle::Spacing(here, *FloatOf(wire)), here);
      for (const double x : {here, (here + next) / 2}) {
        const uint32_t middle = std::bit_cast<uint32_t>(static_cast<float>(x));
        for (const uint32_t bits : {middle - 1, middle, middle + 1}) {
          if (std::isfinite(FromBits(bits))) values.push_back(FromBits(bits));
        }
      }
    }
    ExpectServedAsTheOracle(name, values);
  }
}

TEST(WireTest, ServingRoundsRandomAndAllBf16Patterns) {
  Normals random(11);
  std::vector<float> values;
  for (uint32_t i = 0; i < 65536; ++i) values.push_back(FromBits(i << 16));
  for (int i = 0; i < 200000; ++i) values.push_back(FromBits(static_cast<uint32_t>(random.Word())));
  std::erase_if(values, [](float x) { return !std::isfinite(x); });
  for (const char* name : kServedFloats) ExpectServedAsTheOracle(name, values);
}

TEST(WireTest, FiniteValuesBeyondTheRangeSaturate) {
  const std::vector<float> values = {FromBits(0x7f7fffff), 1e30f, 65536.0f, -1e30f};
  EXPECT_EQ(Weights("fp32", values).Served<uint16_t>("fp16"), (std::vector<uint16_t>{0x7bff, 0x7bff, 0x7bff, 0xfbff}));
  EXPECT_EQ(Weights("fp32", values).Served<uint8_t>("fp8-e4m3"), (std::vector<uint8_t>{0x7e, 0x7e, 0x7e, 0xfe}));
  EXPECT_EQ(Weights("fp32", values).Served<uint16_t>("bf16")[0], 0x7f7f);
}

TEST(WireTest, EveryMasterServesEveryFormatFromItsDecodedValue) {
  const std::vector<float> weights = Normals(5).Vector(1000, 3);
  for (const MasterFormat& master : MasterFormats()) {
    Weights w(master.name, weights);
    const std::vector<float> decoded = w.Values();
    const std::vector<uint16_t> half = w.Served<uint16_t>("fp16");
    const std::vector<uint8_t> quarter = w.Served<uint8_t>("fp8-e4m3");
    for (size_t i = 0; i < weights.size(); ++i) {
      ASSERT_EQ(oracle::ValueOf(half[i], oracle::kFp16, 16), oracle::Nearest(Wide(decoded[i]), oracle::kFp16));
      ASSERT_EQ(oracle::ValueOf(quarter[i], oracle::kE4M3, 8), oracle::Nearest(Wide(decoded[i]), oracle::kE4M3));
    }
  }
}

// A position may lie within fp32's error of a half.
void ExpectInt8(double w, double scale, int q) {
  if (scale == 0) {
    ASSERT_EQ(q, 0);
    return;
  }
  ASSERT_LE(std::abs(127 * w / scale - q), 0.5 + 127 * 0x1p-22) << w << " of " << scale;
  ASSERT_LE(std::abs(q), 127);
}

TEST(Int8Test, RowsHaveTheirOwnScaleWhereverAPartBegins) {
  for (const MasterFormat& master : MasterFormats()) {
    for (const uint64_t row : {1ull, 7ull, 33ull, 64ull, 1000ull}) {
      SCOPED_TRACE(std::string(master.name) + " rows of " + std::to_string(row));
      const uint64_t rows = 3000 / row, n = rows * row;
      std::vector<float> values = Normals(row).Vector(n);
      std::fill_n(values.begin() + static_cast<ptrdiff_t>(row * (rows / 2)), row, 0.0f);
      Weights w(master.name, values);
      std::vector<float> scales, decoded = w.Values();
      for (uint64_t r = 0; r < rows; ++r) {
        scales.push_back(w.master().absmax(w.planes().get(), r * row, (r + 1) * row));
      }
      EXPECT_EQ(scales[rows / 2], 0.0f);
      const std::vector<int8_t> whole = w.Served<int8_t>("int8-row", scales.data(), row);
      for (uint64_t i = 0; i < n; ++i) {
        ExpectInt8(Wide(decoded[i]), Wide(scales[i / row]), whole[i]);
        if (HasFatalFailure()) return;
      }
      std::vector<int8_t> part(n - 1024);
      w.master().encode_weights(w.planes().get(), FindWireFormat("int8-row"), scales.data(), row, part.data(), 1024, n);
      EXPECT_TRUE(std::equal(part.begin(), part.end(), whole.begin() + 1024));
    }
  }
}

TEST(Int8Test, ATensorHasOneScaleAndTheLargestWeightIsCode127) {
  for (const MasterFormat& master : MasterFormats()) {
    Weights w(master.name, Normals(2).Vector(5000));
    const float scale = w.master().absmax(w.planes().get(), 0, 5000);
    const std::vector<float> decoded = w.Values();
    const std::vector<int8_t> codes = w.Served<int8_t>("int8-tensor", &scale, 5000);
    int most = 0;
    for (size_t i = 0; i < codes.size(); ++i) {
      ExpectInt8(Wide(decoded[i]), Wide(scale), codes[i]);
      most = std::max(most, std::abs(int{codes[i]}));
    }
    EXPECT_EQ(most, 127) << master.name;
    const float zero = 0;
    const std::vector<int8_t> none = Weights(master.name, 100).Served<int8_t>("int8-tensor", &zero, 100);
    EXPECT_EQ(none, std::vector<int8_t>(100)) << master.name;
  }
}

// Rounding is the oracle's, halves to even: a scale of 127 makes every position a weight.
TEST(Int8Test, HalvesGoToEven) {
  std::vector<float> values;
  for (int half = -253; half <= 253; ++half) values.push_back(static_cast<float>(half) / 2);
  const float scale = 127;
  const std::vector<int8_t> codes = Weights("fp32", values).Served<int8_t>("int8-tensor", &scale, values.size());
  for (size_t i = 0; i < values.size(); ++i) EXPECT_EQ(codes[i], oracle::Int8Of(Wide(values[i]), 127)) << values[i];
}

TEST(Int8Test, TinyAndHugeScalesLoseNothing) {
  for (const float size : {0x1p-140f, 0x1p-126f, 1e-30f, 1e30f, 0x1p119f}) {
    const std::vector<float> values = {size, -size, size / 4, 0};
    const std::vector<int8_t> codes = Weights("fp32", values).Served<int8_t>("int8-tensor", &size, values.size());
    EXPECT_EQ(codes, (std::vector<int8_t>{127, -127, 32, 0})) << size;
  }
}

TEST(WireTest, LoadingFromAPayloadKeepsItsValues) {
  for (const char* name : {"fp32", "bf16", "fp16"}) {
    const WireIndex format = FindWireFormat(name);
    const Payload payload = Encoded(format, Normals(6).Vector(333));
    for (const MasterFormat& master : MasterFormats()) {
      const std::string_view kept = master.name;
      const bool keeps_half = kept != "bf16" && kept != "mcf8" && !kept.starts_with("flash");
      if (std::string_view(name) == "fp32" ? kept != "fp32" && kept != "split32" : !keeps_half) continue;
      Weights w(master.name, 333);
      ASSERT_TRUE(w.Load(format, payload.bytes.data()));
      std::vector<std::byte> again(payload.bytes.size());
      w.master().encode_weights(w.planes().get(), format, nullptr, 1, again.data(), 0, 333);
      EXPECT_EQ(again, payload.bytes) << master.name << " " << name;
    }
  }
}

}  // namespace
}  // namespace ballast::kernels
