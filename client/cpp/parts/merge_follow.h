// What readers get of a run on several daemons, of what each daemon says of its part. A pure function; thread-safe.
#pragma once

#include "absl/types/span.h"

#include "ballast/v1/follow.pb.h"
#include "ballast/v1/run.pb.h"

namespace ballast {

// Of parts whose spec has `follow`, by part. `newest`: of the part whose newest version is of the lowest step, in the run's
// generation as MergeGenerations has it and without an epoch; not there, where one has none. A reader counts once.
v1::FollowStatus MergeFollow(absl::Span<const v1::RunStatus> statuses);

}  // namespace ballast
