// A subscriber whose versions somebody lets in: one that has several of them, and wants the same step of all
// (client/cpp/parts/parts_subscriber.h). It says which version waits to be written, and can be told to go on to a later one,
// with the weights that are here as they were.
//
// What has changed (FollowedVersion.changed, CountChanged, ReadChanged) is counted since EndVersion, and not since the
// version before.
//
// Threads: as subscriber.h says; standing, Seek, SeekTag, VersionsFor and Now from any.
#pragma once

#include <cstdint>
#include <optional>
#include <string>

#include "absl/status/statusor.h"

#include "ballast/v1/follow.pb.h"
#include "client/cpp/follow/subscriber.h"

namespace ballast {

class HeldSubscriber : public Subscriber {
 public:
  struct Standing {
    bool told = false;   // Next returns at once: a version that is written, or why there is none any more
    bool waits = false;  // for a call of Next, whatever its timeout, to write
    std::optional<v1::VersionId> offered =
        {};  // where it waits: the version that it would write; none: the run was amended
    std::optional<v1::VersionId> here =
        {};  // that the weights are of; none: they are of none, and are written as they come
  };
  virtual Standing standing() const = 0;

  // No version before the step `from` is wanted any more, of the generation of what is offered, or else of what is here; and
  // none nearer to the last than `every`. What is offered is given up, and the daemon asked anew.
  virtual void Seek(std::optional<uint64_t> from, uint64_t every) = 0;
  // The version of this name is wanted alone, until Seek. What is offered is given up.
  virtual void SeekTag(const std::string& tag) = 0;
  // The run's versions, for who goes to the one of this name. Errors as from Rollback, but for what is listed.
  virtual absl::StatusOr<v1::ListVersionsResponse> VersionsFor(const std::string& tag) = 0;

  // What versions that are made now are of. Without an epoch: none is known.
  struct Timeline {
    uint64_t generation = 0;
    std::optional<uint64_t> epoch = {};
    bool operator==(const Timeline&) const = default;
    bool Has(const v1::VersionId& id) const { return id.generation() == generation && epoch == id.epoch(); }
  };
  // Asks the daemon, for a minute at most. Errors as from GetRun and ListVersions; CANCELLED: Close was called.
  virtual absl::StatusOr<Timeline> Now() = 0;

  // The weights that are here were handed out. Where they are.
  virtual void EndVersion() = 0;
};

}  // namespace ballast
