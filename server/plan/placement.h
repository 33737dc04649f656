// Which device of the daemon each tensor of a run lives on. A run that fits on one device lives there whole: the others
// are not in its way, and it outlives their failures. A larger one is spread: tensors whole, the largest first, each to
// the device with the most room. Bits depend on names and indices only, so placement never changes one.
//
// Pure functions; thread-safe.
#pragma once

#include <cstdint>
#include <optional>
#include <vector>

#include "absl/types/span.h"

#include "server/spec/run_spec.h"

namespace ballast {

struct Placement {
  std::vector<size_t> devices = {};     // indices of those that hold a shard, by shard
  std::vector<uint32_t> shard_of = {};  // by tensor
};

// All of it on one device.
Placement OnOneDevice(const RunSpec& spec, size_t device = 0);
// `free_bytes` by device. host_free_bytes: of the host, where snapshots and client_state go that the devices have no
// part in; none: the device is the host. None: it does not fit.
std::optional<Placement> ChoosePlacement(const RunSpec& spec, absl::Span<const uint64_t> free_bytes,
                                         std::optional<uint64_t> host_free_bytes = std::nullopt);

}  // namespace ballast
