// The parts that cuda_updates.cu is compiled in.
#pragma once

#include "kernels/cuda/cuda_kernels.h"

namespace ballast::kernels {

inline constexpr int kCudaParts = BALLAST_CUDA_PARTS;

// Fills in the kernels, in the registry's order, whose index divided by kCudaParts leaves kPart.
template <int kPart>
void FillCudaPart(CudaKernel* kernels);

}  // namespace ballast::kernels
