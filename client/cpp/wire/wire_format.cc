#include "client/cpp/wire/wire_format.h"

#include <algorithm>
#include <array>
#include <bit>
#include <cmath>
#include <cstring>
#include <limits>

#include "absl/strings/str_cat.h"

namespace ballast {
namespace {

constexpr std::array kFormats = {
    WireFormat{"fp32", 4, Scaling::kNone, true},          WireFormat{"bf16", 2, Scaling::kNone, true},
    WireFormat{"fp16", 2, Scaling::kNone, true},          WireFormat{"fp8-e5m2", 1, Scaling::kNone, false},
    WireFormat{"fp8-e4m3", 1, Scaling::kNone, false},     WireFormat{"int8-row", 1, Scaling::kRow, false},
    WireFormat{"int8-tensor", 1, Scaling::kTensor, false}};

// OCP E4M3: no infinities, one NaN of each sign.
std::array<float, 256> MakeE4M3() {
  std::array<float, 256> values;
  for (int code = 0; code < 256; ++code) {
    const int exponent = (code >> 3) & 15, mantissa = code & 7;
    const float magnitude = exponent == 0 ? std::ldexp(static_cast<float>(mantissa), -9)
                                          : std::ldexp(static_cast<float>(8 + mantissa), exponent - 10);
    const bool nan = (code & 0x7f) == 0x7f;
    values[static_cast<size_t>(code)] =
        nan ? std::numeric_limits<float>::quiet_NaN() : (code < 128 ? magnitude : -magnitude);
  }
  return values;
}

uint16_t ToBf16(float x) {
  const auto bits = std::bit_cast<uint32_t>(x);
  if (std::isnan(x)) return static_cast<uint16_t>((bits >> 16) | 0x40);
  const uint32_t magnitude = bits & 0x7fffffff;
  const uint32_t rounded = std::isinf(x) ? 0x7f80 : std::min((magnitude + 0x7fff + ((bits >> 16) & 1)) >> 16, 0x7f7fu);
  return static_cast<uint16_t>(((bits >> 16) & 0x8000) | rounded);
}

uint16_t ToFp16(float x) {
  const auto bits = std::bit_cast<uint32_t>(x);
  const uint32_t sign = (bits >> 16) & 0x8000, magnitude = bits & 0x7fffffff;
  uint32_t word = 0;
  if (std::isnan(x)) {
    word = 0x7e00;
  } else if (std::isinf(x)) {
    word = 0x7c00;
  } else if (std::abs(x) < 0x1p-14f) {
    word = static_cast<uint32_t>(std::nearbyint(std::abs(x) * 0x1p24f));  // a multiple of 2^-24
  } else {
    word = std::min(((magnitude + 0xfff + ((magnitude >> 13) & 1)) >> 13) - (112u << 10), 0x7bffu);
  }
  return static_cast<uint16_t>(sign | word);
}

float FromFp16(uint16_t word) {
  const uint32_t sign = static_cast<uint32_t>(word & 0x8000) << 16, exponent = word >> 10 & 31, mantissa = word & 0x3ff;
  if (exponent == 0) return std::ldexp(static_cast<float>(mantissa), -24) * (sign == 0 ? 1.0f : -1.0f);
  const uint32_t bits = exponent == 31 ? 0x7f800000 : (exponent + 112) << 23;
  return std::bit_cast<float>(sign | bits | mantissa << 13);
}

float Load(absl::string_view format, uint64_t index, const std::byte* from) {
  if (format == "fp32") {
    float value = 0;
    std::memcpy(&value, from + index * 4, 4);
    return value;
  }
  uint16_t word = 0;
  std::memcpy(&word, from + index * 2, 2);
  return format == "bf16" ? std::bit_cast<float>(static_cast<uint32_t>(word) << 16) : FromFp16(word);
}

void Store(float value, uint64_t index, absl::string_view dtype, std::byte* out) {
  if (dtype == "fp32") {
    std::memcpy(out + index * 4, &value, 4);
    return;
  }
  const uint16_t word = dtype == "bf16" ? ToBf16(value) : ToFp16(value);
  std::memcpy(out + index * 2, &word, 2);
}

void DecodeInt8(const EncodedWeights& w, absl::string_view dtype, std::byte* out) {
  const uint64_t first_row = w.first / w.row_length;
  for (uint64_t i = 0; i < w.codes.size(); ++i) {
    const float scale = w.scales[(w.first + i) / w.row_length - first_row];
    Store(static_cast<float>(static_cast<int8_t>(w.codes[i])) * scale / 127.0f, i, dtype, out);
  }
}

void DecodeE4M3(const EncodedWeights& w, absl::string_view dtype, std::byte* out) {
  static const std::array<float, 256> values = MakeE4M3();
  for (uint64_t i = 0; i < w.codes.size(); ++i) Store(values[static_cast<size_t>(w.codes[i])], i, dtype, out);
}

void DecodeFloats(const EncodedWeights& w, absl::string_view dtype, std::byte* out) {
  for (uint64_t i = 0; i < w.codes.size() / FormatBytes(w.format); ++i) {
    Store(Load(w.format, i, w.codes.data()), i, dtype, out);
  }
}

}  // namespace

const WireFormat* FindFormat(absl::string_view name) {
  const auto* found = std::find_if(kFormats.begin(), kFormats.end(), [&](const auto& f) { return f.name == name; });
  return found == kFormats.end() ? nullptr : found;
}

uint64_t FormatBytes(absl::string_view name) {
  const WireFormat* format = FindFormat(name);
  return format == nullptr ? 0 : format->bytes;
}

uint64_t ScalesNeeded(uint64_t row_length, uint64_t first, uint64_t last) {
  return row_length == 0 || first == last ? 0 : (last - 1) / row_length + 1 - first / row_length;
}

absl::Status DecodeWeights(const EncodedWeights& w, absl::string_view dtype, std::byte* out) {
  const WireFormat* from = FindFormat(w.format);
  const WireFormat* to = FindFormat(dtype);
  const bool scaled = from != nullptr && from->scaling != Scaling::kNone;
  const bool floats = from != nullptr && from->computes;
  if (to == nullptr || !to->computes || !(scaled || floats || w.format == "fp8-e4m3")) {
    return absl::UnimplementedError(
        absl::StrCat("weights in '", w.format, "' cannot be decoded to '", dtype, "' by this client"));
  }
  if (floats) {
    DecodeFloats(w, dtype, out);
    return absl::OkStatus();
  }
  const uint64_t wanted = ScalesNeeded(scaled ? w.row_length : 0, w.first, w.first + w.codes.size());
  if (w.scales.size() != wanted || (scaled && w.row_length == 0)) {
    return absl::InternalError(
        absl::StrCat("weights in ", w.format, " came with ", w.scales.size(), " scales instead of ", wanted));
  }
  scaled ? DecodeInt8(w, dtype, out) : DecodeE4M3(w, dtype, out);
  return absl::OkStatus();
}

}  // namespace ballast
