// Tells threads that something has changed, whatever it is: they look again. Thread-safe.
//
//   const uint64_t seen = signal.count();
//   ...                                    // look at everything
//   signal.AwaitMore(seen, deadline);      // returns at once, where something has changed since
#pragma once

#include <cstdint>

#include "absl/base/thread_annotations.h"
#include "absl/synchronization/mutex.h"
#include "absl/time/time.h"

namespace ballast {

class ChangeSignal {
 public:
  void Notify() {
    absl::MutexLock lock(&mu_);
    ++count_;
  }
  uint64_t count() const {
    absl::MutexLock lock(&mu_);
    return count_;
  }
  // Whether something has changed before the deadline.
  bool AwaitMore(uint64_t seen, absl::Time deadline) const {
    absl::MutexLock lock(&mu_);
    const auto more = [this, seen]() ABSL_NO_THREAD_SAFETY_ANALYSIS { return count_ > seen; };
    return mu_.AwaitWithDeadline(absl::Condition(&more), deadline);
  }

 private:
  mutable absl::Mutex mu_;
  uint64_t count_ ABSL_GUARDED_BY(mu_) = 0;
};

}  // namespace ballast
