#include "server/store/exact_codes.h"

#include <algorithm>
#include <array>
#include <bit>
#include <cmath>
#include <cstring>
#include <optional>
#include <vector>

namespace ballast {
namespace {

// A scale is the largest magnitude of its block rounded up, whose code is the largest or, rounded down, one or two less:
// so the scale lies a few steps above the one that the decoded values would get.
constexpr int kScalesTried = 6;
constexpr size_t kCodes = 256;
// Of values that were decoded from such codes none is strange; to look on would cost ten times what encoding does.
constexpr int kStrangeBlocks = 4;

using Table = std::array<float, kCodes>;

// What each code decodes to with this scale.
Table Decoded(const kernels::MomentCodec& codec, uint16_t scale) {
  static_assert(kCodes == kernels::kPad);
  alignas(64) std::array<uint8_t, kCodes> codes;
  alignas(64) std::array<uint16_t, kCodes / kernels::kBlock> scales;
  for (size_t code = 0; code < kCodes; ++code) codes[code] = static_cast<uint8_t>(code);
  scales.fill(scale);
  const std::byte* const planes[] = {reinterpret_cast<const std::byte*>(codes.data()),
                                     reinterpret_cast<const std::byte*>(scales.data())};
  Table table;
  codec.decode(planes, table.data(), kCodes);
  return table;
}

std::optional<uint8_t> CodeOf(const Table& table, float value) {
  for (size_t code = 0; code < kCodes; ++code) {
    if (std::bit_cast<uint32_t>(table[code]) == std::bit_cast<uint32_t>(value)) return static_cast<uint8_t>(code);
  }
  return std::nullopt;
}

// The codes of all values with this scale; false: one has none. The largest is looked for first.
bool FindCodes(const Table& table, const float* values, uint64_t count, uint8_t* codes) {
  const float* const largest =
      std::max_element(values, values + count, [](float a, float b) { return std::abs(a) < std::abs(b); });
  if (!CodeOf(table, *largest)) return false;
  for (uint64_t i = 0; i < count; ++i) {
    const auto code = CodeOf(table, values[i]);
    if (!code) return false;
    codes[i] = *code;
  }
  return true;
}

// False: no scale is found, and nothing is stored.
bool RecoverBlock(const kernels::MomentCodec& codec, const float* values, uint64_t count, std::byte* codes,
                  std::byte* scale_at) {
  uint16_t scale = 0;
  std::memcpy(&scale, scale_at, sizeof scale);
  std::array<uint8_t, kernels::kBlock> found;
  for (int tried = 0; tried < kScalesTried; ++tried, ++scale) {
    if (!FindCodes(Decoded(codec, scale), values, count, found.data())) continue;
    std::memcpy(codes, found.data(), count);
    std::memcpy(scale_at, &scale, sizeof scale);
    return true;
  }
  return false;
}

}  // namespace

void RecoverCodes(const kernels::MomentCodec& codec, std::byte* const* planes, const float* values, uint64_t n) {
  if (codec.planes.size() != 2 || codec.planes[0].bytes != 1 || codec.planes[1].bytes != sizeof(uint16_t) ||
      codec.planes[1].per != kernels::kBlock) {
    return;
  }
  std::vector<float> decoded(n);
  codec.decode(planes, decoded.data(), n);
  int strange = 0;  // blocks that were not decoded from such codes
  for (uint64_t first = 0; first < n && strange < kStrangeBlocks; first += kernels::kBlock) {
    const uint64_t count = std::min(kernels::kBlock, n - first);
    if (std::memcmp(decoded.data() + first, values + first, count * sizeof(float)) == 0) continue;
    const bool recovered = RecoverBlock(codec, values + first, count, planes[0] + first,
                                        planes[1] + first / kernels::kBlock * sizeof(uint16_t));
    strange += recovered ? 0 : 1;
  }
}

}  // namespace ballast
