// Which specs may take the place of a run's in the middle of it: proto/PROTOCOL.md, "AmendRun". A pure function;
// thread-safe.
#pragma once

#include "absl/status/status.h"

#include "ballast/v1/run.pb.h"

namespace ballast {

// Both are canonical and valid. INVALID_ARGUMENT names what may not change, how it differs, and what to write instead.
absl::Status CheckAmendment(const v1::RunSpec& existing, const v1::RunSpec& asked);

}  // namespace ballast
