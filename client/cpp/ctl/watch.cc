#include <chrono>
#include <string>
#include <thread>

#include "absl/strings/numbers.h"
#include "absl/strings/str_cat.h"

#include "client/cpp/ctl/command.h"
#include "client/cpp/ctl/step_text.h"
#include "client/cpp/ctl/table.h"

namespace ballast::ctl {
namespace {

constexpr uint32_t kAtFirst = 10;  // steps that are shown of those before

bool BeginsWith(const v1::GetHistoryResponse& history, const v1::StepRecord& step) {
  return !history.steps().empty() && history.steps(0).step() == step.step() &&
         history.steps(0).closed_at_s() == step.closed_at_s();
}

struct Look {
  v1::GetHistoryResponse history;
  bool rewound = false;
};

// The steps that have closed since `last`, which is a step's number and time, and perhaps earlier ones. The last one is
// asked for again: if it is no longer the same, the run was rewound, and all steps that are kept may be new.
absl::StatusOr<Look> LookAgain(Client& client, const std::string& run, const v1::StepRecord& last) {
  auto history = last.step() == 0 ? client.GetHistory(run, 0, kAtFirst) : client.GetHistory(run, last.step() - 1);
  const bool rewound = history.ok() && last.step() > 0 && !BeginsWith(*history, last);
  if (rewound) history = client.GetHistory(run);
  if (!history.ok()) return history.status();
  return Look{*std::move(history), rewound};
}

int Show(const Invocation& invocation, const v1::StepRecord& step) {
  if (invocation.json) return PrintJsonLine(invocation, step);
  invocation.out << WatchLine(step) << std::endl;
  for (const v1::SpikeEvent& event : step.spikes()) {
    invocation.out << "            " << Visible(event.text()) << std::endl;
  }
  return kOk;
}

int Watch(const Invocation& invocation, Client& client, double interval_s, uint64_t steps) {
  if (!invocation.json) invocation.out << WatchHead() << "\n";
  v1::StepRecord last;
  for (uint64_t shown = 0;;) {
    const auto look = LookAgain(client, invocation.arguments[0], last);
    if (!look.ok()) return Fail(invocation, look.status());
    // New steps are told by number, since the daemon's clock may be set back; only after a rewind by the clock.
    for (const v1::StepRecord& step : look->history.steps()) {
      if (look->rewound ? step.closed_at_s() <= last.closed_at_s() : step.step() <= last.step()) continue;
      last = step;
      if (const int printed = Show(invocation, step); printed != kOk) return printed;
      if (!invocation.out) return kRefused;  // nobody sees more; main says so
      if (++shown == steps) return kOk;
    }
    std::this_thread::sleep_for(std::chrono::duration<double>(interval_s));
  }
}

int WatchRun(const Invocation& invocation) {
  double interval_s = 1;
  const std::string interval = invocation.Get("interval", "1");
  if (!absl::SimpleAtod(interval, &interval_s) || !(interval_s >= 0.1 && interval_s <= 3600)) {
    const std::string what = absl::StrCat("--interval is '", interval, "'; wanted 0.1 to 3600 seconds");
    return Misused(invocation.err, absl::InvalidArgumentError(what), "watch");
  }
  const auto steps = WholeNumber("--steps", invocation.Get("steps", "0"));
  if (!steps.ok()) return Misused(invocation.err, steps.status(), "watch");
  const auto client = Connect(invocation);
  if (!client.ok()) return Fail(invocation, client.status());
  return Watch(invocation, **client, interval_s, *steps);
}

}  // namespace

Command WatchCommand() {
  return {.name = "watch",
          .arguments = {"RUN"},
          .summary = "follow a run, a line a step, until it is deleted or Ctrl-C",
          .details =
              "NORM is the gradient's before clipping, RMS the largest RMS_t of a tensor that is watched\n"
              "(spikes.rms_min_elements), FOUND why a step was not applied, and loss spikes or what tells of them.\n"
              "With --json each step is an object in a line of its own.\n",
          .flags = {{"interval", "SECONDS", "between looks; 1"}, {"steps", "N", "end after so many steps; 0: never"}},
          .run = WatchRun};
}

}  // namespace ballast::ctl
