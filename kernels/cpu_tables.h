// The lists of everything that is compiled, and the tables made of them: a lane's translation unit includes this and
// gives its tables to lanes/tables.h. A new rule or format is one more name in a list.
#pragma once

#include <algorithm>
#include <array>
#include <cmath>
#include <cstring>
#include <tuple>
#include <type_traits>

#include "kernels/cpu_kernels.h"
#include "kernels/formats/companded8.h"
#include "kernels/formats/fp32.h"
#include "kernels/formats/split.h"
#include "kernels/formats/wire.h"
#include "kernels/rules/adamw.h"

namespace ballast::kernels {
inline namespace BALLAST_UNIT {

using Lane = ScalarLane;

template <class... Ts>
struct List {};

using RuleList = List<AdamW>;
using MasterList = List<Fp32Master, Split24, Split32>;
using StateList = List<Fp32State, Companded8State>;
using WireList = List<WireFp32, WireBf16, WireFp16>;

template <class Rule, class MasterFormat, class State>
constexpr Kernel MakeKernel() {
  using K = CpuKernel<Lane, Rule, MasterFormat, State>;
  return {.rule = Rule::kName,
          .master = MasterFormat::kName,
          .state = State::kName,
          .planes = kPlanesOf<Rule, MasterFormat, State>,
          .hypers = Rule::kHypers,
          .prepare = &Rule::Prepare,
          .update = &K::Update};
}

template <class MasterFormat>
struct MasterCodec {
  static constexpr int kPlaneCount = PlaneCount<MasterFormat>();
  static constexpr auto kPlanes = MasterPlanes<MasterFormat>();

  template <class Wire>
  static bool LoadFrom(std::byte* const* planes, const void* in, uint64_t first, uint64_t last) {
    const auto value = [&](uint64_t e) {
      typename Wire::Word word;
      std::memcpy(&word, static_cast<const std::byte*>(in) + (e - first) * sizeof word, sizeof word);
      return Wire::Decode(word);
    };
    for (uint64_t e = first; e < last; ++e) {
      if (!std::isfinite(value(e))) return false;
    }
    for (uint64_t block = first; block < last; block += kBlock) {
      uint32_t stored[2][kBlock] = {};
      for (uint64_t i = 0; i < std::min(kBlock, last - block); ++i) {
        const auto w = MasterFormat::template Encode<Lane>(value(block + i), 0, /*stochastic=*/false);
        for (int p = 0; p < kPlaneCount; ++p) stored[p][i] = w.word[p];
      }
      for (int p = 0; p < kPlaneCount; ++p) StoreWords(planes[p], kPlanes[p].bytes, block, stored[p]);
    }
    return true;
  }

  template <class Wire>
  static void ServeAs(const std::byte* const* planes, void* out, uint64_t first, uint64_t last) {
    for (uint64_t block = first; block < last; block += kBlock) {
      uint32_t stored[2][kBlock] = {};
      for (int p = 0; p < kPlaneCount; ++p) LoadWords(planes[p], kPlanes[p].bytes, block, stored[p]);
      typename Wire::Word words[kBlock];
      for (uint64_t i = 0; i < kBlock; ++i) words[i] = ServeOne<Wire>(stored[0][i], stored[1][i]);
      const uint64_t count = std::min(kBlock, last - block);
      std::memcpy(static_cast<std::byte*>(out) + (block - first) * sizeof words[0], words, count * sizeof words[0]);
    }
  }

  // A master whose first plane is bf16 is served in bf16 as it is.
  template <class Wire>
  static typename Wire::Word ServeOne(uint32_t first_word, uint32_t second_word) {
    if constexpr (kPlanes[0].bytes == 2 && std::is_same_v<Wire, WireBf16>) {
      return static_cast<uint16_t>(first_word);
    } else {
      return Wire::Encode(MasterFormat::template Decode<Lane>(Words<Lane>{{first_word, second_word}}));
    }
  }

  static bool Load(std::byte* const* planes, WireIndex format, const void* in, uint64_t first, uint64_t last) {
    return [&]<class... Wires>(List<Wires...>) {
      constexpr bool (*kLoaders[])(std::byte* const*, const void*, uint64_t, uint64_t) = {&LoadFrom<Wires>...};
      return kLoaders[format](planes, in, first, last);
    }(WireList{});
  }
  static void Serve(const std::byte* const* planes, WireIndex format, void* out, uint64_t first, uint64_t last) {
    [&]<class... Wires>(List<Wires...>) {
      constexpr void (*kServers[])(const std::byte* const*, void*, uint64_t, uint64_t) = {&ServeAs<Wires>...};
      kServers[format](planes, out, first, last);
    }(WireList{});
  }
};

template <class Rule, class MasterFormat, class... States>
constexpr auto KernelsOfStates(List<States...>) {
  return std::array{MakeKernel<Rule, MasterFormat, States>()...};
}

template <class A, class B>
constexpr auto Concatenate(const A& a, const B& b) {
  std::array<Kernel, std::tuple_size_v<A> + std::tuple_size_v<B>> all{};
  std::copy(b.begin(), b.end(), std::copy(a.begin(), a.end(), all.begin()));
  return all;
}

template <class... Arrays>
constexpr auto Join(const Arrays&... arrays) {
  if constexpr (sizeof...(arrays) == 1) {
    return (arrays, ...);
  } else {
    return [](const auto& head, const auto&... tail) { return Concatenate(head, Join(tail...)); }(arrays...);
  }
}

template <class Rule, class... Masters>
constexpr auto KernelsOfMasters(List<Masters...>) {
  return Join(KernelsOfStates<Rule, Masters>(StateList{})...);
}

template <class... Rules>
constexpr auto AllKernels(List<Rules...>) {
  return Join(KernelsOfMasters<Rules>(MasterList{})...);
}
inline constexpr auto kKernels = AllKernels(RuleList{});

template <class... Ms>
constexpr auto AllMasters(List<Ms...>) {
  return std::array{Master{Ms::kName, MasterCodec<Ms>::kPlanes, &MasterCodec<Ms>::Load, &MasterCodec<Ms>::Serve}...};
}
inline constexpr auto kMasters = AllMasters(MasterList{});

template <class... Ws>
constexpr auto AllWires(List<Ws...>) {
  return std::array{WireFormat{Ws::kName, sizeof(typename Ws::Word)}...};
}
inline constexpr auto kWires = AllWires(WireList{});

template <class... Ts>
constexpr auto Names(List<Ts...>) {
  return std::array{Ts::kName...};
}
inline constexpr auto kRuleNames = Names(RuleList{});
inline constexpr auto kStateNames = Names(StateList{});

}  // namespace BALLAST_UNIT
}  // namespace ballast::kernels
