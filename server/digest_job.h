// The digests of all weights in their serving format, computed chunk by chunk through the run's queue. Of a format with
// scales it is the digest of two digests, that of the codes and that of the scales in order. Requests that come while
// one is under way begin it anew, for the weights as they are then, and all are answered together: several ranks attach
// at once.
//
// Strand-confined. Memory: one scratch chunk, from the constructor on.
#pragma once

#include <cstdint>
#include <optional>
#include <string>
#include <vector>

#include "absl/functional/any_invocable.h"
#include "absl/status/statusor.h"
#include "proto/checksum.h"

#include "server/parameter_store.h"

namespace ballast {

class DigestJob {
 public:
  using Done = absl::AnyInvocable<void(absl::StatusOr<std::vector<uint64_t>>)>;
  DigestJob(const RunSpec* spec, ParameterStore* store, const Plan& plan);

  void Start(Done done);
  void Abandon(const absl::Status& why);
  uint64_t scratch_bytes() const { return scratch_.reserved_bytes(); }

 private:
  void Restart();
  void NextChunk();
  void OnChunk();
  void AddChunk();
  uint64_t TensorDigest() const;

  const RunSpec* const spec_;
  ParameterStore* const store_;
  WeightPiece scratch_;
  std::vector<Done> waiting_;
  bool encoding_ = false;
  bool restart_ = false;
  uint32_t tensor_ = 0;
  uint64_t chunk_ = 0;
  std::optional<WeightDigester> digester_, scale_digester_;
  std::vector<uint64_t> digests_;
};

}  // namespace ballast
