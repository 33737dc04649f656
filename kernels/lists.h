// The lists of everything that is compiled: rules, formats, and the triples of them that make sense. The tables of the
// CPUs' instruction sets (cpu_tables.h) and of GPUs (cuda_kernels.cu) are made from them. To add a rule or format, add
// its name here.
#pragma once

#include <cstddef>

#include "kernels/formats/bf16.h"
#include "kernels/formats/companded8.h"
#include "kernels/formats/dynamic8.h"
#include "kernels/formats/flash.h"
#include "kernels/formats/fp32.h"
#include "kernels/formats/mcf8.h"
#include "kernels/formats/split.h"
#include "kernels/formats/wire.h"
#include "kernels/rules/adam.h"
#include "kernels/rules/collage.h"
#include "kernels/rules/lion.h"
#include "kernels/rules/muon.h"
#include "kernels/rules/sgd.h"
#include "kernels/rules/stable_adamw.h"

namespace ballast::kernels {
inline namespace BALLAST_UNIT {

template <class... Ts>
struct List {
  static constexpr size_t kSize = sizeof...(Ts);
};

using RuleList = List<AdamW, Adam, StableAdamW, Sgd, SgdW, Lion, CollageLight, CollagePlus, Muon>;
using MasterList = List<Fp32Master, Split24, Split32, Flash24, Flash32, McfMaster, Bf16Master, Mcf8Master>;
using StateList = List<Fp32State, Bf16State, Companded8State, Flash8State, Dynamic8State, McfState>;
using WireList = List<WireFp32, WireBf16, WireFp16, WireFp8E5M2, WireFp8E4M3, WireInt8Row, WireInt8Tensor>;

// The triples that make sense: every rule of each line with every master and every state of the line. Stochastic codes
// of m need the floor that a coarse v has, so both moments are of one state format; Collage's rules compute in mcf.
template <class Rules, class Masters, class States>
struct Family {};
using Families = List<
    Family<List<AdamW, Adam, StableAdamW>, List<Fp32Master, Split24, Split32, Bf16Master>,
           List<Fp32State, Bf16State, Companded8State>>,
    Family<List<Sgd, SgdW, Lion>, List<Fp32Master, Split24, Split32, Bf16Master>, List<Fp32State, Companded8State>>,
    Family<List<AdamW>, List<Flash24, Flash32>, List<Fp32State, Companded8State, Flash8State>>,
    Family<List<AdamW>, List<Fp32Master, Split24>, List<Flash8State, Dynamic8State>>,
    Family<List<CollageLight>, List<McfMaster>, List<Bf16State>>,
    Family<List<CollagePlus>, List<McfMaster>, List<McfState>>,
    Family<List<AdamW>, List<Mcf8Master>, List<Fp32State, Bf16State, Companded8State>>,
    Family<List<Muon>, List<Fp32Master, Split24, Split32>, List<Fp32State, Bf16State, Companded8State>>>;

template <class R, class M, class S>
struct Triple {
  using Rule = R;
  using Master = M;
  using State = S;
};

// The families written out, in order.
template <class... Lists>
struct Joined {
  using Type = List<>;
};
template <class... As>
struct Joined<List<As...>> {
  using Type = List<As...>;
};
template <class... As, class... Bs, class... Rest>
struct Joined<List<As...>, List<Bs...>, Rest...> {
  using Type = typename Joined<List<As..., Bs...>, Rest...>::Type;
};

template <class Rule, class Master, class States>
struct OfMaster;
template <class Rule, class Master, class... States>
struct OfMaster<Rule, Master, List<States...>> {
  using Type = List<Triple<Rule, Master, States>...>;
};
template <class Rule, class Masters, class States>
struct OfRule;
template <class Rule, class... Masters, class States>
struct OfRule<Rule, List<Masters...>, States> {
  using Type = typename Joined<typename OfMaster<Rule, Masters, States>::Type...>::Type;
};
template <class Line>
struct OfFamily;
template <class... Rules, class Masters, class States>
struct OfFamily<Family<List<Rules...>, Masters, States>> {
  using Type = typename Joined<typename OfRule<Rules, Masters, States>::Type...>::Type;
};
template <class Lines>
struct OfFamilies;
template <class... Lines>
struct OfFamilies<List<Lines...>> {
  using Type = typename Joined<typename OfFamily<Lines>::Type...>::Type;
};

using TripleList = typename OfFamilies<Families>::Type;

}  // namespace BALLAST_UNIT
}  // namespace ballast::kernels
