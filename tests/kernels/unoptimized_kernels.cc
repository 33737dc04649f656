// Compiled with -O0 -ffp-contract=off. The tag keeps the linker from merging these with the kernels under test.
#include "tests/kernels/unoptimized_kernels.h"

#include "kernels/cpu_kernels.h"
#include "kernels/formats/companded8.h"
#include "kernels/formats/fp32.h"
#include "kernels/formats/split.h"
#include "kernels/rules/adamw.h"

namespace ballast::kernels {
namespace {

struct Unoptimized {};
using Lane = ScalarLane<Unoptimized>;

template <class Rule, class MasterFormat, class State>
constexpr UnoptimizedKernel Make() {
  return {Rule::kName, MasterFormat::kName, State::kName, &CpuKernel<Lane, Rule, MasterFormat, State>::Update};
}

constexpr UnoptimizedKernel kKernels[] = {
    Make<AdamW, Fp32Master, Fp32State>(), Make<AdamW, Fp32Master, Companded8State>(),
    Make<AdamW, Split24, Fp32State>(),    Make<AdamW, Split24, Companded8State>(),
    Make<AdamW, Split32, Fp32State>(),    Make<AdamW, Split32, Companded8State>(),
};

}  // namespace

std::span<const UnoptimizedKernel> UnoptimizedKernels() { return kKernels; }

}  // namespace ballast::kernels
