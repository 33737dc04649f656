// The formulas as a GPU thread runs them, one element a thread. Compiled wherever nvcc is found, never run: it shows on
// every build that a formula is fit for the device as it stands.
#include "kernels/formats/companded8.h"
#include "kernels/formats/fp32.h"
#include "kernels/formats/split.h"
#include "kernels/random.h"
#include "kernels/rules/adamw.h"

namespace ballast::kernels {
template <class Master, class State>
__global__ void OneElement(const float* constants, const float* in, uint32_t* out, uint64_t key, bool stochastic) {
  using L = ScalarLane;
  const uint64_t e = blockIdx.x * uint64_t{blockDim.x} + threadIdx.x;
  Element<L> element{in[e], Master::template Decode<L>({{out[2 * e], out[2 * e + 1]}}), {in[e + 1], in[e + 2]}};
  const auto updated = AdamW::Apply<L>(constants, element);
  const auto random = Random<L>(key, e);
  const auto words = Master::template Encode<L>(updated.weight, random.master, stochastic);
  const typename State::Signed::template Block<L> m(State::Signed::Scale(L::Bits(updated.slot[0])));
  const typename State::NonNegative::template Block<L> v(State::NonNegative::Scale(L::Bits(updated.root[1])));
  out[2 * e] = words.word[0] + m.Encode(updated.slot[0], random.state, stochastic);
  out[2 * e + 1] = words.word[1] + v.Encode(updated.root[1], random.state, stochastic);
}
template __global__ void OneElement<Split24, Companded8State>(const float*, const float*, uint32_t*, uint64_t, bool);
template __global__ void OneElement<Split32, Companded8State>(const float*, const float*, uint32_t*, uint64_t, bool);
template __global__ void OneElement<Fp32Master, Fp32State>(const float*, const float*, uint32_t*, uint64_t, bool);

}  // namespace ballast::kernels
