// The run's tensors as the wire sees them: sizes, formats and how they are cut into chunks. Chunk k of a tensor is its
// elements [kC, min((k+1)C, n)), where C is chunk_elements. A rank that holds a shard of a tensor sends and receives
// those elements of a chunk that the shard has; chunks keep their numbers. An immutable value.
#pragma once

#include <cstddef>
#include <cstdint>
#include <string>
#include <vector>

#include "absl/status/statusor.h"
#include "absl/strings/string_view.h"
#include "absl/types/span.h"
#include "proto/checksum.h"

#include "ballast/v1/run.pb.h"
#include "ballast/v1/trainer.pb.h"
#include "client/cpp/shard.h"
#include "client/cpp/wire/step_limits.h"
#include "client/cpp/wire/wire_format.h"

namespace ballast {

// A payload as the protobuf messages hold it.
inline absl::Span<const std::byte> BytesOf(const std::string& data) {
  return absl::MakeConstSpan(reinterpret_cast<const std::byte*>(data.data()), data.size());
}

// Of a gradient that has no checksum yet.
inline void FillChecksum(v1::Gradient* gradient) {
  if (gradient->crc32c() == 0) gradient->set_crc32c(Crc32c(BytesOf(gradient->data())));
}

struct WireTensor {
  std::string name;
  uint64_t elements = 0;
  uint64_t chunks = 1;   // an empty tensor is one empty chunk
  std::string dtype;     // what the trainer computes in
  std::string gradient;  // of its gradients
  std::string serving;   // of its weights as they return
  uint64_t gradient_element_bytes = 0;
  uint64_t serving_element_bytes = 0;
  uint64_t row_length = 0;  // elements that share a scale when served; 0: none
  Shard shard;              // all of it, unless it is sharded; `contributes` only where it has elements
  // The chunks that the shard has elements of.
  uint64_t first_chunk = 0, end_chunk = 1;
  uint64_t held_chunks() const { return end_chunk - first_chunk; }
  uint64_t held_elements() const { return shard.end - shard.begin; }
  bool whole() const { return held_elements() == elements; }
  // Of the shard.
  uint64_t gradient_bytes() const { return held_elements() * gradient_element_bytes; }
  uint64_t served_bytes() const { return held_elements() * serving_element_bytes; }
  uint64_t scales() const { return ScalesNeeded(row_length, shard.begin, shard.end); }
  // The format in which the trainer gets the weights: the serving format if a trainer can compute in it, otherwise the
  // tensor's dtype.
  const std::string& landing() const { return FindFormat(serving)->computes ? serving : dtype; }
  uint64_t landing_element_bytes() const { return FormatBytes(landing()); }
  uint64_t weight_bytes() const { return held_elements() * landing_element_bytes(); }
};

// What the run serves the tensor in.
const std::string& ServingFormat(const v1::RunSpec& spec, const v1::TensorSpec& tensor);

// Elements [first, last) of a tensor.
struct ShardPiece {
  uint64_t first = 0, last = 0;
  uint64_t size() const { return last - first; }
};

class TensorTable {
 public:
  // INVALID_ARGUMENT: `shards` is neither empty nor of the run's tensors, or a shard does not lie in its tensor.
  static absl::StatusOr<TensorTable> Create(const v1::RunSpec& spec, uint64_t chunk_elements,
                                            const Shards& shards = {});

  uint32_t size() const { return static_cast<uint32_t>(tensors_.size()); }
  const WireTensor& operator[](uint32_t tensor) const { return tensors_[tensor]; }
  uint64_t chunk_elements() const { return chunk_elements_; }
  // What the shard has of a chunk that it has elements of.
  ShardPiece PieceOf(uint32_t tensor, uint64_t chunk) const;
  bool staged() const { return staged_; }  // the run's commit
  const StepLimits& limits() const { return limits_; }

  // INVALID_ARGUMENT unless the run has this tensor.
  absl::Status CheckIndex(uint32_t tensor) const;
  // The tensor's name for messages: tensor 3 'layers.0.w'.
  std::string Name(uint32_t tensor) const;

 private:
  std::vector<WireTensor> tensors_;
  uint64_t chunk_elements_ = 0;
  bool staged_ = false;
  StepLimits limits_;
};

}  // namespace ballast
