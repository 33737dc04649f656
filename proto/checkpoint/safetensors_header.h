// The header of a safetensors file as a checkpoint has it: its text follows from the tensors, to the byte
// (proto/CHECKPOINTS.md, "The header's text"), so that a reader compares and does not interpret.
//
//   SafetensorsHeader header;
//   header.Add("layer.weight", "BF16", {3, 5}, 30);
//   std::string begin_of_file = std::move(header).Finish();
//
// Pure; an object is used by one thread.
#pragma once

#include <cstdint>
#include <map>
#include <string>

#include "absl/strings/string_view.h"
#include "absl/types/span.h"

namespace ballast {

// No tensor may have this name: in a safetensors header it is not a tensor.
inline constexpr absl::string_view kReservedTensorName = "__metadata__";
// Where data begins in a file is a multiple of this: a page, so that files can be mapped.
inline constexpr uint64_t kDataAlignment = 4096;

// As a JSON string of such a header. Names are UTF-8.
std::string QuotedName(absl::string_view text);

class SafetensorsHeader {
 public:
  // The text of a header before its first tensor, without more metadata.
  static constexpr absl::string_view kBegin =
      R"({"__metadata__":{"format":"pt"})";  // which Hugging Face's loaders ask for

  SafetensorsHeader() = default;
  // With these in the metadata, too, in the map's order.
  explicit SafetensorsHeader(const std::map<std::string, std::string>& metadata);

  // The next tensor of the file; `bytes` of data follow those of the one before.
  void Add(absl::string_view name, absl::string_view dtype, absl::Span<const uint64_t> shape, uint64_t bytes);
  uint64_t data_bytes() const { return end_; }
  // With its length before it, padded.
  std::string Finish() &&;

 private:
  std::string json_ = std::string(kBegin);
  uint64_t end_ = 0;  // of the data
};

}  // namespace ballast
