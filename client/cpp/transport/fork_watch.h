// Forks of a process with connections. gRPC's threads do not live on in a fork, and its locks may be held there for good, so
// that whoever uses it waits without end.
#pragma once

#include <memory>

#include "absl/status/status.h"

namespace ballast {

// A connection of this process, while it lives.
class ForkWatch {
 public:
  ForkWatch();
  ~ForkWatch();
  ForkWatch(const ForkWatch&) = delete;
  ForkWatch& operator=(const ForkWatch&) = delete;
};

// FAILED_PRECONDITION with the fix in a fork of a process that had connections then. One that has closed them may be forked:
// the fork waits until gRPC has ended there.
absl::Status CheckNotForked();
// In a fork, what is the parent's: it is never destroyed there.
void KeepForGood(std::shared_ptr<const void> held);

}  // namespace ballast
