// What a run remembers of its last steps, for the page, `ballastctl watch` and `explain`, and exports: one record a
// closed step, the oldest dropped.
//
// Thread-safe: the strand adds, others copy; the lock is held for a copy of what is asked for.
#pragma once

#include <cstdint>
#include <deque>
#include <optional>
#include <string>
#include <vector>

#include "absl/base/thread_annotations.h"
#include "absl/synchronization/mutex.h"

#include "server/stability/spikes.h"
#include "server/step/step_machine.h"

namespace ballast {

struct StepRecord {
  uint64_t step = 0;
  Outcome outcome = Outcome::kApplied;
  std::string reason, detail;  // why it was not applied
  double closed_at_s = 0;      // Unix time
  std::optional<double> loss = {};
  double learning_rate = 0;  // of the first group
  double grad_norm = 0;      // before clipping
  double clip_coefficient = 1;
  // Of all layers together: at steps with full statistics, else none.
  std::optional<double> edq_ratio = {}, unchanged_ratio = {};
  std::optional<double> curvature_ratio = {};   // of the layer where it is largest
  double seconds = 0;                           // StepBegin to the last update
  double receive_seconds = 0;                   // first gradient byte to last
  double update_seconds = 0;                    // the device was busy with updates
  double wait_seconds = 0;                      // from the last StepEnd but one to the last
  uint32_t last_rank = 0;                       // whose StepEnd was the last
  uint64_t received_bytes = 0, sent_bytes = 0;  // payload, since the step before closed
  std::vector<float> layer_rms = {};            // RMS_t by layer; NaN: none
  std::vector<SpikeEvent> spikes = {};
};

class RunHistory {
 public:
  static constexpr size_t kSteps = 2048;

  void Add(StepRecord record);
  // Those after step `after`, the newest `most` of them, oldest first.
  std::vector<StepRecord> Since(uint64_t after, size_t most) const;

 private:
  mutable absl::Mutex mu_;
  std::deque<StepRecord> records_ ABSL_GUARDED_BY(mu_);  // by the time they closed: a rewind may repeat a step
};

}  // namespace ballast
