#include "client/python/core/pending_measure.h"

#include <nanobind/stl/optional.h>

#include <chrono>
#include <utility>

#include "client/python/core/status_error.h"

namespace ballast {

namespace nb = nanobind;

PendingMeasure::PendingMeasure(std::future<absl::StatusOr<MeasuredStep>> measured) : measured_(std::move(measured)) {}

std::optional<nb::dict> PendingMeasure::Wait(double timeout_s) {
  if (!arrived_) {
    nb::gil_scoped_release unlocked;
    if (measured_.wait_for(std::chrono::duration<double>(timeout_s)) == std::future_status::ready) {
      arrived_ = measured_.get();
    }
  }
  if (!arrived_) return std::nullopt;
  const MeasuredStep& measured = OrThrow(*arrived_);
  nb::dict out;
  out["grad_norm"] = measured.grad_norm;
  out["nonfinite_tensors"] = measured.nonfinite_tensors;
  out["measured"] = measured.measured;
  return out;
}

void BindPendingMeasure(nb::module_& module) {
  nb::class_<PendingMeasure>(module, "PendingMeasure").def("wait", &PendingMeasure::Wait, nb::arg("timeout_s"));
}

}  // namespace ballast
