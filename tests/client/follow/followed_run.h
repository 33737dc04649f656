// A run that readers follow, for tests: its weights, and the messages in which a daemon tells of them.
#pragma once

#include <cstdint>
#include <string>
#include <vector>

#include "ballast/v1/follow.pb.h"
#include "ballast/v1/run.pb.h"
#include "client/cpp/wire/tensor_table.h"

namespace ballast {

inline constexpr uint64_t kFollowedChunk = 4;  // elements

// FakeSpec() with `follow`, and e [3,5] fp32 served in int8-row, f [7] fp32 served in bf16.
v1::RunSpec FollowedSpec();
inline const v1::RunSpec kFollowedSpec = FollowedSpec();

using VersionParts = std::vector<v1::VersionPart>;

v1::VersionId IdOf(uint64_t step, uint64_t generation = 1);

// All parts in one batch.
VersionParts Batched(const VersionParts& parts);

class FollowedRun {
 public:
  // Weights that differ from step to step in every byte.
  FollowedRun(const v1::RunSpec& spec, uint64_t step);
  // The next step, which changes one byte of each tensor.
  FollowedRun Next() const;

  std::vector<std::string> codes;          // by tensor
  std::vector<std::vector<float>> scales;  // likewise
  uint64_t step, generation = 1;

  uint64_t Digest(uint32_t tensor) const;
  // As it comes whole, without the tensors in `left_out`.
  VersionParts Whole(const std::vector<uint32_t>& left_out = {}) const;
  // As it comes to a reader of the version before.
  VersionParts ChangesOf(const FollowedRun& before) const;

 private:
  v1::ChangedChunk Chunk(uint32_t tensor, uint64_t chunk) const;
  // Between begin and end, which get what follows from the chunks.
  VersionParts Told(const std::vector<v1::ChangedChunk>& chunks, const FollowedRun* base) const;

  TensorTable tensors_;
};

}  // namespace ballast
