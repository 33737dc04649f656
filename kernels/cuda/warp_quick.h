// The GPU driver of ordinary updates (cuda_kernels.h): a whole row is updated by QuickVector, whose divisions and roots
// do not look at their operands. The row's largest and least numbers tell afterwards whether these were in range; where
// one was not, or a block cannot be stored, nothing has been written yet and WarpTile does the row again. The bits are
// WarpTile's.
#pragma once

#include "kernels/cuda/quick_vector.h"
#include "kernels/cuda/warp_kernels.h"

namespace ballast::kernels {
inline namespace BALLAST_UNIT {

// The triples that have one: their formats divide as simd/division.h says. Of a matrix products take the time.
template <class T>
inline constexpr bool kHasQuick =
    !kIsOverMatrix<typename T::Rule> && std::is_same_v<typename T::State, Companded8State> &&
    (std::is_same_v<typename T::Master, Split24> || std::is_same_v<typename T::Master, Split32>);

template <class V, class Rule, class Master, class State>
class QuickTile : public WarpTile<V, Rule, Master, State, /*kOrdinary=*/true> {
  using Tile = WarpTile<V, Rule, Master, State, true>;
  using typename Tile::F;
  using typename Tile::Row;
  using typename Tile::Stored;
  using typename Tile::U;
  using typename Tile::Weights;
  using Q = QuickVector<V>;
  template <int I>
  using MomentType = typename Tile::template MomentType<I>;

 public:
  using Tile::Tile;

  BALLAST_FN void Run(uint64_t tile, TileStatistics* out) {
    this->Begin();
    const uint64_t begin = tile * kTile, left = this->u_.n - begin;
    const auto count = static_cast<uint32_t>(left < kTile ? left : kTile);
    for (uint32_t at = 0; at < count; at += kRow) {
      if (at + kRow < count) Prefetch(begin + at + kRow);
      if (count - at < kRow || !UpdateWholeRow(begin + at)) {
        this->UpdateRow(begin + at, count - at < kRow ? count - at : kRow);
      }
    }
    this->Finish(out);
  }

 private:
  // The row after the one in hand: a multiprocessor has too few warps for their arithmetic to hide the memory's latency.
  BALLAST_FN void Prefetch(uint64_t first) const {
    V::Prefetch(this->template At<Master, 0>(0, first), kEach * Master::kPlanes[0].bytes);
    V::Prefetch(this->template At<Master, 1>(1, first), kEach * Master::kPlanes[1].bytes);
    Tile::ForEachMoment([&](auto i) {
      constexpr int kMoment = decltype(i)::value;
      using S = MomentType<kMoment>;
      V::Prefetch(this->template At<S, 0>(Tile::template FirstPlane<kMoment>(), first), kEach * S::kPlanes[0].bytes);
    });
    const uint32_t bytes = WireBytesOf(this->u_.grad_format, WireList{});
    V::Prefetch(static_cast<const std::byte*>(this->u_.grad) + first * bytes, kEach * bytes);
  }

  // Scales in this range, as bf16: what is divided by them, and the errors of the quotients, are normal numbers.
  static constexpr uint32_t kLeastScale = (127 - 60) << 7, kMostScale = (127 + 60) << 7;

  // Numbers less 1, so that 0 is the largest.
  struct Least {
    U root, scale;
  };

  // False: nothing was done.
  BALLAST_FN bool UpdateWholeRow(uint64_t first) {
    Row r;
    Least least{V::SetBits(~0u), V::SetBits(~0u)};
    const U grad = Apply(first, &r, &least);
    if (V::Any(Unfit(grad, r, &least))) return false;
    r.bad = V::EqualBits(V::SetBits(0), V::SetBits(1));
    this->absmax_ = V::MaxBits(this->absmax_, grad);
    this->sums_at_ = kCoreSums - this->sums_at_;  // the new ones
    this->u_.stochastic ? this->template Encode<Q, true>(first, r) : this->template Encode<Q, false>(first, r);
    return true;
  }

  // As WarpTile::Apply. The sums with this row's go where the sums are not. Returns the largest magnitude of the thread's
  // gradients.
  BALLAST_FN U Apply(uint64_t first, Row* r, Least* least) const {
    Stored s;
    this->Load(first, &s);
    F grad[kEach], squares[kCoreSums][kEach];
    this->ReadGradient(s, kRow, grad);
    const U most = LargestOf(grad);
    Weights weights;
    Tile::TakeWeights(s, &weights);
    Tile::ForEachMoment([&](auto i) {
      this->template DecodeMoment<decltype(i)::value, Q>(s, r->moment[i]);
      if constexpr (MomentType<decltype(i)::value>::kStoresRoot) Note(s.scale[i], &least->scale);
    });
    F constants[Rule::kConstants];
    this->LoadConstants(constants);
    F largest[1 + Tile::kMomentCount];
    BALLAST_UNROLL for (F& one : largest) one = V::Set(0.0f);
    BALLAST_UNROLL for (int j = 0; j < kEach; ++j) {
      Element<Q> e{};
      e.weight = Master::template Decode<V>(Tile::WordsAt(weights, j));
      e.grad = grad[j];
      Tile::ForEachMoment([&](auto i) { e.moment[i] = r->moment[i][j]; });
      const Updated<Q> done = ApplyRule<Q, Rule>(constants, e);
      r->next[j] = done.weight;
      largest[0] = V::MaxMagnitude(largest[0], done.weight);
      squares[kGradSq][j] = V::Mul(grad[j], grad[j]);
      squares[kUpdateSq][j] = V::Mul(done.delta, done.delta);
      if constexpr (Rule::kHasRms) squares[kRmsSq][j] = done.rms_term;
      Tile::ForEachMoment([&](auto i) {
        using S = MomentType<decltype(i)::value>;
        if constexpr (Rule::kMoments[i] == Moment::kNonNegative) Note(V::Bits(done.moment[i]), &least->root);
        r->moment[i][j] = S::kStoresRoot ? done.root[i] : done.moment[i];
        largest[1 + i] = V::MaxMagnitude(largest[1 + i], r->moment[i][j]);
      });
    }
    r->most[0] = V::Bits(largest[0]);
    Tile::ForEachMoment([&](auto i) { r->most[1 + i] = OverBlock<V>(V::Bits(largest[1 + i])); });
    BALLAST_UNROLL for (int i = 0; i < (Rule::kHasRms ? kCoreSums : kRmsSq); ++i) AddTo(i, squares[i]);
    return most;
  }

  BALLAST_FN void AddTo(int i, F (&terms)[kEach]) const {
    F sums[kEach];
    this->NumbersOfRow(i, false).Get(sums);
    BALLAST_UNROLL for (int j = 0; j < kEach; ++j) terms[j] = V::Add(sums[j], terms[j]);
    this->NumbersOfRow(i, true).Set(terms);
  }

  static BALLAST_FN U LargestOf(const F (&grad)[kEach]) {
    F most = V::Set(0.0f);
    BALLAST_UNROLL for (int j = 0; j < kEach; ++j) most = V::MaxMagnitude(most, grad[j]);
    return V::Bits(most);
  }

  static BALLAST_FN void Note(U number, U* least) {
    *least = V::LeastUnsigned(*least, V::SubBits(number, V::SetBits(1)));
  }

  // Where the thread's gradients, a block's numbers, or what was or will be divided are out of range.
  static BALLAST_FN typename V::M Unfit(U grad, const Row& r, Least* least) {
    auto unfit = V::Either(NotFinite<V>(grad), V::GreaterBits(r.most[0], V::SetBits(kLargestBits)));
    auto most_scale = V::SetBits(0);
    Tile::ForEachMoment([&](auto i) {
      using S = MomentType<decltype(i)::value>;
      unfit = V::Either(unfit, V::GreaterBits(r.most[1 + i], V::SetBits(S::kLargestBits)));
      const U scale = S::template Scale<V>(r.most[1 + i]);
      Note(scale, &least->scale);
      most_scale = V::MaxBits(most_scale, scale);
    });
    unfit = V::Either(unfit, V::GreaterBits(most_scale, V::SetBits(kMostScale)));
    unfit = V::Either(unfit, V::LessUnsigned(least->scale, V::SetBits(kLeastScale - 1)));
    return V::Either(unfit, V::LessUnsigned(least->root, V::SetBits(Q::kLeastRoot - 1)));
  }
};

}  // namespace BALLAST_UNIT
}  // namespace ballast::kernels
