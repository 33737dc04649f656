// The formulas as a GPU thread runs them, one element a thread. Compiled wherever nvcc is found, never run: it shows on
// every build that a formula is fit for the device as it stands. (dynamic8 looks its codes up in tables of the host.)
#include "kernels/formats/bf16.h"
#include "kernels/formats/companded8.h"
#include "kernels/formats/flash.h"
#include "kernels/formats/fp32.h"
#include "kernels/formats/split.h"
#include "kernels/formats/wire.h"
#include "kernels/random.h"
#include "kernels/rules/adam.h"
#include "kernels/rules/collage.h"
#include "kernels/rules/lion.h"
#include "kernels/rules/sgd.h"
#include "kernels/rules/stable_adamw.h"

namespace ballast::kernels {
using L = ScalarLane;

template <class Coder, class... Blocks>
__device__ Coder MakeCoder(const Blocks&... blocks) {
  if constexpr (Coder::kNumbers > 0) {
    return Coder::Of(blocks...);
  } else {
    return Coder{};
  }
}

// The stored scale of a block whose largest magnitude is `most`.
template <class S>
__device__ uint32_t ScaleOf(uint32_t most) {
  if constexpr (S::kScalePer > 0) {
    return S::template Scale<L>(most);
  } else {
    return most;
  }
}

template <class S>
__device__ uint32_t Recode(uint32_t code, float value, uint32_t most, uint32_t random, float* old) {
  using Decoder = typename S::template Decoder<L>;
  using Encoder = typename S::template Encoder<L>;
  const uint32_t scale = ScaleOf<S>(most);
  *old = MakeCoder<Decoder>(scale).Decode(code);
  return MakeCoder<Encoder>(scale, most).template Encode<true>(value, random);
}

template <class Rule, class Master, class State, class Wire>
__global__ void OneElement(const float* constants, const uint32_t* in, uint32_t* out, uint64_t key) {
  const uint64_t e = blockIdx.x * uint64_t{blockDim.x} + threadIdx.x;
  uint32_t* mine = out + 4 * e;
  Element<L> element{};
  element.grad = Wire::template Decode<L>(in[e]);
  element.weight = Master::template Decode<L>({{mine[0], mine[1]}});
  for (int i = 0; i < kMaxSlots; ++i) element.slot[i] = L::FromBits(in[e + i + 1]);
  const auto updated = Rule::template Apply<L>(constants, element);
  const auto random = RandomStream<L>(key, e).At(e);
  const auto words = Master::template Encode<L, true>(updated.weight, random.master);
  float old[2];
  mine[2] = Recode<typename State::Signed>(mine[2], updated.slot[0], in[0], random.state, &old[0]);
  mine[3] = Recode<typename State::NonNegative>(mine[3], updated.slot[1], in[1], random.state, &old[1]);
  mine[0] = words.word[0] + L::Bits(old[0]);
  mine[1] = words.word[1] + L::Bits(old[1]) + Wire::template Encode<L>(updated.weight, 1.0f);
}

#define INSTANTIATE(...) \
  template __global__ void OneElement<__VA_ARGS__>(const float*, const uint32_t*, uint32_t*, uint64_t)
INSTANTIATE(AdamW, Split24, Companded8State, WireBf16);
INSTANTIATE(Adam, Split32, Companded8State, WireFp16);
INSTANTIATE(StableAdamW, Split24, Bf16State, WireFp32);
INSTANTIATE(AdamW, Flash24, Flash8State, WireFp32);
INSTANTIATE(AdamW, Flash32, Fp32State, WireFp16);
INSTANTIATE(Sgd, Fp32Master, Fp32State, WireFp16);
INSTANTIATE(SgdW, Bf16Master, Companded8State, WireBf16);
INSTANTIATE(Lion, Split24, Companded8State, WireFp16);
INSTANTIATE(CollageLight, McfMaster, Bf16State, WireBf16);
INSTANTIATE(CollagePlus, McfMaster, McfState, WireBf16);

}  // namespace ballast::kernels
