#include "server/spec/spike_text.h"

#include <cmath>

#include "absl/strings/str_cat.h"
#include "absl/strings/str_format.h"

#include "server/stability/spike_score.h"

namespace ballast {
namespace {

std::string Number(double value) { return absl::StrFormat("%.4g", value); }

std::string PlaceOfSpike(const SpikeEvent& event, const RunSpec& spec) {
  const std::string tensor = event.tensor ? absl::StrCat("tensor '", spec.tensors[*event.tensor].name, "'") : "";
  return event.layer ? absl::StrCat(spec.layers[*event.layer].name, " (", tensor, ")") : tensor;
}

// What the event means for the steps to come.
std::string Outlook(const SpikeEvent& e) {
  if (e.since != 0)
    return absl::StrCat("; a loss spike has been going on since step ", e.since, ", this tells of none");
  return absl::StrCat("; a loss spike may follow within ", SpikeScore::kMostLead, " steps");
}

std::string RmsText(const SpikeEvent& e, const RunSpec& spec) {
  return absl::StrCat("RMS_t of ", PlaceOfSpike(e, spec), " is ", Number(e.value), ", its limit ", Number(e.threshold),
                      ": the second moment lags behind the gradient", Outlook(e));
}
std::string CurvatureText(const SpikeEvent& e, const RunSpec& spec) {
  return absl::StrCat("the loss along the last update of ", PlaceOfSpike(e, spec), " curves ", Number(e.value),
                      " times as much as its step size bears", Outlook(e));
}
std::string NormText(const SpikeEvent& e, const RunSpec&) {
  return absl::StrCat("the gradient's norm is ", Number(e.value), ", expected was at most ", Number(e.threshold));
}
std::string NonfiniteText(const SpikeEvent& e, const RunSpec& spec) {
  if (e.value == 1) return absl::StrCat("the gradient of ", PlaceOfSpike(e, spec), " is not finite");
  return absl::StrCat("the gradients of ", Number(e.value), " tensors are not finite, the first ",
                      PlaceOfSpike(e, spec));
}
std::string LossText(const SpikeEvent& e, const RunSpec& spec) {
  const std::string of_rank = e.rank && spec.ranks > 1 ? absl::StrCat(" of rank ", *e.rank) : "";
  if (!std::isfinite(e.value)) return absl::StrCat("the loss", of_rank, " is not finite");
  return absl::StrCat("the loss spikes since step ", e.since, ", when it was ", Number(e.value),
                      " and expected was at most ", Number(e.threshold));
}

}  // namespace

std::string SpikeText(const SpikeEvent& event, const RunSpec& spec) {
  constexpr std::array<std::string (*)(const SpikeEvent&, const RunSpec&), kSpikeKinds> kTexts = {
      RmsText, CurvatureText, NormText, NonfiniteText, LossText};
  return kTexts[static_cast<size_t>(event.kind)](event, spec);
}

}  // namespace ballast
