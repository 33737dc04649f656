// What the daemon's digest of a tensor would be, had these weights been uploaded: encoded in the master's format and
// served, by the daemon's own kernels. So a rank knows whether its weights are the run's without having them sent.
//
// A pure function. Memory: a piece of the tensor, and of a format with scales all of it, in the master's format and in
// the serving one.
#pragma once

#include <cstddef>
#include <cstdint>
#include <optional>
#include <string>

namespace ballast {

struct ServedAs {
  std::string master, serving;  // formats
  std::string format;           // of the weights at hand
  uint64_t elements = 0;
  uint64_t columns = 0;  // the last dimension of several; 0: of one at most
};

// None where the formats are unknown here or a weight is not finite.
std::optional<uint64_t> ServedDigest(const ServedAs& tensor, const std::byte* weights);

}  // namespace ballast
