// The digest of a tensor's weights in their serving format, fed chunk by chunk in order: proto/PROTOCOL.md, "Digests".
// Thread-compatible.
#pragma once

#include <cstddef>
#include <cstdint>

#include "absl/types/span.h"
#include "proto/checksum.h"

#include "server/spec/run_spec.h"

namespace ballast {

class TensorDigester {
 public:
  explicit TensorDigester(const TensorSpec* tensor) : tensor_(tensor) {}

  // The codes from element `first` on, and all the scales that they need. A row's scale comes with every chunk that has
  // elements of the row, and is counted with the first.
  void Add(absl::Span<const std::byte> codes, absl::Span<const float> scales, uint64_t first) {
    codes_.Add(codes);
    if (tensor_->row_length == 0) return;
    const auto own = scales.subspan(first % tensor_->row_length == 0 ? 0 : 1);
    scales_.Add({reinterpret_cast<const std::byte*>(own.data()), own.size() * sizeof(float)});
  }
  uint64_t Digest() const {
    if (tensor_->row_length == 0) return codes_.Digest();
    return ScaledDigest(codes_.Digest(), scales_.Digest());
  }

 private:
  const TensorSpec* tensor_;
  WeightDigester codes_, scales_;
};

}  // namespace ballast
