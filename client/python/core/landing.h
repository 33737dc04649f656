// Weights on their way to where the caller wants them.
#pragma once

#include <cstddef>
#include <cstdint>
#include <map>
#include <tuple>
#include <utility>
#include <vector>

#include "absl/status/status.h"
#include "absl/types/span.h"

#include "client/python/core/memory.h"

namespace ballast {

// (tensor, address, bytes)
using Places = std::vector<std::tuple<uint32_t, Address, uint64_t>>;

class Landing {
 public:
  explicit Landing(const Places& places);

  // Ascending.
  std::vector<uint32_t> tensors() const;

  bool wants(uint32_t tensor) const { return places_.contains(tensor); }

  // A piece of what a pull brings, at `offset` bytes within the tensor. INVALID_ARGUMENT where its place ends before.
  absl::Status Write(uint32_t tensor, uint64_t offset, absl::Span<const std::byte> piece) const;

 private:
  std::map<uint32_t, std::pair<Address, uint64_t>> places_;
};

}  // namespace ballast
