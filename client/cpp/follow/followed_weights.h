// All tensors of a run in host memory as the daemon serves them, codes and scales, and what comes of changes to them.
// Thread-compatible.
#pragma once

#include <cstddef>
#include <cstdint>
#include <memory>
#include <optional>
#include <vector>

#include "absl/status/status.h"
#include "absl/status/statusor.h"
#include "absl/types/span.h"

#include "ballast/v1/follow.pb.h"
#include "ballast/v1/run.pb.h"
#include "client/cpp/wire/tensor_table.h"

namespace ballast {

class FollowedWeights {
 public:
  // `chunk_elements`: of the run's plan. RESOURCE_EXHAUSTED: there is not so much memory; INTERNAL: the spec is none that
  // a run may have; as TensorTable::Create.
  static absl::StatusOr<FollowedWeights> Create(const v1::RunSpec& spec, uint64_t chunk_elements);

  const v1::RunSpec& spec() const { return spec_; }
  const TensorTable& tensors() const { return tensors_; }
  uint64_t bytes() const { return bytes_; }  // of all codes and scales
  absl::Span<const std::byte> codes(uint32_t tensor) const;
  absl::Span<const float> scales(uint32_t tensor) const { return places_[tensor].scales; }
  // In the tensor's dtype, in which all of it takes this many bytes.
  uint64_t read_bytes(uint32_t tensor) const;
  absl::Status Read(uint32_t tensor, std::byte* out) const;
  // The elements at these places in the tensor, likewise.
  absl::Status Read(uint32_t tensor, absl::Span<const int64_t> places, std::byte* out) const;

  // Whether a run of this spec has these tensors, in these formats, as the same part.
  bool Fit(const v1::RunSpec& spec, uint64_t chunk_elements) const;

  // Makes the chunk, one that IncomingVersion has taken, what it is in its version. With a tensor's last chunk its digest is
  // compared. DATA_LOSS: it differs; INVALID_ARGUMENT: the changes are malformed. The tensor's contents are then of no use.
  absl::Status Apply(const v1::ChangedChunk& chunk);
  // By tensor, of what is there; none: it is of no version. As in v1::AttachResponse.digests.
  const std::vector<std::optional<uint64_t>>& digests() const { return digests_; }
  // What is there is of no version.
  void Forget() { digests_.assign(tensors_.size(), std::nullopt); }

 private:
  struct Place {
    uint64_t begin = 0;  // of the codes
    std::vector<float> scales;
  };

  uint64_t Digest(uint32_t tensor) const;

  v1::RunSpec spec_;
  TensorTable tensors_;
  std::vector<Place> places_;  // by tensor
  std::unique_ptr<std::byte[]> codes_;
  uint64_t bytes_ = 0;
  std::vector<std::optional<uint64_t>> digests_;
};

}  // namespace ballast
