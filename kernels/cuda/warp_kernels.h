// The GPU driver: one warp updates a tile, a row of 256 elements at a time, eight elements a thread, in registers;
// values that statistics need later wait in shared memory. It follows the CPU's driver (cpu_kernels.h, cpu_row.h) step
// for step: the same blocks are rejected, the same words stored, the same sums taken in the same order.
//
// Written over a warp's vector type (simd/warp.h). Besides what cpu_row.h says: gradients are 16-byte aligned and
// readable up to the next multiple of 256 elements.
#pragma once

#include <array>

#include "kernels/cuda/warp_row.h"
#include "kernels/layout.h"
#include "kernels/math/random.h"
#include "kernels/rules/rule.h"

namespace ballast::kernels {
inline namespace BALLAST_UNIT {

// What a warp has in shared memory, 256 numbers each: the sums of a tile; eight counts of each thread, which seldom
// change and would take registers; and figures of the row in hand.
enum WarpRows { kGradSq, kUpdateSq, kRmsSq, kWeightSq, kStoredDot, kHiDot, kCounts, kGrad, kDelta, kRms, kWarpRows };
enum WarpCounts { kNonfinite, kRejected, kUnchanged, kHiUnchanged, kSaturated };
inline constexpr int kWarpSums = kCounts, kCoreSums = kWeightSq;

// kOrdinary: the caller knows that u is ordinary (cuda_kernels.h).
template <class V, class Rule, class Master, class State, bool kOrdinary = false>
class WarpTile {
 public:
  using F = typename V::F;
  using U = typename V::U;
  using M = typename V::M;

  // Ordinary: the sums of a tile, twice, and the counts. The row in hand has its figures where the sums are not.
  static constexpr int kRows = kOrdinary ? 2 * kCoreSums + 1 : static_cast<int>(kWarpRows);

  // `rows`: kRows * 256 numbers of this warp's own. On a GPU both are in shared memory, where `u` takes no registers.
  BALLAST_FN WarpTile(const Update& u, float* rows) : u_(u), rows_(rows) {}

  BALLAST_FN void Run(uint64_t tile, TileStatistics* out) {
    Begin();
    const uint64_t begin = tile * kTile, end = u_.n < begin + kTile ? u_.n : begin + kTile;
    for (uint64_t first = begin; first < end; first += kRow) UpdateRow(first, end - first < kRow ? end - first : kRow);
    Finish(out);
  }

  // The first pass of a rule that takes two: what the tile adds. Of one over matrices it writes u.direction, too.
  BALLAST_FN F Measure(uint64_t tile) {
    Sum(0).Clear();
    Sum(kCounts).Clear();
    absmax_ = V::SetBits(0);
    const uint64_t begin = tile * kTile, end = u_.n < begin + kTile ? u_.n : begin + kTile;
    for (uint64_t first = begin; first < end; first += kRow) MeasureRow(first, end - first < kRow ? end - first : kRow);
    return Sum(0).Total();
  }

 protected:
  static constexpr int kMomentCount = static_cast<int>(std::size(Rule::kMoments));
  template <int I>
  using MomentType = MomentAt<Rule, State, I>;
  static constexpr int kMasterPlanes = PlaneCount<Master>();

  // Number of the first plane of moment I.
  template <int I>
  static constexpr int FirstPlane() {
    if constexpr (I == 0) {
      return kMasterPlanes;
    } else {
      return FirstPlane<I - 1>() + PlaneCount<MomentType<I - 1>>();
    }
  }
  template <class Do>
  static BALLAST_FN void ForEachMoment(Do&& act) {
    [&]<int... I>(std::integer_sequence<int, I...>) { (act(std::integral_constant<int, I>()), ...); }
    (std::make_integer_sequence<int, kMomentCount>());
  }
  template <class S>
  static constexpr bool kShared = S::kScalePer > kBlock;  // a scale for a whole row

  // A row as it lies in memory.
  struct Stored {
    U grad[kMostWords], master[2][kMostWords], code[kMomentCount][kMostWords], scale[kMomentCount];
  };
  // A row's values: what is wanted, in the form the formats encode.
  struct Row {
    F next[kEach], next_low[kEach], moment[kMomentCount][kEach];
    U most[1 + kMomentCount];  // the largest magnitudes of the thread's block
    M bad;                     // the block keeps its old contents
  };

  BALLAST_FN bool HasCore() const { return kOrdinary || u_.statistics != StatisticsLevel::kOff; }
  BALLAST_FN bool HasFull() const { return !kOrdinary && u_.statistics == StatisticsLevel::kFull; }
  BALLAST_FN bool Dry() const { return !kOrdinary && u_.dry; }

  // Of a tile.
  BALLAST_FN void Begin() {
    if (HasCore()) {
      BALLAST_UNROLL for (int i = 0; i < (kOrdinary ? kCoreSums : kWarpSums); ++i) Sum(i).Clear();
      if constexpr (kOrdinary && !Rule::kHasRms) NumbersOfRow(kRmsSq, true).Clear();  // so is the other one
    }
    Sum(kCounts).Clear();
    absmax_ = V::SetBits(0);
  }

  BALLAST_FN WarpSum<V> Sum(int i) const {
    if constexpr (kOrdinary) {
      if (i == kCounts) return WarpSum<V>(rows_ + 2 * kCoreSums * static_cast<int>(kRow));
      const bool other = i >= kGrad;
      return NumbersOfRow(other ? i - kGrad : i, other);
    } else {
      return WarpSum<V>(rows_ + i * static_cast<int>(kRow));
    }
  }
  // Row i of those that hold the sums, or of the others.
  BALLAST_FN WarpSum<V> NumbersOfRow(int i, bool other) const {
    return WarpSum<V>(rows_ + (i + (other ? kCoreSums - sums_at_ : sums_at_)) * static_cast<int>(kRow));
  }
  template <class Format, int kPlane>
  BALLAST_FN std::byte* At(int plane, uint64_t first) const {
    constexpr StoredPlane kStored = Format::kPlanes[kPlane];
    return u_.planes[plane] + first / kStored.per * kStored.bytes;
  }

  // All of a row's loads, one after the other.
  BALLAST_FN void Load(uint64_t first, Stored* s) const {
    LoadGradient(first, s->grad);
    LoadMaster(first, s);
    ForEachMoment([&](auto i) { LoadMoment<decltype(i)::value>(first, s); });
  }
  BALLAST_FN void LoadMaster(uint64_t first, Stored* s) const {
    LoadPlane<Master, 0>(0, first, s->master[0]);
    if constexpr (kMasterPlanes == 2) LoadPlane<Master, 1>(1, first, s->master[1]);
  }
  template <int I>
  BALLAST_FN void LoadMoment(uint64_t first, Stored* s) const {
    using S = MomentType<I>;
    LoadPlane<S, 0>(FirstPlane<I>(), first, s->code[I]);
    if constexpr (S::kScalePer > 0) {
      s->scale[I] = V::template LoadScale<S::kPlanes[1].bytes, S::kScalePer>(At<S, 1>(FirstPlane<I>() + 1, first));
    }
  }
  template <class Format, int kPlane>
  BALLAST_FN void LoadPlane(int plane, uint64_t first, U (&words)[kMostWords]) const {
    LoadWords<Format::kPlanes[kPlane].bytes>(At<Format, kPlane>(plane, first), words);
  }
  template <uint32_t kBytes>
  static BALLAST_FN void LoadWords(const std::byte* row, U (&words)[kMostWords]) {
    U some[WordsEach(kBytes)];
    V::LoadVector(row, some);
    BALLAST_UNROLL for (int i = 0; i < WordsEach(kBytes); ++i) words[i] = some[i];
  }
  BALLAST_FN void LoadGradient(uint64_t first, U (&words)[kMostWords]) const {
    const uint32_t bytes = WireBytesOf(u_.grad_format, WireList{});
    V::LoadElements(static_cast<const std::byte*>(u_.grad) + first * bytes, bytes, words);
  }

  BALLAST_FN void UpdateRow(uint64_t first, uint64_t count) {
    Row r;
    HasCore() ? Apply<true>(first, count, &r) : Apply<false>(first, count, &r);
    Reject(count, &r);
    if (HasCore()) AddCore();
    if (Dry()) return;
    Weights before;
    if (HasFull()) ReadWeights(first, &before);
    u_.stochastic ? Encode<V, true>(first, r) : Encode<V, false>(first, r);
    if (HasFull()) AddFull(before, r, first, count);
  }

  BALLAST_FN void LoadConstants(F (&constants)[Rule::kConstants]) const {
    BALLAST_UNROLL for (int i = 0; i < Rule::kConstants; ++i) constants[i] = V::Set(u_.constants[i]);
  }

  // What the update takes: scaled and clipped.
  BALLAST_FN void ReadGradient(const Stored& s, uint64_t count, F (&grad)[kEach]) const {
    WithWire(u_.grad_format, WireList{}, [&]<class Wire>() {
      if constexpr (Wire::kGradient) DecodeRow<V, Wire>(s.grad, u_.grad_scale, count, grad);
    });
    if (u_.clip != 1) {
      BALLAST_UNROLL for (int j = 0; j < kEach; ++j) grad[j] = V::Mul(grad[j], V::Set(u_.clip));
    }
  }
  // Returns infinity's bits, or more, where one of the thread's gradients is not finite, and less elsewhere.
  BALLAST_FN U DecodeGradient(const Stored& s, uint64_t count, F (&grad)[kEach]) {
    ReadGradient(s, count, grad);
    const GradientRange<V> range = RangeOf<V>(grad);
    absmax_ = V::MaxBits(absmax_, range.largest_finite);
    if (!V::Any(NotFinite<V>(range.most))) return V::SetBits(0);
    Count<kNonfinite>(range.nonfinite);
    return V::SelectBits(NotFinite<V>(range.most), range.most, V::SetBits(0));
  }

  // Q: V, or one that does the same in another way.
  template <int I, class Q = V>
  BALLAST_FN void DecodeMoment(const Stored& s, F (&out)[kEach]) const {
    using S = MomentType<I>;
    U codes[kEach];
    Unpack<V, S::kPlanes[0].bytes, S::kPlanes[0].sign>(s.code[I], codes);
    const auto decoder = DecoderOf<Q, S>(s.scale[I]);
    BALLAST_UNROLL for (int j = 0; j < kEach; ++j) out[j] = decoder.Decode(codes[j]);
  }
  template <class S, class Q>
  static BALLAST_FN auto Encoder(U scale, U most) {
    using E = typename S::template Encoder<Q>;
    if constexpr (E::kNumbers > 0) {
      return E::Of(scale, most);
    } else {
      return E{};
    }
  }

  // From what is stored and the gradients to what is wanted, and each block's largest magnitudes. kTerms: with what
  // statistics need.
  template <bool kTerms>
  BALLAST_FN void Apply(uint64_t first, uint64_t count, Row* r) {
    Stored s;
    Load(first, &s);
    F grad[kEach], delta[kEach], rms[kEach];
    r->most[0] = DecodeGradient(s, count, grad);
    if constexpr (kTerms) Sum(kGrad).Set(grad);
    Weights weights;
    TakeWeights(s, &weights);
    ForEachMoment([&](auto i) { DecodeMoment<decltype(i)::value>(s, r->moment[i]); });
    F constants[Rule::kConstants];
    LoadConstants(constants);
    F directions[kEach];
    if constexpr (kIsOverMatrix<Rule>) LoadDirections(first, directions);
    BALLAST_UNROLL for (int j = 0; j < kEach; ++j) {
      Element<V> e{};
      SetWeight(weights, j, &e);
      e.grad = grad[j];
      if constexpr (kIsOverMatrix<Rule>) e.direction = directions[j];
      ForEachMoment([&](auto i) { e.moment[i] = r->moment[i][j]; });
      const Updated<V> done = ApplyRule<V, Rule>(constants, e);
      r->next[j] = done.weight;
      if constexpr (Master::kPaired) r->next_low[j] = done.weight_low;
      if constexpr (kTerms) delta[j] = done.delta;
      if constexpr (kTerms && Rule::kHasRms) rms[j] = done.rms_term;
      ForEachMoment([&](auto i) {
        r->moment[i][j] = MomentType<decltype(i)::value>::kStoresRoot ? done.root[i] : done.moment[i];
      });
    }
    if constexpr (kTerms) Sum(kDelta).Set(delta);
    if constexpr (kTerms && Rule::kHasRms) Sum(kRms).Set(rms);
    if (count < kRow) {
      BALLAST_UNROLL for (int j = 0; j < kEach; ++j) ClearWanted(V::Not(Inside<V>(count, j)), j, r);
      if constexpr (kTerms) Sum(kDelta).Keep(count);
      if constexpr (kTerms && Rule::kHasRms) Sum(kRms).Keep(count);
    }
    BALLAST_UNROLL for (int j = 0; j < kEach; ++j) r->most[0] = V::MaxBits(r->most[0], MagnitudeOf<V>(r->next[j]));
    r->most[0] = OverBlock<V>(r->most[0]);
    ForEachMoment([&](auto i) {
      auto most = V::SetBits(0);
      BALLAST_UNROLL for (int j = 0; j < kEach; ++j) most = V::MaxBits(most, MagnitudeOf<V>(r->moment[i][j]));
      r->most[1 + i] = OverBlock<V>(most);
    });
  }

  // The stored words of a row's weights.
  struct Weights {
    U word[2][kEach];
  };
  static BALLAST_FN void TakeWeights(const Stored& s, Weights* w) {
    Unpack<V, Master::kPlanes[0].bytes, Master::kPlanes[0].sign>(s.master[0], w->word[0]);
    if constexpr (kMasterPlanes == 2) {
      Unpack<V, Master::kPlanes[1].bytes, Master::kPlanes[1].sign>(s.master[1], w->word[1]);
    }
  }
  BALLAST_FN void ReadWeights(uint64_t first, Weights* w) const {
    Stored s;
    LoadMaster(first, &s);
    TakeWeights(s, w);
  }
  static BALLAST_FN void SetWeight(const Weights& w, int j, Element<V>* e) {
    if constexpr (Master::kPaired) {
      e->weight = Master::template Component<V>(w.word[0][j]);
      e->weight_low = Master::template Component<V>(w.word[1][j]);
    } else {
      e->weight = Master::template Decode<V>(WordsAt(w, j));
    }
  }
  static BALLAST_FN Words<V> WordsAt(const Weights& weights, int j) {
    Words<V> w{};
    w.word[0] = weights.word[0][j];
    if constexpr (kMasterPlanes == 2) w.word[1] = weights.word[1][j];
    return w;
  }

  // What is wanted of element j, zero where.
  static BALLAST_FN void ClearWanted(M where, int j, Row* r) {
    const auto clear = [&](F* x) { *x = V::Select(where, V::Set(0.0f), *x); };
    clear(&r->next[j]);
    if constexpr (Master::kPaired) clear(&r->next_low[j]);
    ForEachMoment([&](auto i) { clear(&r->moment[i][j]); });
  }

  // Finds the blocks that cannot be stored. They take no part in sums.
  BALLAST_FN void Reject(uint64_t count, Row* r) {
    r->bad = V::GreaterBits(r->most[0], V::SetBits(kLargestWeightBits<Master>));
    bool shared = false;
    ForEachMoment([&](auto i) {
      using S = MomentType<decltype(i)::value>;
      r->bad = V::Either(r->bad, V::GreaterBits(r->most[1 + i], V::SetBits(S::kLargestBits)));
      shared = shared || kShared<S>;
    });
    if (!V::Any(r->bad)) return;
    if (shared) r->bad = V::EqualBits(V::SetBits(0), V::SetBits(0));
    Count<kRejected>(V::IncrementIf(V::Both(r->bad, FirstOfBlock(count)), V::SetBits(0)));
    BALLAST_UNROLL for (int j = 0; j < kEach; ++j) ClearWanted(r->bad, j, r);
    if (HasCore()) {
      for (const int figure : {kGrad, kDelta, kRms}) Sum(figure).ClearWhere(r->bad);
    }
  }
  // The first threads of blocks that begin before `count`.
  static BALLAST_FN M FirstOfBlock(uint64_t count) {
    const auto within = V::And(V::Position(), V::SetBits(static_cast<uint32_t>(kBlock) - 1));
    return V::Both(V::EqualBits(within, V::SetBits(0)), Inside<V>(count, 0));
  }

  template <class Q, bool kStochastic>
  BALLAST_FN void Encode(uint64_t first, const Row& r) const {
    const auto good = V::Not(r.bad);
    const RandomStream<V> stream(u_.random_key, first);
    U random[kEach];
    BALLAST_UNROLL for (int j = 0; j < kEach; ++j) random[j] = stream.At(first + static_cast<uint64_t>(j));
    Weights after;
    BALLAST_UNROLL for (int j = 0; j < kEach; ++j) {
      Words<V> w;
      if constexpr (Master::kPaired) {
        w = Master::template EncodePair<V>(r.next[j], r.next_low[j]);
      } else {
        w = Master::template Encode<V, kStochastic>(r.next[j], stream.ForMaster(random[j]));
      }
      after.word[0][j] = w.word[0];
      if constexpr (kMasterPlanes == 2) after.word[1][j] = w.word[1];
    }
    StorePlane<V, Master, 0>(At<Master, 0>(0, first), after.word[0], good);
    if constexpr (kMasterPlanes == 2) StorePlane<V, Master, 1>(At<Master, 1>(1, first), after.word[1], good);
    ForEachMoment([&](auto i) { EncodeMoment<Q, decltype(i)::value, kStochastic>(first, random, good, r); });
  }
  template <class Q, int I, bool kStochastic>
  BALLAST_FN void EncodeMoment(uint64_t first, const U (&random)[kEach], M good, const Row& r) const {
    using S = MomentType<I>;
    auto scale = V::SetBits(0), most = r.most[1 + I];
    if constexpr (S::kScalePer > 0) {
      if constexpr (kShared<S>) most = OverRow<V>(most);
      scale = S::template Scale<V>(most);
      V::template StoreScale<S::kPlanes[1].bytes, S::kScalePer>(At<S, 1>(FirstPlane<I>() + 1, first), scale, good);
    }
    const auto encoder = Encoder<S, Q>(scale, most);
    U codes[kEach];
    BALLAST_UNROLL for (int j = 0; j < kEach; ++j) codes[j] =
        encoder.template Encode<kStochastic>(r.moment[I][j], random[j]);
    StorePlane<V, S, 0>(At<S, 0>(FirstPlane<I>(), first), codes, good);
  }

  BALLAST_FN void AddCore() const {
    F grad[kEach], delta[kEach];
    Sum(kGrad).Get(grad);
    Sum(kDelta).Get(delta);
    BALLAST_UNROLL for (int j = 0; j < kEach; ++j) grad[j] = V::Mul(grad[j], grad[j]);
    Sum(kGradSq).Add(grad);
    BALLAST_UNROLL for (int j = 0; j < kEach; ++j) delta[j] = V::Mul(delta[j], delta[j]);
    Sum(kUpdateSq).Add(delta);
    if constexpr (Rule::kHasRms) {
      F rms[kEach];
      Sum(kRms).Get(rms);
      Sum(kRmsSq).Add(rms);
    }
  }

  // From what is stored now.
  BALLAST_FN void AddFull(const Weights& before, const Row& r, uint64_t first, uint64_t count) {
    Stored s;
    LoadMaster(first, &s);
    Weights after;
    TakeWeights(s, &after);
    AddStored(before, after, r.bad, count);
    const auto live = V::Both(V::Not(r.bad), BlockBegins(count));
    auto saturated = V::SetBits(0);
    ForEachMoment([&](auto i) {
      using S = MomentType<decltype(i)::value>;
      LoadMoment<decltype(i)::value>(first, &s);
      U codes[kEach];
      Unpack<V, S::kPlanes[0].bytes, S::kPlanes[0].sign>(s.code[i], codes);
      BALLAST_UNROLL for (int j = 0; j < kEach; ++j) {
        saturated = V::IncrementIf(V::Both(live, S::template Saturated<V>(codes[j])), saturated);
      }
    });
    Count<kSaturated>(saturated);
  }
  // The thread's block begins before `count`.
  static BALLAST_FN M BlockBegins(uint64_t count) {
    const auto begin = V::And(V::Position(), V::SetBits(~(static_cast<uint32_t>(kBlock) - 1)));
    return V::GreaterBits(V::SetBits(static_cast<uint32_t>(count)), begin);
  }
  BALLAST_FN void AddStored(const Weights& before, const Weights& after, M bad, uint64_t count) {
    F delta[kEach], weight_sq[kEach], stored[kEach], hi[kEach];
    Sum(kDelta).Get(delta);
    const auto good = V::Not(bad);
    auto unchanged = V::SetBits(0), hi_unchanged = unchanged;
    BALLAST_UNROLL for (int j = 0; j < kEach; ++j) {
      const auto x = Master::template Decode<V>(WordsAt(before, j));
      weight_sq[j] = V::Select(good, V::Mul(x, x), V::Set(0.0f));
      const auto counted = V::Both(good, Inside<V>(count, j));
      const auto one = V::EqualBits(before.word[0][j], after.word[0][j]);
      auto same = one;
      if constexpr (kIsComparedByValue<Master>) {
        const auto change = V::Bits(V::Sub(Master::template Decode<V>(WordsAt(after, j)), x));
        same = V::EqualBits(V::And(change, V::SetBits(kMagnitude)), V::SetBits(0));
      } else if constexpr (kMasterPlanes == 2)
        same = V::Both(one, V::EqualBits(before.word[1][j], after.word[1][j]));
      unchanged = V::IncrementIf(V::Both(counted, same), unchanged);
      if constexpr (Master::kPaired) {
        const auto change = [&](int c) {
          return V::Sub(Master::template Component<V>(after.word[c][j]),
                        Master::template Component<V>(before.word[c][j]));
        };
        hi[j] = V::Mul(delta[j], change(0));
        stored[j] = V::Mul(delta[j], V::Add(change(0), change(1)));
        hi_unchanged = V::IncrementIf(V::Both(counted, one), hi_unchanged);
      } else {
        stored[j] = V::Mul(delta[j], V::Sub(Master::template Decode<V>(WordsAt(after, j)), x));
      }
    }
    Count<kUnchanged>(unchanged);
    Count<kHiUnchanged>(Master::kPaired ? hi_unchanged : unchanged);
    Sum(kWeightSq).Add(weight_sq);
    Sum(kStoredDot).Add(stored);
    if constexpr (Master::kPaired) Sum(kHiDot).Add(hi);
  }

  BALLAST_FN void Finish(TileStatistics* out) const {
    const bool core = HasCore(), full = HasFull();
    const auto zero = V::Set(0.0f);
    V::StoreOnce(&out->grad_sq, core ? Sum(kGradSq).Total() : zero);
    V::StoreOnce(&out->update_sq, core ? Sum(kUpdateSq).Total() : zero);
    V::StoreOnce(&out->rms_sq, core ? Sum(kRmsSq).Total() : zero);
    V::StoreOnce(&out->grad_absmax, V::FromBits(V::SetBits(V::Most(absmax_))));
    V::StoreOnce(&out->nonfinite, Counted<kNonfinite>());
    V::StoreOnce(&out->rejected, Counted<kRejected>());
    V::StoreOnce(&out->weight_sq, full ? Sum(kWeightSq).Total() : zero);
    const auto stored_dot = full ? Sum(kStoredDot).Total() : zero;
    V::StoreOnce(&out->stored_dot, stored_dot);
    V::StoreOnce(&out->hi_dot, Master::kPaired && full ? Sum(kHiDot).Total() : stored_dot);
    V::StoreOnce(&out->unchanged, Counted<kUnchanged>());
    V::StoreOnce(&out->hi_unchanged, Counted<kHiUnchanged>());
    V::StoreOnce(&out->saturated, Counted<kSaturated>());
  }

  template <int kWhich>
  BALLAST_FN void Count(U more) const {
    F counts[kEach];
    Sum(kCounts).Get(counts);
    counts[kWhich] = V::FromBits(V::AddBits(V::Bits(counts[kWhich]), more));
    Sum(kCounts).Set(counts);
  }
  template <int kWhich>
  BALLAST_FN uint32_t Counted() const {
    F counts[kEach];
    Sum(kCounts).Get(counts);
    return V::Sum(V::Bits(counts[kWhich]));
  }

  BALLAST_FN void MeasureRow(uint64_t first, uint64_t count) {
    Stored s;
    LoadGradient(first, s.grad);
    LoadMoment<kMeasuredMoment>(first, &s);
    F grad[kEach], moment[kEach], terms[kEach];
    auto bad = DecodeGradient(s, count, grad);
    DecodeMoment<kMeasuredMoment>(s, moment);
    F constants[Rule::kConstants];
    LoadConstants(constants);
    auto most = V::SetBits(0);
    BALLAST_UNROLL for (int j = 0; j < kEach; ++j) {
      if constexpr (kIsOverMatrix<Rule>) {
        const auto directed = Rule::template Direct<V>(constants, grad[j], moment[j]);
        terms[j] = directed.direction;
        most = V::MaxBits(most, MagnitudeOf<V>(directed.m));
      } else {
        const auto measured = Rule::template Measure<V>(constants, grad[j], moment[j]);
        terms[j] = measured.term;
        most = V::MaxBits(most, V::Bits(measured.v));
      }
    }
    constexpr uint32_t kLargest = std::bit_cast<uint32_t>(kLargestValue<MomentType<kMeasuredMoment>>);
    bad = OverBlock<V>(V::MaxBits(bad, V::SelectBits(V::GreaterBits(most, V::SetBits(kLargest)), most, V::SetBits(0))));
    const auto adds = V::EqualBits(bad, V::SetBits(0));
    BALLAST_UNROLL for (int j = 0; j < kEach; ++j) {
      terms[j] = V::Select(V::Both(adds, Inside<V>(count, j)), terms[j], V::Set(0.0f));
    }
    if constexpr (kIsOverMatrix<Rule>) {
      StoreDirections(first, terms);
      BALLAST_UNROLL for (int j = 0; j < kEach; ++j) terms[j] = V::Mul(terms[j], terms[j]);
    }
    Sum(0).Add(terms);
  }
  // The moment that a first pass decodes: v, or of a matrix m.
  static constexpr int kMeasuredMoment = kIsOverMatrix<Rule> ? 0 : 1;

  BALLAST_FN void LoadDirections(uint64_t first, F (&directions)[kEach]) const {
    U words[kEach];
    V::LoadVector(reinterpret_cast<const std::byte*>(u_.direction + first), words);
    BALLAST_UNROLL for (int j = 0; j < kEach; ++j) directions[j] = V::FromBits(words[j]);
  }
  BALLAST_FN void StoreDirections(uint64_t first, const F (&directions)[kEach]) const {
    U words[kEach];
    BALLAST_UNROLL for (int j = 0; j < kEach; ++j) words[j] = V::Bits(directions[j]);
    const auto all = V::EqualBits(words[0], words[0]);
    V::StoreVector(reinterpret_cast<std::byte*>(u_.direction + first), words, all);
  }

  const Update& u_;
  float* const rows_;
  int sums_at_ = 0;  // ordinary: the first row of the sums, 0 or kCoreSums
  U absmax_;         // the largest finite gradient of the thread's
};

}  // namespace BALLAST_UNIT
}  // namespace ballast::kernels
