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

// How long after the step before it each closed: all that a step waits for is in it, also before its begin and after its
// last update. By the index of the later one, less 1.
std::vector<double> CloseToClose(const v1::GetHistoryResponse& history) {
  std::vector<double> seconds;
  for (int i = 1; i < history.steps_size(); ++i) {
    seconds.push_back(std::max(history.steps(i).closed_at_s() - history.steps(i - 1).closed_at_s(), 0.0));
  }
  return seconds;
}

double Median(std::vector<double> seconds) {
  const auto middle = seconds.begin() + static_cast<ptrdiff_t>(seconds.size() / 2);
  std::nth_element(seconds.begin(), middle, seconds.end());
  return *middle;
}

// "" of the first that is remembered: what was before it is not known.
std::string HowLong(int index, const v1::GetHistoryResponse& history) {
  if (index == 0) return "";
  const std::vector<double> seconds = CloseToClose(history);
  const double took_s = seconds[static_cast<size_t>(index) - 1], median_s = Median(seconds);
  const std::string times = median_s > 0 ? absl::StrFormat(", %.2f times the median", took_s / median_s) : "";
  return absl::StrCat("it closed ", Duration(took_s), " after the step before it", times, " of the last ",
                      history.steps_size(), " steps; ");
}

void Explain(int index, const v1::GetHistoryResponse& history, std::ostream& out) {
  const v1::StepRecord& step = history.steps(index);
  const std::string why = step.reason().empty() ? "" : absl::StrCat(": ", step.reason());
  out << "step " << step.step() << " was " << OutcomeName(step.outcome()) << why << "\n";
  if (!step.detail().empty()) out << "  " << Visible(step.detail()) << "\n";
  out << HowLong(index, history) << "the longest of these: " << Slowest(step) << "\n";
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
  Explain(static_cast<int>(history->steps().rend() - step) - 1, *history, invocation.out);
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
