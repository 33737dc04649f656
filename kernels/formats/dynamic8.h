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
struct Dynamic8Moment {
  static constexpr StoredPlane kPlanes[2] = {{"", 1, 1}, {"scale", 4, 256}};
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

  template <class V>
  static BALLAST_FN typename V::U Scale(typename V::U absmax) {
    return absmax;
  }

  template <class V>
  struct Decoder {
    static constexpr int kNumbers = 1;
    typename V::F number[kNumbers];  // the block's largest magnitude

    static BALLAST_FN Decoder Of(typename V::U scale) { return {{V::FromBits(scale)}}; }
    BALLAST_FN typename V::F Decode(typename V::U code) const {
      return V::Mul(V::FromBits(V::Gather(Tables().values.data(), code)), number[0]);
    }
  };

  template <class V>
  struct Encoder {
    static constexpr int kNumbers = 1;
    typename V::F number[kNumbers];  // what divides: 1 for a block of zeros

    static BALLAST_FN Encoder Of(typename V::U scale, typename V::U) {
      return {{V::Select(V::EqualBits(scale, V::SetBits(0)), V::Set(1.0f), V::FromBits(scale))}};
    }
    // The number of middles below x.
    template <bool>
    BALLAST_FN typename V::U Encode(typename V::F x, typename V::U) const {
      const auto z = V::Div(x, number[0]);
      auto code = V::SetBits(0);
      for (uint32_t step = 128; step > 0; step /= 2) {
        const auto middle = V::Gather(Tables().middles.data(), V::AddBits(code, V::SetBits(step - 1)));
        const auto further = V::AddBits(code, V::SetBits(step));
        code = V::SelectBits(V::Less(V::FromBits(middle), z), further, code);
      }
      return code;
    }
  };

  template <class V>
  static BALLAST_FN typename V::M Saturated(typename V::U code) {
    return V::EqualBits(code, V::SetBits(255));
  }
};

struct Dynamic8State {
  static constexpr const char* kName = "dynamic8";
  using Signed = Dynamic8Moment<true, kLargestBits>;
  using NonNegative = Dynamic8Moment<false, kLargestFiniteBits>;
};

}  // namespace BALLAST_UNIT
}  // namespace ballast::kernels
