// The lists of everything that is compiled, and the tables made of them: a lane's translation unit includes this and
// gives Tables<its lane> to lanes/tables.h. A new rule or format is one more name in a list.
#pragma once

#include <algorithm>
#include <array>
#include <tuple>

#include "kernels/cpu_codecs.h"
#include "kernels/cpu_kernels.h"
#include "kernels/formats/bf16.h"
#include "kernels/formats/companded8.h"
#include "kernels/formats/dynamic8.h"
#include "kernels/formats/flash.h"
#include "kernels/formats/fp32.h"
#include "kernels/formats/split.h"
#include "kernels/formats/wire.h"
#include "kernels/lanes/tables.h"
#include "kernels/rules/adam.h"
#include "kernels/rules/collage.h"
#include "kernels/rules/lion.h"
#include "kernels/rules/sgd.h"
#include "kernels/rules/stable_adamw.h"

namespace ballast::kernels {
inline namespace BALLAST_UNIT {

using RuleList = List<AdamW, Adam, StableAdamW, Sgd, SgdW, Lion, CollageLight, CollagePlus>;
using MasterList = List<Fp32Master, Split24, Split32, Flash24, Flash32, McfMaster, Bf16Master>;
using StateList = List<Fp32State, Bf16State, Companded8State, Flash8State, Dynamic8State, McfState>;
using WireList = List<WireFp32, WireBf16, WireFp16, WireFp8E5M2, WireFp8E4M3, WireInt8Row, WireInt8Tensor>;

// The triples that make sense: every rule of each line with every master and every state of the line. Stochastic codes
// of m need the floor that a coarse v has, so both slots are of one state format; Collage's rules compute in mcf.
template <class Rules, class Masters, class States>
struct Family {};
using Families = List<
    Family<List<AdamW, Adam, StableAdamW>, List<Fp32Master, Split24, Split32, Bf16Master>,
           List<Fp32State, Bf16State, Companded8State>>,
    Family<List<Sgd, SgdW, Lion>, List<Fp32Master, Split24, Split32, Bf16Master>, List<Fp32State, Companded8State>>,
    Family<List<AdamW>, List<Flash24, Flash32>, List<Fp32State, Companded8State, Flash8State>>,
    Family<List<AdamW>, List<Fp32Master, Split24>, List<Flash8State, Dynamic8State>>,
    Family<List<CollageLight>, List<McfMaster>, List<Bf16State>>,
    Family<List<CollagePlus>, List<McfMaster>, List<McfState>>>;

template <class L, class Rule, class Master, class State>
struct KernelEntry {
  using K = CpuKernel<L, Rule, Master, State>;

  static K Make(const Update& u) {
    return [&]<class... Wires>(List<Wires...>) {
      constexpr GradientLoader kLoaders[] = {&LoadAs<Wires>...};
      return K(u, kLoaders[u.grad_format]);
    }(WireList{});
  }
  template <class Wire>
  static uint32_t LoadAs(const std::byte* in, uint64_t first, uint64_t count, float scale, float* row) {
    if constexpr (Wire::kGradient) return DecodePayload<L, Wire>(in, first, count, scale, row);
    return kInfinityBits;  // never a gradient's format; callers ask WireFormat first
  }

  static void RunUpdate(const Update& u, uint64_t first, uint64_t last, TileStatistics* stats) {
    K kernel = Make(u);
    for (uint64_t tile = first; tile < last; ++tile) stats[tile - first] = kernel.UpdateTile(tile);
  }
  static void RunMeasure(const Update& u, uint64_t first, uint64_t last, float* sums) {
    K kernel = Make(u);
    for (uint64_t tile = first; tile < last; ++tile) sums[tile - first] = kernel.MeasureTile(tile);
  }
  static constexpr Kernel Table() {
    Kernel kernel{.rule = Rule::kName,
                  .master = Master::kName,
                  .state = State::kName,
                  .planes = kPlanesOf<Rule, Master, State>,
                  .hypers = Rule::kHypers,
                  .has_rms = Rule::kHasRms,
                  .prepare = &Rule::Prepare,
                  .measure = nullptr,
                  .finish = nullptr,
                  .update = &RunUpdate};
    if constexpr (Rule::kTwoPass) {
      kernel.measure = &RunMeasure;
      kernel.finish = &Rule::Finish;
    }
    return kernel;
  }
};

template <class... Arrays>
constexpr auto Join(const Arrays&... arrays) {
  std::array<Kernel, (std::tuple_size_v<Arrays> + ...)> all{};
  auto to = all.begin();
  ((to = std::copy(arrays.begin(), arrays.end(), to)), ...);
  return all;
}

template <class L>
struct Tables {
  template <class Rule, class Master, class... States>
  static constexpr auto OfStates(List<States...>) {
    return std::array{KernelEntry<L, Rule, Master, States>::Table()...};
  }
  template <class Rule, class States, class... Masters>
  static constexpr auto OfMasters(List<Masters...>) {
    return Join(OfStates<Rule, Masters>(States{})...);
  }
  template <class... Rules, class Masters, class States>
  static constexpr auto OfFamily(Family<List<Rules...>, Masters, States>) {
    return Join(OfMasters<Rules, States>(Masters{})...);
  }
  template <class... Lines>
  static constexpr auto OfFamilies(List<Lines...>) {
    return Join(OfFamily(Lines{})...);
  }

  template <class... Ms>
  static constexpr auto OfMasterList(List<Ms...>) {
    return std::array{OneMaster<Ms>()...};
  }
  template <class M>
  static constexpr Master OneMaster() {
    using Codec = MasterCodec<L, M, WireList>;
    return {M::kName, Codec::kPlanes, &Codec::Load, &Codec::Serve, &Codec::AbsMax};
  }

  template <class... Ss>
  static constexpr auto OfStateList(List<Ss...>) {
    return std::array{OneState<Ss>()...};
  }
  template <class S>
  static constexpr State OneState() {
    constexpr SlotCodec kMomentum = CpuSlotCodec<L, typename S::Signed, false>::Table();
    if constexpr (requires { typename S::Residual; }) {
      return {S::kName, kMomentum, PairCodec<L, McfMaster>::Table()};
    } else {
      return {S::kName, kMomentum, CpuSlotCodec<L, typename S::NonNegative, true>::Table()};
    }
  }

  static constexpr auto kKernels = OfFamilies(Families{});
  static constexpr auto kMasters = OfMasterList(MasterList{});
  static constexpr auto kStates = OfStateList(StateList{});
};

template <class... Ws>
constexpr auto OfWires(List<Ws...>) {
  return std::array{WireFormat{Ws::kName, Ws::kBytes, Ws::kGradient, Ws::kServing, Ws::kScaling}...};
}
template <class... Rs>
constexpr auto NamesOf(List<Rs...>) {
  return std::array{Rs::kName...};
}
inline constexpr auto kWires = OfWires(WireList{});
inline constexpr auto kRuleNames = NamesOf(RuleList{});

template <class L>
constexpr LaneTables MakeTables(const char* name) {
  return {name, Tables<L>::kKernels, Tables<L>::kMasters, Tables<L>::kStates, kWires, kRuleNames};
}

}  // namespace BALLAST_UNIT
}  // namespace ballast::kernels
