// What an update over a matrix takes on a GPU: rule muon, its passes and what makes the direction orthogonal between them. In the
// shapes of gpu_peers.py, which times torch.optim.Muon and the matrix products alone.
#pragma once

#include <ostream>

#include "tests/kernels/cuda/device_memory.h"

namespace ballast::kernels {

// One JSON object a line: "matrix", "what", "ms" (quartiles), "rounds"; or "skipped", and why.
void BenchMatrices(int rounds, const Stream& stream, std::ostream& out);

}  // namespace ballast::kernels
