// The tables that an instruction set's unit makes of the lists in lists.h: it includes this and gives Tables<its
// vector> to cpu/tables.h.
#pragma once

#include <array>
#include <bit>

#include "kernels/cpu/cpu_codecs.h"
#include "kernels/cpu/cpu_curvature.h"
#include "kernels/cpu/cpu_kernels.h"
#include "kernels/cpu/tables.h"
#include "kernels/lists.h"

namespace ballast::kernels {
inline namespace BALLAST_UNIT {

template <class V, class Rule, class Master, class State>
struct KernelEntry {
  using K = CpuKernel<V, Rule, Master, State>;

  static K Make(const Update& u) { return K(u, GradientLoaders<V, WireList>::Of(u.grad_format)); }

  // Each thread has a copy of the update: its caller may write to what lies beside the one that all are given.
  static void RunUpdate(const Update& update, uint64_t first, uint64_t last, TileStatistics* stats) {
    const Update u = update;
    K kernel = Make(u);
    for (uint64_t tile = first; tile < last; ++tile) stats[tile - first] = kernel.UpdateTile(tile);
  }
  static void RunMeasure(const Update& update, uint64_t first, uint64_t last, float* sums) {
    const Update u = update;
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
                  .fit = nullptr,
                  .update = &RunUpdate,
                  .precondition = nullptr,
                  .curvature = nullptr};
    if constexpr (Rule::kTwoPass) kernel.measure = &RunMeasure;
    if constexpr (kIsOverMatrix<Rule>) {
      kernel.fit = &Rule::Fit;
    } else if constexpr (Rule::kTwoPass) {
      kernel.finish = &Rule::Finish;
    }
    if constexpr (Rule::kHasRms) {
      static_assert(Rule::kMoments[0] == Moment::kSigned && Rule::kMoments[1] == Moment::kNonNegative);
      kernel.precondition = &Rule::Precondition;
      kernel.curvature = &ProbeTiles<V, State>;
    }
    return kernel;
  }
};

template <class V>
struct Tables {
  template <class... Ts>
  static constexpr auto OfTriples(List<Ts...>) {
    return std::array{KernelEntry<V, typename Ts::Rule, typename Ts::Master, typename Ts::State>::Table()...};
  }

  template <class... Ms>
  static constexpr auto OfMasterList(List<Ms...>) {
    return std::array{OneMasterFormat<Ms>()...};
  }
  template <class M>
  static constexpr MasterFormat OneMasterFormat() {
    using Codec = MasterCodec<V, M, WireList>;
    return {M::kName,     Codec::kPlanes,        M::kPaired,     std::bit_cast<float>(M::kSaturated),
            &Codec::Load, &Codec::EncodeWeights, &Codec::AbsMax, &Codec::MoveAverage};
  }

  template <class... Ss>
  static constexpr auto OfStateList(List<Ss...>) {
    return std::array{OneMomentFormat<Ss>()...};
  }
  template <class S>
  static constexpr MomentFormat OneMomentFormat() {
    constexpr MomentCodec kMomentum = CpuMomentCodec<V, typename S::Signed, false>::Table();
    if constexpr (requires { typename S::Residual; }) {
      return {S::kName, kMomentum, PairCodec<V, McfMaster>::Table()};
    } else {
      return {S::kName, kMomentum, CpuMomentCodec<V, typename S::NonNegative, true>::Table()};
    }
  }

  template <class... Ws>
  static constexpr auto OfWires(List<Ws...>) {
    return std::array{OneWire<Ws>()...};
  }
  template <class W>
  static constexpr WireFormat OneWire() {
    WireFormat wire{W::kName, W::kBytes, W::kGradient, W::kServing, W::kScaling, nullptr, nullptr};
    if constexpr (W::kGradient) {
      wire.accumulate = &AccumulatePayload<V, W>;
      wire.measure = &MeasurePayload<V, W>;
    }
    return wire;
  }

  static constexpr auto kKernels = OfTriples(TripleList{});
  static constexpr auto kMasters = OfMasterList(MasterList{});
  static constexpr auto kStates = OfStateList(StateList{});
  static constexpr auto kWires = OfWires(WireList{});
};

template <class... Rs>
constexpr auto NamesOf(List<Rs...>) {
  return std::array{Rs::kName...};
}
inline constexpr auto kRuleNames = NamesOf(RuleList{});

template <class V>
constexpr IsaTables MakeTables(const char* name) {
  return {name, Tables<V>::kKernels, Tables<V>::kMasters, Tables<V>::kStates, Tables<V>::kWires, kRuleNames};
}

}  // namespace BALLAST_UNIT
}  // namespace ballast::kernels
