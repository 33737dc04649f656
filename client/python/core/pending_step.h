// The step that EndStep closed, until its result is in. Used with the interpreter's lock, which is free while it waits.
#pragma once

#include <nanobind/nanobind.h>

#include <future>
#include <optional>
#include <utility>

#include "absl/status/statusor.h"

#include "client/cpp/client.h"
#include "client/python/core/pending.h"

namespace ballast {

class PendingStep {
 public:
  explicit PendingStep(std::future<absl::StatusOr<StepResult>> result) : pending_(std::move(result)) {}

  // The result, again at every call; None when it is not in after `timeout_s`. The fields of v1::StepResult, "timing",
  // and "tensors_received".
  std::optional<nanobind::dict> Wait(double timeout_s);

 private:
  Pending<StepResult> pending_;
};

void BindPendingStep(nanobind::module_& module);

}  // namespace ballast
