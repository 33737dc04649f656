#include "client/python/core/pending_step.h"

#include <nanobind/stl/optional.h>
#include <nanobind/stl/vector.h>

#include "client/python/core/message.h"

namespace ballast {
namespace {

namespace nb = nanobind;

nb::dict DescribeStep(const StepResult& result) {
  nb::dict timing;
  timing["pushed_bytes"] = result.timing.pushed_bytes;
  timing["pulled_bytes"] = result.timing.pulled_bytes;
  timing["pushed_bytes_in_backward"] = result.timing.pushed_bytes_in_backward;
  timing["pulled_bytes_in_backward"] = result.timing.pulled_bytes_in_backward;
  timing["buffered_bytes_most"] = result.timing.buffered_bytes_most;
  timing["backward_s"] = result.timing.backward_s;
  timing["wait_s"] = result.timing.wait_s;
  nb::dict out = ToDict(result.result);
  out["timing"] = timing;
  out["tensors_received"] = result.received;
  return out;
}

}  // namespace

std::optional<nb::dict> PendingStep::Wait(double timeout_s) {
  const StepResult* const result = pending_.Wait(timeout_s);
  return result == nullptr ? std::nullopt : std::optional(DescribeStep(*result));
}

void BindPendingStep(nb::module_& module) {
  nb::class_<PendingStep>(module, "PendingStep").def("wait", &PendingStep::Wait, nb::arg("timeout_s"));
}

}  // namespace ballast
