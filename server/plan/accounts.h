// What a run's accounts of its ranks' gradients take in host memory, at most: which chunks each contributes and
// receives (Coverage), which have come (Reduction), and where those that wait to be summed lie (RankLink). Part of
// the plan, so that no client's numbers of tensors, ranks and micro-batches end the daemon.
//
// Pure functions; thread-safe.
#pragma once

#include <cstdint>

#include "server/spec/run_spec.h"

namespace ballast {

// Chunks of one rank that may wait to be summed at one time, in a window of so many bytes.
uint64_t MostHeldChunks(const RunSpec& spec, uint64_t window_bytes);
// Of all ranks. pools: that gradients are summed in.
uint64_t AccountBytes(const RunSpec& spec, uint64_t window_bytes, uint64_t pools);

}  // namespace ballast
