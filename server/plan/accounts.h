// The most host memory that a run needs to keep track of its ranks' gradients: which chunks each rank contributes and
// receives (Coverage), which have come (ReductionTracker), and where those that wait to be summed lie (RankLink). It is
// part of the plan, so that no client can end the daemon with its numbers of tensors, ranks and micro-batches.
//
// Pure functions; thread-safe.
#pragma once

#include <cstdint>

#include "server/spec/run_spec.h"

namespace ballast {

// The most chunks of the run that a ChunkSet has in part.
uint64_t MostParts(const RunSpec& spec);
// What the coverage of one rank takes, one way; likewise what a reader names of the tensors.
uint64_t CoverageBytes(const RunSpec& spec);
// The most chunks of one rank that may wait to be summed at one time, in a window of so many bytes.
uint64_t MostHeldChunks(const RunSpec& spec, uint64_t window_bytes);
// The bytes for all ranks. pools: the number of pools that gradients are summed in.
uint64_t AccountBytes(const RunSpec& spec, uint64_t window_bytes, uint64_t pools);

}  // namespace ballast
