// bitsandbytes' blockwise 8-bit state (Dettmers et al., arXiv 2110.02861): the nearest of 256 values times the largest
// magnitude of a block of 256, kept in fp32. For import, export and comparison.
//
// The values are the dynamic tree's: in the decade 10^(i-6), i = 0..6, the centres of n equal parts of [0.1, 1], with
// n = 2^i and both signs (m), or n = 2^(i+1) (v); and 0 and 1. The parts' ends are computed as torch.linspace does,
// from the nearer end. A value in the middle goes to the lower neighbour.
#pragma once

#include <algorithm>
#include <array>
#include <bit>

#include "kernels/formats/format.h"

namespace ballast::kernels {
inline namespace BALLAST_UNIT {

using DynamicMap = std::array<float, 256>;

// End j of `parts` equal parts of [0.1, 1].
constexpr float DynamicEnd(int j, int parts) {
  const double step = static_cast<double>((1.0f - 0.1f) / static_cast<float>(parts));
  return 2 * j < parts + 1 ? static_cast<float>(static_cast<double>(0.1f) + step * j)
                           : static_cast<float>(1.0 - step * (parts - j));
}

constexpr DynamicMap MakeDynamicMap(bool both_signs) {
  DynamicMap map{};
  size_t size = 0;
  const double decades[] = {1e-6, 1e-5, 1e-4, 1e-3, 1e-2, 1e-1, 1e0};
  for (int i = 0; i < 7; ++i) {
    const int parts = both_signs ? 1 << i : 2 << i;
    for (int j = 0; j < parts; ++j) {
      const float low = DynamicEnd(j, parts), high = DynamicEnd(j + 1, parts);
      const float value = static_cast<float>(decades[i] * static_cast<double>((low + high) / 2));
      map[size++] = value;
      if (both_signs) map[size++] = -value;
    }
  }
  map[size++] = 0;
  map[size++] = 1;
  std::sort(map.begin(), map.end());
  return map;
}

// The values as bits, and the middles between neighbours; no value lies above the last.
struct DynamicTables {
  alignas(64) std::array<uint32_t, 256> values, middles;
};
constexpr DynamicTables MakeDynamicTables(bool both_signs) {
  DynamicTables tables{};
  const DynamicMap map = MakeDynamicMap(both_signs);
  for (size_t i = 0; i < 256; ++i) {
    tables.values[i] = std::bit_cast<uint32_t>(map[i]);
    tables.middles[i] = std::bit_cast<uint32_t>(i < 255 ? (map[i] + map[i + 1]) / 2 : 2.0f);
  }
  return tables;
}

#ifdef __CUDACC__
template <bool kBothSigns>
__device__ const DynamicTables kDeviceTables = MakeDynamicTables(kBothSigns);
#endif

template <bool kBothSigns, uint32_t kLargest>
struct Dynamic8Slot {
  static constexpr StoredPlane kPlanes[] = {{"", 1, 1}, {"scale", 4, 256}};
  static constexpr uint32_t kScalePer = 256;
  static constexpr bool kStoresRoot = false;
  static constexpr uint32_t kLargestBits = kLargest;
  static constexpr DynamicTables kTables = MakeDynamicTables(kBothSigns);

  static BALLAST_FN const DynamicTables& Tables() {
#ifdef __CUDA_ARCH__
    return kDeviceTables<kBothSigns>;
#else
    return kTables;
#endif
  }

  template <class L>
  static BALLAST_FN typename L::U Scale(typename L::U absmax) {
    return absmax;
  }

  template <class L>
  struct Decoder {
    static constexpr int kNumbers = 1;
    typename L::F number[kNumbers];  // the block's largest magnitude

    static BALLAST_FN Decoder Of(typename L::U scale) { return {{L::FromBits(scale)}}; }
    BALLAST_FN typename L::F Decode(typename L::U code) const {
      return L::Mul(L::FromBits(L::Gather(Tables().values.data(), code)), number[0]);
    }
  };

  template <class L>
  struct Encoder {
    static constexpr int kNumbers = 1;
    typename L::F number[kNumbers];  // what divides: 1 for a block of zeros

    static BALLAST_FN Encoder Of(typename L::U scale, typename L::U) {
      return {{L::Select(L::EqualBits(scale, L::SetBits(0)), L::Set(1.0f), L::FromBits(scale))}};
    }
    // The number of middles below x.
    template <bool>
    BALLAST_FN typename L::U Encode(typename L::F x, typename L::U) const {
      const auto z = L::Div(x, number[0]);
      auto code = L::SetBits(0);
      for (uint32_t step = 128; step > 0; step /= 2) {
        const auto middle = L::Gather(Tables().middles.data(), L::AddBits(code, L::SetBits(step - 1)));
        const auto further = L::AddBits(code, L::SetBits(step));
        code = L::SelectBits(L::Less(L::FromBits(middle), z), further, code);
      }
      return code;
    }
  };

  template <class L>
  static BALLAST_FN typename L::M Saturated(typename L::U code) {
    return L::EqualBits(code, L::SetBits(255));
  }
};

struct Dynamic8State {
  static constexpr const char* kName = "dynamic8";
  using Signed = Dynamic8Slot<true, kLargestBits>;
  using NonNegative = Dynamic8Slot<false, kLargestFiniteBits>;
};

}  // namespace BALLAST_UNIT
}  // namespace ballast::kernels
