// Every kernel a second time, compiled without optimisation (unoptimized_kernels.cc).
#pragma once

#include <span>

#include "kernels/registry.h"

namespace ballast::kernels {

struct UnoptimizedKernel {
  const char *rule, *master, *state;
  void (*update)(const Update& update, uint64_t first, uint64_t last, TileStatistics* stats);
};
std::span<const UnoptimizedKernel> UnoptimizedKernels();

}  // namespace ballast::kernels
