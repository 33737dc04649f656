// The norm of the open step that MeasureStep asked for, until it is in. Used with the interpreter's lock, which is free
// while it waits.
#pragma once

#include <nanobind/nanobind.h>

#include <future>
#include <optional>
#include <utility>

#include "absl/status/statusor.h"

#include "client/cpp/client.h"
#include "client/python/core/pending.h"

namespace ballast {

class PendingMeasure {
 public:
  explicit PendingMeasure(std::future<absl::StatusOr<MeasuredStep>> measured) : pending_(std::move(measured)) {}

  // "grad_norm", "nonfinite_tensors" and "measured", as in MeasuredStep, again at every call; None when they are not in
  // after `timeout_s`.
  std::optional<nanobind::dict> Wait(double timeout_s);

 private:
  Pending<MeasuredStep> pending_;
};

void BindPendingMeasure(nanobind::module_& module);

}  // namespace ballast
