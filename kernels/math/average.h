// One element of a running average of weights: a + c (w - a), by which PyTorch's AveragedModel moves, in split24 with
// stochastic rounding. Near d = 1 a step moves an average by less than half of its last place, and of fp32's: rounded to
// nearest it would stand still. So what the addition loses is kept, exactly, and is rounded by chance, too.
#pragma once

#include "kernels/formats/split.h"
#include "kernels/math/random.h"

namespace ballast::kernels {
inline namespace BALLAST_UNIT {

using AverageFormat = Split24;

// Brought down to the largest that the format holds.
template <class V>
BALLAST_FN typename V::F HeldAverage(typename V::F x) {
  const auto bits = V::Bits(x);
  const auto magnitude = V::MinBits(V::And(bits, V::SetBits(kMagnitude)), V::SetBits(AverageFormat::kSaturated));
  return V::FromBits(V::Or(magnitude, V::And(bits, V::SetBits(kSignBit))));
}

// `pull`: c. `random`: the element's x.
template <class V>
BALLAST_FN Words<V> AverageMoved(typename V::F a, typename V::F w, float pull, const RandomStream<V>& stream,
                                 typename V::U random) {
  const auto move = V::Mul(V::Set(pull), V::Sub(w, a));
  const auto sum = V::Add(a, move);
  const auto moved = V::Sub(sum, a);  // what is lost: Knuth, The Art of Computer Programming, 4.2.2, theorem B
  const auto lost = V::Add(V::Sub(a, V::Sub(sum, moved)), V::Sub(move, moved));
  // The next number that way, which it becomes as often as the loss is a part of the gap. Where nothing is lost, it is the sum
  // itself: the gap beside a zero is subnormal, and a CPU takes a hundred cycles for each operation on it.
  const auto away = V::template ShiftRightSigned<31>(V::Xor(V::Bits(lost), V::Bits(sum)));  // -1: towards zero
  const auto loses = V::Less(V::Set(0), V::Abs(lost));
  const auto next = V::AddBits(V::Bits(sum), V::SelectBits(loses, V::Or(away, V::SetBits(1)), V::SetBits(0)));
  const auto gap = V::Abs(V::Sub(V::FromBits(next), sum));
  const auto chance = Uniform<V>(V::And(random, V::SetBits(0xffff)));
  const auto rounded = V::SelectBits(V::Less(V::Mul(chance, gap), V::Abs(lost)), next, V::Bits(sum));
  return AverageFormat::template Encode<V, true>(HeldAverage<V>(V::FromBits(rounded)), stream.ForMaster(random));
}

// Rounded to nearest: where an average begins.
template <class V>
BALLAST_FN Words<V> AverageBegun(typename V::F w) {
  return AverageFormat::template Encode<V, false>(HeldAverage<V>(w), V::SetBits(0));
}

}  // namespace BALLAST_UNIT
}  // namespace ballast::kernels
