// What a run remembers of its last steps, for the page, `ballastctl watch` and `explain`, and exports: one record a
// closed step, the oldest dropped.
//
// Thread-safe: the strand adds, others copy; the lock is held for a copy of what is asked for.
#pragma once

#include <cstdint>
#include <deque>
#include <vector>

#include "absl/base/thread_annotations.h"
#include "absl/synchronization/mutex.h"

#include "server/step/step_record.h"

namespace ballast {

class RunHistory {
 public:
  static constexpr size_t kSteps = 2048;

  // Without not_applied, which may be as long as the list of tensors.
  void Add(StepRecord record);
  // Those after step `after`, the newest `most` of them, oldest first.
  std::vector<StepRecord> Since(uint64_t after, size_t most) const;

 private:
  mutable absl::Mutex mu_;
  std::deque<StepRecord> records_ ABSL_GUARDED_BY(mu_);  // by the time they closed: a rewind may repeat a step
};

}  // namespace ballast
