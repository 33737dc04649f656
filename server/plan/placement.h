// Which device of the daemon each tensor of a run lives on. A run that fits on one device lives there whole, so that
// the other devices do not slow it down and it outlives their failures. A larger run is spread: whole tensors, the
// largest first, each to the device with the most room. A weight's bits depend on names and indices only, so placement
// never changes one.
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
  std::vector<size_t> devices = {};     // by shard: the index of the device that holds it
  std::vector<uint32_t> shard_of = {};  // by tensor
};

// Puts the whole run on one device.
Placement OnOneDevice(const RunSpec& spec, size_t device = 0);
// `free_bytes`: by device. `host_free_bytes`: on the host, where snapshots and client_state are when the devices are
// GPUs; none: the device is the host. Returns none if the run does not fit.
std::optional<Placement> ChoosePlacement(const RunSpec& spec, absl::Span<const uint64_t> free_bytes,
                                         std::optional<uint64_t> host_free_bytes = std::nullopt);

// The placement of a spec that begins with the tensors of `placement`, which stay where they are. Each new one goes to
// the device, of those that the run has, with the most room. `free_bytes`: by device, beside what the run has.
Placement Extended(Placement placement, const RunSpec& spec, absl::Span<const uint64_t> free_bytes);

}  // namespace ballast
