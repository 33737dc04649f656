#include "client/python/core/pending_measure.h"

#include <nanobind/stl/optional.h>

namespace ballast {

namespace nb = nanobind;

std::optional<nb::dict> PendingMeasure::Wait(double timeout_s) {
  const MeasuredStep* const measured = pending_.Wait(timeout_s);
  if (measured == nullptr) return std::nullopt;
  nb::dict out;
  out["grad_norm"] = measured->grad_norm;
  out["nonfinite_tensors"] = measured->nonfinite_tensors;
  out["measured"] = measured->measured;
  return out;
}

void BindPendingMeasure(nb::module_& module) {
  nb::class_<PendingMeasure>(module, "PendingMeasure").def("wait", &PendingMeasure::Wait, nb::arg("timeout_s"));
}

}  // namespace ballast
