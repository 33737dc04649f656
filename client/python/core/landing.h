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

#include "client/cpp/client.h"
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

// (tensor, address of the codes, bytes, address of the scales, how many)
using ServedPlaces = std::vector<std::tuple<uint32_t, Address, uint64_t, Address, uint64_t>>;

// The same for weights as the daemon serves them, of whole tensors.
class ServedLanding {
 public:
  explicit ServedLanding(const ServedPlaces& places);

  // Ascending.
  std::vector<uint32_t> tensors() const { return codes_.tensors(); }

  // INVALID_ARGUMENT where the codes, or the scales, have no place.
  absl::Status Write(const ServedPiece& piece) const;

 private:
  struct Scales {
    Address address = 0;
    uint64_t count = 0;
    uint64_t row_length = 0;  // elements that share one
  };

  Landing codes_;
  std::map<uint32_t, Scales> scales_;
};

}  // namespace ballast
