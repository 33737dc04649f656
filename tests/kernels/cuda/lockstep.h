// A warp's vector type (kernels/simd/warp.h) on a CPU: the 32 threads of a warp side by side in arrays, every operation
// done by all of them before the next. Code written over a warp's vector type runs here as it stands.
#pragma once

#include <algorithm>
#include <bit>
#include <cstring>

#include "kernels/math/statistics.h"
#include "kernels/simd/warp.h"

namespace ballast::kernels {
inline namespace BALLAST_UNIT {

// Bytes that the warp's threads loaded and stored on this thread, but for those in [begin, end): its shared memory.
struct LockstepTraffic {
  const std::byte *begin = nullptr, *end = nullptr;
  uint64_t bytes = 0;
  void Count(const std::byte* at, uint64_t some) {
    if (at < begin || at >= end) bytes += some;
  }
};
inline thread_local LockstepTraffic lockstep_traffic;
// How many roots were taken on this thread with a look at the operand: by no QuickVector.
inline thread_local uint64_t lockstep_checked_roots = 0;

struct LockstepVector {
  template <class T>
  struct Threads {
    T of[kWarpThreads];
  };
  using F = Threads<float>;
  using U = Threads<uint32_t>;
  using M = Threads<bool>;
  using One = ScalarVector;

  // What `act` makes of each thread's number and operands.
  template <class Act, class... Ts>
  static auto Each(Act act, const Threads<Ts>&... x) {
    Threads<decltype(act(x.of[0]...))> r;
    for (int i = 0; i < kWarpThreads; ++i) r.of[i] = act(x.of[i]...);
    return r;
  }
  template <class T>
  static Threads<T> All(T x) {
    Threads<T> r;
    std::fill_n(r.of, kWarpThreads, x);
    return r;
  }

  static F Set(float x) { return All(x); }
  static U SetBits(uint32_t x) { return All(x); }
  static U Gather(const uint32_t* table, const U& index) {
    return Each([table](uint32_t i) { return table[i]; }, index);
  }
  static F Add(const F& a, const F& b) { return Each(&One::Add, a, b); }
  static F Sub(const F& a, const F& b) { return Each(&One::Sub, a, b); }
  static F Mul(const F& a, const F& b) { return Each(&One::Mul, a, b); }
  static F Div(const F& a, const F& b) { return Each(&One::Div, a, b); }
  static F Sqrt(const F& a) {
    ++lockstep_checked_roots;
    return Each(&One::Sqrt, a);
  }
  static F Fma(const F& a, const F& b, const F& c) { return Each(&One::Fma, a, b, c); }
  static F Fms(const F& a, const F& b, const F& c) { return Each(&One::Fms, a, b, c); }
  static F Fnma(const F& a, const F& b, const F& c) { return Each(&One::Fnma, a, b, c); }
  static U Bits(const F& a) { return Each(&One::Bits, a); }
  static F FromBits(const U& a) { return Each(&One::FromBits, a); }
  static F Abs(const F& a) { return Each(&One::Abs, a); }
  static F Min(const F& a, const F& b) { return Each(&One::Min, a, b); }
  static F Max(const F& a, const F& b) { return Each(&One::Max, a, b); }
  static F WithSignOf(const F& a, const F& b) { return Each(&One::WithSignOf, a, b); }
  static F MaxOfNonNegative(const F& a, const F& b) { return Each(&One::MaxOfNonNegative, a, b); }
  static M Less(const F& a, const F& b) { return Each(&One::Less, a, b); }
  static M LessEqual(const F& a, const F& b) { return Each(&One::LessEqual, a, b); }
  static M EqualBits(const U& a, const U& b) { return Each(&One::EqualBits, a, b); }
  static M GreaterBits(const U& a, const U& b) { return Each(&One::GreaterBits, a, b); }
  static F Select(const M& m, const F& a, const F& b) { return Each(&One::Select, m, a, b); }
  static U SelectBits(const M& m, const U& a, const U& b) { return Each(&One::SelectBits, m, a, b); }
  static U IncrementIf(const M& m, const U& x) { return Each(&One::IncrementIf, m, x); }
  static U AddBits(const U& a, const U& b) { return Each(&One::AddBits, a, b); }
  static U SubBits(const U& a, const U& b) { return Each(&One::SubBits, a, b); }
  static U MulBits(const U& a, const U& b) { return Each(&One::MulBits, a, b); }
  static U And(const U& a, const U& b) { return Each(&One::And, a, b); }
  static U Or(const U& a, const U& b) { return Each(&One::Or, a, b); }
  static U Xor(const U& a, const U& b) { return Each(&One::Xor, a, b); }
  static U Xor3(const U& a, const U& b, const U& c) { return Each(&One::Xor3, a, b, c); }
  template <int N>
  static U ShiftLeft(const U& a) {
    return Each(&One::ShiftLeft<N>, a);
  }
  template <int N>
  static U ShiftRight(const U& a) {
    return Each(&One::ShiftRight<N>, a);
  }
  template <int N>
  static U ShiftRightSigned(const U& a) {
    return Each(&One::ShiftRightSigned<N>, a);
  }
  static U MaxBits(const U& a, const U& b) { return Each(&One::MaxBits, a, b); }
  static U MinBits(const U& a, const U& b) { return Each(&One::MinBits, a, b); }
  static F NearInverse(const F& x) {
    return Each([](float one) { return 1 / one; }, x);
  }
  static F NearInverseRoot(const F& x) {
    return Each([](float one) { return static_cast<float>(1 / std::sqrt(static_cast<double>(one))); }, x);
  }
  static U LeastUnsigned(const U& a, const U& b) {
    return Each([](uint32_t x, uint32_t y) { return std::min(x, y); }, a, b);
  }
  static M LessUnsigned(const U& a, const U& b) {
    return Each([](uint32_t x, uint32_t y) { return x < y; }, a, b);
  }
  static U Truncate(const F& a) { return Each(&One::Truncate, a); }
  static F FromInteger(const U& a) { return Each(&One::FromInteger, a); }

  static U Position() { return Ramp(1); }
  static U Ramp(uint32_t step) {
    U r;
    for (uint32_t i = 0; i < kWarpThreads; ++i) r.of[i] = i * kEach * step;
    return r;
  }
  template <int kWords>
  static void LoadVector(const std::byte* row, U (&w)[kWords]) {
    LoadVector(row, w, All(true));
  }
  template <int kWords>
  static void LoadVector(const std::byte* row, U (&w)[kWords], const M& where) {
    for (int i = 0; i < kWarpThreads; ++i) {
      for (int k = 0; k < kWords; ++k) {
        w[k].of[i] = 0;
        if (where.of[i]) std::memcpy(&w[k].of[i], row + 4 * (i * kWords + k), 4);
      }
      if (where.of[i]) lockstep_traffic.Count(row, 4 * kWords);
    }
  }
  template <int kWords>
  static void StoreVector(std::byte* row, const U (&w)[kWords], const M& where) {
    for (int i = 0; i < kWarpThreads; ++i) {
      for (int k = 0; k < kWords && where.of[i]; ++k) std::memcpy(row + 4 * (i * kWords + k), &w[k].of[i], 4);
      if (where.of[i]) lockstep_traffic.Count(row, 4 * kWords);
    }
  }
  static void Prefetch(const std::byte*, uint32_t) {}
  static void LoadElements(const std::byte* row, uint32_t bytes, U (&w)[kEach]) {
    U one[2], two[4];
    if (bytes == 4) return LoadVector(row, w);
    if (bytes == 2) {
      LoadVector(row, two);
      std::copy_n(two, 4, w);
    } else {
      LoadVector(row, one);
      std::copy_n(one, 2, w);
    }
  }
  template <int kByte>
  static U SignedByte(const U& word) {
    return ShiftRightSigned<24>(ShiftLeft<24 - 8 * kByte>(word));
  }
  template <int kByte>
  static U JoinBytes(const U& a, const U& b) {
    return Each([](uint32_t x, uint32_t y) { return (x >> (8 * kByte) & 0xff) | (y >> (8 * kByte) & 0xff) << 8; }, a,
                b);
  }
  template <int kHalf>
  static U JoinHalves(const U& a, const U& b) {
    return Each([](uint32_t x, uint32_t y) { return (x >> (16 * kHalf) & 0xffff) | y >> (16 * kHalf) << 16; }, a, b);
  }
  static F MaxMagnitude(const F& a, const F& b) { return FromBits(MaxBits(Bits(Abs(a)), Bits(Abs(b)))); }
  static void LoadOwn(const std::byte* row, U (&w)[kEach]) { LoadVector(row, w); }
  static void StoreOwn(std::byte* row, const U (&w)[kEach], const M& where) { StoreVector(row, w, where); }
  template <uint32_t kBytes, uint32_t kPer>
  static U LoadScale(const std::byte* scales) {
    U r = All(0u);
    for (uint32_t i = 0; i < kWarpThreads; ++i) std::memcpy(&r.of[i], scales + i * kEach / kPer * kBytes, kBytes);
    lockstep_traffic.Count(scales, kRow / kPer * kBytes);  // threads that share one read it together
    return r;
  }
  template <uint32_t kBytes, uint32_t kPer>
  static void StoreScale(std::byte* scales, const U& scale, const M& where) {
    for (uint32_t i = 0; i < kWarpThreads; ++i) {
      if (!where.of[i] || i * kEach % kPer != 0) continue;
      std::memcpy(scales + i * kEach / kPer * kBytes, &scale.of[i], kBytes);
      lockstep_traffic.Count(scales, kBytes);
    }
  }

  template <int kMask>
  static U Exchange(const U& x) {
    U r;
    for (int i = 0; i < kWarpThreads; ++i) r.of[i] = x.of[i ^ kMask];
    return r;
  }
  static bool Any(const M& m) { return std::find(m.of, m.of + kWarpThreads, true) != m.of + kWarpThreads; }
  static uint32_t Sum(const U& x) {
    uint32_t sum = 0;
    for (const uint32_t one : x.of) sum += one;
    return sum;
  }
  static uint32_t Most(const U& x) { return *std::max_element(x.of, x.of + kWarpThreads); }
  static M Not(const M& a) {
    return Each([](bool x) { return !x; }, a);
  }
  static M Either(const M& a, const M& b) {
    return Each([](bool x, bool y) { return x || y; }, a, b);
  }
  static M Both(const M& a, const M& b) {
    return Each([](bool x, bool y) { return x && y; }, a, b);
  }
  static void StoreOnce(float* p, const F& x) { *p = x.of[0]; }
  static void StoreOnce(uint32_t* p, uint32_t x) { *p = x; }

  static void LoadScales(const float* scales, uint64_t row_length, uint64_t row, uint64_t last, F (&out)[kEach]) {
    for (uint32_t i = 0; i < kWarpThreads; ++i) {
      float mine[kEach];
      SpreadScales(scales, row_length, row + i * kEach, last, mine);
      for (int j = 0; j < kEach; ++j) out[j].of[i] = mine[j];
    }
  }
  static void Raise(float* scales, uint64_t row_length, uint64_t row, uint64_t last, const U (&magnitude)[kEach]) {
    for (uint64_t i = 0; i < kRow && row + i < last; ++i) {
      float* scale = scales + (row + i) / row_length;
      *scale = std::max(*scale, std::bit_cast<float>(magnitude[i % kEach].of[i / kEach]));
    }
  }
};

}  // namespace BALLAST_UNIT
}  // namespace ballast::kernels
