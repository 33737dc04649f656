// How a run's planes lie in the files of a checkpoint (proto/CHECKPOINTS.md): which are in which file, in what order, and
// the header of each. It follows from the spec alone, so that what is read back is compared with what it must be, and
// nothing is taken from a header that a stranger may have written.
//
//   for (const CheckpointShard& shard : LayOutCheckpoint(spec)) ... shard.header ... shard.planes
//
// Pure functions, linear in the number of tensors; thread-safe.
#pragma once

#include <cstddef>
#include <cstdint>
#include <string>
#include <vector>

#include "server/spec/run_spec.h"

namespace ballast {

// One plane of a tensor as a file has it: without padding.
struct CheckpointPlane {
  uint32_t tensor = 0;
  size_t plane = 0;  // of StoredPlanes (server/spec/stored_planes.h)
  uint64_t bytes = 0;
};

// One safetensors file: the header, then the planes.
struct CheckpointShard {
  std::string name;
  std::string header;  // with its length before it, padded
  std::vector<CheckpointPlane> planes;
};

// A file ends with the plane that takes it past so many bytes of data.
inline constexpr uint64_t kShardBytes = uint64_t{1} << 30;
std::vector<CheckpointShard> LayOutCheckpoint(const RunSpec& spec, uint64_t shard_bytes = kShardBytes);
// model.safetensors.index.json of these.
std::string CheckpointIndex(const RunSpec& spec, const std::vector<CheckpointShard>& shards);
// client_state.safetensors: the header of a file with these sizes, by rank; 0: the rank has none.
std::string ClientStateHeader(const std::vector<uint64_t>& bytes);

// The bytes of a plane that are a tensor's elements, or their scales; the rest pads it.
uint64_t UsedPlaneBytes(const kernels::Plane& plane, uint64_t elements);

}  // namespace ballast
