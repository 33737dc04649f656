// The digests of all weights in their serving format, computed chunk by chunk through the run's queue. One at a time: a
// second request takes the place of the first, which is answered ABORTED.
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
  DigestJob(const RunSpec* spec, ParameterStore* store, uint64_t scratch_bytes);

  void Start(Done done);
  void Abandon(absl::Status why);
  uint64_t scratch_bytes() const { return scratch_bytes_; }

 private:
  void Restart();
  void NextChunk();
  void OnChunk();

  const RunSpec* const spec_;
  ParameterStore* const store_;
  std::string scratch_;
  uint64_t scratch_bytes_ = 0;
  Done done_;
  bool encoding_ = false;
  bool restart_ = false;
  uint32_t tensor_ = 0;
  uint64_t chunk_ = 0;
  std::optional<WeightDigester> digester_;
  std::vector<uint64_t> digests_;
};

}  // namespace ballast
