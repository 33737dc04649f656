#include "server/plan/accounts.h"

#include <algorithm>
#include <utility>
#include <vector>

#include "server/plan/plan.h"
#include "server/step/payload.h"
#include "server/step/reduction_tracker.h"

namespace ballast {
namespace {

// A node of the map in which RankLink holds payloads, with what the allocator takes for the node and the payload.
constexpr uint64_t kAllocation = 16, kNodePointers = 4 * sizeof(void*);
constexpr uint64_t kHeldBytes = sizeof(std::pair<const ChunkId, Payload>) + kNodePointers + 2 * kAllocation;

}  // namespace

// A chunk of one element is whole.
uint64_t MostParts(const RunSpec& spec) {
  uint64_t parts = 0;
  for (const TensorSpec& t : spec.tensors) {
    const uint64_t chunks = ChunkCount(spec, t), last = t.elements - ChunkBegin(spec, chunks - 1);
    parts += std::min(last > 1 ? chunks : chunks - 1, ChunkSet::kMostParts);
  }
  return parts;
}

uint64_t CoverageBytes(const RunSpec& spec) {
  uint64_t chunks = 0;
  for (const TensorSpec& t : spec.tensors) chunks += ChunkCount(spec, t);
  return ChunkSet::Bytes(chunks, MostParts(spec));
}

// The payload of a chunk that a rank has in part may be one element. A run of one rank has no such chunks.
uint64_t MostHeldChunks(const RunSpec& spec, uint64_t window_bytes) {
  struct Kind {
    uint64_t bytes = 0, chunks = 0;
  };
  std::vector<Kind> kinds;  // of a micro-batch
  for (const TensorSpec& t : spec.tensors) {
    const uint64_t chunks = ChunkCount(spec, t), element_bytes = WireBytes(t.gradient_format);
    const uint64_t last = t.elements - ChunkBegin(spec, chunks - 1);
    const uint64_t parts = spec.ranks > 1 ? std::min(chunks, ChunkSet::kMostParts) : 0, whole = chunks - parts;
    if (parts > 0) kinds.push_back({element_bytes, parts});
    if (whole > 0) kinds.push_back({last * element_bytes, 1});
    if (whole > 1) kinds.push_back({spec.chunk_elements * element_bytes, whole - 1});
  }
  std::sort(kinds.begin(), kinds.end(), [](const Kind& a, const Kind& b) { return a.bytes < b.bytes; });
  const uint64_t live = std::min(spec.accumulation, ReductionTracker::kMostLive);
  uint64_t held = 0;
  for (const Kind& kind : kinds) {
    const uint64_t fit = std::min(live * kind.chunks, window_bytes / kind.bytes);
    held += fit;
    window_bytes -= fit * kind.bytes;
  }
  return held;
}

uint64_t AccountBytes(const RunSpec& spec, uint64_t window_bytes, uint64_t pools) {
  ReductionTracker::Size size{
      .ranks = spec.ranks, .micros = spec.accumulation, .tensors = spec.tensors.size(), .pools = pools};
  size.parts = MostParts(spec);
  size.chunks = 0;
  for (const TensorSpec& t : spec.tensors) size.chunks += ChunkCount(spec, t);
  const uint64_t of_rank = MostHeldChunks(spec, window_bytes) * kHeldBytes + CoverageBytes(spec);
  return AlignUp(ReductionTracker::BytesAtMost(size) + spec.ranks * of_rank + ChunkSet::StartsBytes(size.tensors));
}

}  // namespace ballast
