#include <algorithm>
#include <vector>

#include "absl/strings/numbers.h"
#include "absl/strings/str_cat.h"
#include "absl/strings/str_format.h"

#include "client/cpp/ctl/command.h"
#include "client/cpp/ctl/run_text.h"
#include "client/cpp/ctl/step_text.h"
#include "client/cpp/ctl/table.h"

namespace ballast::ctl {
namespace {

// The median time of the steps.
double MedianSeconds(const v1::GetHistoryResponse& history) {
  std::vector<double> seconds;
  for (const v1::StepRecord& step : history.steps()) seconds.push_back(step.seconds());
  const auto middle = seconds.begin() + static_cast<ptrdiff_t>(seconds.size() / 2);
  std::nth_element(seconds.begin(), middle, seconds.end());
  return *middle;
}

void Explain(const v1::StepRecord& step, const v1::GetHistoryResponse& history, std::ostream& out) {
  const std::string why = step.reason().empty() ? "" : absl::StrCat(": ", step.reason());
  out << "step " << step.step() << " was " << OutcomeName(step.outcome()) << why << "\n";
  if (!step.detail().empty()) out << "  " << Visible(step.detail()) << "\n";
  const double median_s = MedianSeconds(history);
  out << "it took " << Duration(step.seconds()) << ", " << absl::StrFormat("%.2f", step.seconds() / median_s)
      << " times the median of the last " << history.steps_size() << " steps; the most of it: " << Slowest(step)
      << "\n";
  PrintParts(step, out);
  if (step.clip_coefficient() < 1) {
    out << "the gradient's norm, " << Number(step.grad_norm()) << ", was clipped by " << Number(step.clip_coefficient())
        << "\n";
  }
  out << (step.spikes().empty() ? "nothing was found that tells of a loss spike\n" : "found:\n");
  for (const v1::SpikeEvent& event : step.spikes()) out << "  " << Visible(event.text()) << "\n";
}

int ExplainStep(const Invocation& invocation) {
  const auto number = WholeNumber("STEP", invocation.arguments[1]);
  if (!number.ok()) return Misused(invocation.err, number.status(), "explain");
  const auto client = Connect(invocation);
  if (!client.ok()) return Fail(invocation, client.status());
  const auto history = (*client)->GetHistory(invocation.arguments[0]);
  if (!history.ok()) return Fail(invocation, history.status());
  const auto step = std::find_if(history->steps().rbegin(), history->steps().rend(),
                                 [&](const v1::StepRecord& s) { return s.step() == *number; });
  if (step == history->steps().rend()) {
    const std::string kept = history->steps().empty()
                                 ? "none yet"
                                 : absl::StrCat(history->steps(0).step(), " to ", history->steps().rbegin()->step());
    return Fail(invocation,
                absl::NotFoundError(absl::StrCat("step ", *number, " is not among those remembered: ", kept)));
  }
  if (invocation.json) return PrintJson(invocation, *step);
  Explain(*step, *history, invocation.out);
  return kOk;
}

}  // namespace

Command ExplainCommand() {
  return {.name = "explain",
          .arguments = {"RUN", "STEP"},
          .summary = "why a step was slow, skipped or aborted",
          .details = "Of the last 2,048 steps; of one that was made anew after a rewind, the last time.\n",
          .flags = {},
          .run = ExplainStep};
}

}  // namespace ballast::ctl
