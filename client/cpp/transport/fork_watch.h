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
// What the call returns, a status or a StatusOr; in such a fork that error, and nothing is called.
template <typename Call>
auto UnlessForked(const Call& call) -> decltype(call()) {
  if (auto s = CheckNotForked(); !s.ok()) return s;
  return call();
}
// In a fork, what is the parent's: it is never destroyed there.
void KeepForGood(std::shared_ptr<const void> held);

}  // namespace ballast
