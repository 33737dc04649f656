// The digests of all weights in their serving format, computed chunk by chunk through the run's queue, many small tensors at
// a time. In a format with scales, a tensor's digest is the digest of two digests: that of the codes, and that of the scales in order.
//
// A tensor's digest is kept until its weights change, so that ranks that come one after another, or all at once, share
// one pass. A request that comes while a pass is under way is answered after the next pass, which digests only what has
// changed since: no request waits for more than two passes. A tensor that changes again and again while it is digested
// gets a digest that belongs to no weights: whoever compares it finds a difference, and the pass ends nevertheless.
//
// Strand-confined. Memory: one scratch chunk, kSmallSendBuffers of small tensors, and 24 bytes a tensor, from the
// constructor on.
#pragma once

#include <cstdint>
#include <optional>
#include <string>
#include <vector>

#include "absl/functional/any_invocable.h"
#include "absl/status/statusor.h"

#include "server/store/parameter_store.h"
#include "server/store/tensor_digester.h"

namespace ballast {

class DigestJob {
 public:
  using Done = absl::AnyInvocable<void(absl::StatusOr<std::vector<uint64_t>>)>;
  DigestJob(const RunSpec* spec, ParameterStore* store, const Plan& plan);

  // `done` gets the digests of weights that the run had at some time since this call.
  void Start(Done done);
  void Abandon(const absl::Status& why);
  uint64_t scratch_bytes() const;

 private:
  static constexpr int kMostRestarts = 2;  // of a tensor in one pass
  // A tensor that is digested as one of many.
  struct Small {
    WeightPiece piece;
    uint32_t tensor = 0;
    uint64_t version = 0;  // that is encoded
  };

  void BeginPass();
  void NextTensor();
  bool IsSmall(uint32_t tensor) const;
  void BeginSmall();
  void OnSmall();
  // To the next tensor that has changed.
  void SkipUnchanged();
  void BeginTensor();
  void NextChunk();
  void OnChunk();

  const RunSpec* const spec_;
  ParameterStore* const store_;
  WeightPiece scratch_;
  std::vector<Small> small_;
  size_t together_ = 0, left_ = 0;  // of small_: under way, and of them being encoded
  std::vector<Done> waiting_;       // for the pass under way
  std::vector<Done> later_;         // for the next
  bool encoding_ = false;
  uint32_t tensor_ = 0;
  uint64_t chunk_ = 0;
  uint64_t version_ = 0;  // of the tensor, when its chunk 0 was encoded
  int restarts_ = 0;
  std::optional<TensorDigester> digester_;
  std::vector<uint64_t> digests_;                  // by tensor
  std::vector<std::optional<uint64_t>> versions_;  // that they are of
};

}  // namespace ballast
