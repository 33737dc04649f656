// The parts of one version as they come from a daemon: whether they are in order, lie in the run's tensors and arrived as
// they were sent. Nothing is written before that is known. Thread-compatible.
#pragma once

#include <cstdint>
#include <optional>
#include <vector>

#include "absl/status/status.h"
#include "absl/status/statusor.h"
#include "proto/changes.h"

#include "ballast/v1/follow.pb.h"
#include "client/cpp/follow/subscriber.h"
#include "client/cpp/wire/tensor_table.h"

namespace ballast {

// Whether all that names them is the same.
bool IsSameVersion(const v1::VersionId& a, const v1::VersionId& b);

// What the chunk has, which it outlives.
ChangesView ChangesIn(const v1::ChangedChunk& chunk);

class IncomingVersion {
 public:
  // `have`: the version that the reader has; none: it has none. `tensors`, the run's, whose codes and scales take
  // `whole_bytes`, outlive it. INTERNAL: it changes another one, or is said to be larger than one can be, beside
  // `kept_bytes` of changes that lead to `have`.
  static absl::StatusOr<IncomingVersion> Begin(const v1::VersionBegin& begin, const std::optional<v1::VersionId>& have,
                                               const TensorTable& tensors, uint64_t whole_bytes,
                                               uint64_t kept_bytes = 0);

  // Whether it changes no other version.
  bool whole() const { return !begin_.has_base(); }
  const v1::VersionId& id() const { return begin_.id(); }

  // INTERNAL: it is none that can come here, or does not fit its tensor. DATA_LOSS: it arrived damaged.
  absl::Status Take(const v1::ChangedChunk& chunk);
  // What it says of itself, but for `changed`. INTERNAL: something is missing.
  absl::StatusOr<FollowedVersion> End(const v1::VersionEnd& end) const;

 private:
  IncomingVersion(const v1::VersionBegin& begin, const TensorTable& tensors)
      : begin_(begin), tensors_(&tensors), came_(tensors.size()) {}

  absl::Status CheckOrder(const v1::ChangedChunk& chunk) const;
  absl::Status CheckWhole(const v1::ChangedChunk& chunk) const;
  absl::Status CheckSizes(const v1::ChangedChunk& chunk) const;

  v1::VersionBegin begin_;
  const TensorTable* tensors_;
  std::vector<bool> came_;
  std::optional<uint32_t> tensor_;  // whose chunks come; none: its last has come
  uint64_t next_chunk_ = 0;         // of that, at least
  uint64_t bytes_ = 0;
};

}  // namespace ballast
