// What a device answers, brought to a run's strand: answers that come while an earlier one is still on its way go with it,
// so that many small tasks cost the strand one turn.
//
//   Completions completions(strand);
//   queue->Submit(task, completions.OnStrand([](const TaskResult&) {...}));
//
// Thread-safe. What it hands out may outlive it.
#pragma once

#include <memory>

#include "absl/functional/any_invocable.h"

#include "server/base/strand.h"
#include "server/device/device.h"

namespace ballast {

class Completions {
 public:
  using Done = absl::AnyInvocable<void(const TaskResult&)>;

  // The strand outlives all that is handed out.
  explicit Completions(Strand* strand);

  // For the device: has `done` run on the strand, after what came before it. Where the device drops it, `done` is dropped.
  DeviceQueue::Completion OnStrand(Done done);
  // Has the task run on the strand. It is awaited, too.
  void Post(Strand::Task task);
  // Whether something has neither run nor been dropped.
  bool awaited() const { return arrivals_.use_count() > 1; }

 private:
  struct Answer;
  class Arrivals;
  const std::shared_ptr<Arrivals> arrivals_;  // held by each that is awaited
};

}  // namespace ballast
