// Versions of a run on several daemons that have names: each daemon keeps its part's by the same name, and a mark says which were
// named together (proto/PROTOCOL.md, "Several daemons").
//
//   auto lists = ...;                                    // v1::FollowService.ListVersions of each daemon
//   MergeVersions(lists, names)                          // what the run has
//   FindTag(lists, names, "best")                        // its version of each part, or why there is none
//   OrdersOfTag(lists, names, request, 0)                // what to ask each daemon for
//
// Pure functions; thread-safe. Lists are by part, and not empty; `names` are the daemons'.
#pragma once

#include <cstdint>
#include <string>
#include <vector>

#include "absl/status/statusor.h"
#include "absl/types/span.h"

#include "ballast/v1/follow.pb.h"

namespace ballast {

using VersionLists = absl::Span<const v1::ListVersionsResponse>;

// Names that some daemons do not have, or of another version, are there as unreadable. The newest version is that of the last
// step of which all have one, if they have. `file`: of all daemons.
v1::ListVersionsResponse MergeVersions(VersionLists lists, absl::Span<const std::string> names);

// The parts' versions of that name. NOT_FOUND, with the names that there are; FAILED_PRECONDITION: it cannot be read.
absl::StatusOr<std::vector<v1::VersionId>> FindTag(VersionLists lists, absl::Span<const std::string> names,
                                                   const std::string& tag);

// Whether the run was taken back, or its weights replaced, on none of the daemons since they were asked for these versions: then
// those are one. `lists`: asked afterwards.
bool AreOfNow(VersionLists lists, absl::Span<const v1::TagVersionRequest> orders);

// What TagVersion is to ask of each daemon: the same step of all, with one mark. Without `request.version` that of the last step
// that one of them has closed, or so many steps later, for which the others wait. UNIMPLEMENTED: `version` has an id.
absl::StatusOr<std::vector<v1::TagVersionRequest>> OrdersOfTag(VersionLists lists, absl::Span<const std::string> names,
                                                               const v1::TagVersionRequest& request, uint64_t ahead);

// The answers as one.
v1::TagVersionResponse MergeTagged(absl::Span<const v1::TagVersionResponse> answers);

}  // namespace ballast
