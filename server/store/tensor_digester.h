// The digest of a tensor's weights in their serving format, fed chunk by chunk in order: proto/PROTOCOL.md, "Digests".
// Thread-compatible.
#pragma once

#include <cstdint>
#include <vector>

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
    scales_.Add(BytesOf(scales.subspan(first % tensor_->row_length == 0 ? 0 : 1)));
  }
  uint64_t Digest() const {
    if (tensor_->row_length == 0) return codes_.Digest();
    return WeightDigest(BytesOf(std::vector{codes_.Digest(), scales_.Digest()}));
  }

 private:
  template <typename Values>
  static absl::Span<const std::byte> BytesOf(const Values& values) {
    return {reinterpret_cast<const std::byte*>(values.data()), values.size() * sizeof(*values.data())};
  }

  const TensorSpec* tensor_;
  WeightDigester codes_, scales_;
};

}  // namespace ballast
