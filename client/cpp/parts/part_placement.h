// Which daemon has which tensor of a run that is on several: proto/PROTOCOL.md, "Several daemons". Every client finds the
// same from the same spec. A value; thread-compatible.
#pragma once

#include <cstdint>
#include <vector>

#include "absl/status/statusor.h"
#include "absl/types/span.h"

#include "ballast/v1/run.pb.h"

namespace ballast {

class PartPlacement {
 public:
  // Where a tensor of the run is: its part, and its number there.
  struct Place {
    uint32_t part = 0;
    uint32_t index = 0;
  };

  PartPlacement() = default;
  // Of a new run. INVALID_ARGUMENT: there are fewer tensors than parts.
  static absl::StatusOr<PartPlacement> Of(const v1::RunSpec& whole, uint32_t parts);
  // Of a run that is there, from what each daemon has of it, in their order; and where an amended spec's new tensors go.
  // FAILED_PRECONDITION: these are not the parts of one run, in this order; the spec has fewer tensors than the run.
  static absl::StatusOr<PartPlacement> OfParts(absl::Span<const v1::RunSpec> parts);
  absl::StatusOr<PartPlacement> Extended(const v1::RunSpec& whole) const;

  uint32_t parts() const { return static_cast<uint32_t>(numbers_.size()); }
  uint32_t tensors() const { return static_cast<uint32_t>(places_.size()); }
  const Place& operator[](uint32_t tensor) const { return places_[tensor]; }
  // By tensor of the part, its number in the run.
  const std::vector<uint32_t>& numbers(uint32_t part) const { return numbers_[part]; }

  // The specs that the daemons are given, by part; and the run's, from these.
  std::vector<v1::RunSpec> Split(v1::RunSpec whole) const;
  v1::RunSpec WholeOf(absl::Span<const v1::RunSpec> parts) const;

 private:
  void PlaceFrom(const v1::RunSpec& whole, uint32_t first);
  void Number();

  std::vector<Place> places_;                   // by tensor of the run
  std::vector<std::vector<uint32_t>> numbers_;  // by part
};

}  // namespace ballast
