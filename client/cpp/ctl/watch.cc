#include <chrono>
#include <thread>

#include "absl/strings/numbers.h"

#include "client/cpp/ctl/command.h"
#include "client/cpp/ctl/step_text.h"

namespace ballast::ctl {
namespace {

constexpr uint32_t kAtFirst = 10;  // steps that are shown of those before

// Of a step, so that one that closes anew after a rewind is another.
double MomentOf(const v1::StepRecord& step) { return step.closed_at_s(); }

int Watch(const Invocation& invocation, Client& client, double interval_s, uint64_t steps) {
  invocation.out << WatchHead() << "\n";
  double last_s = 0;
  for (uint64_t shown = 0;;) {
    const auto history = client.GetHistory(invocation.arguments[0], 0, last_s == 0 ? kAtFirst : 0);
    if (!history.ok()) return Fail(invocation, history.status());
    for (const v1::StepRecord& step : history->steps()) {
      if (MomentOf(step) <= last_s) continue;
      last_s = MomentOf(step);
      invocation.out << WatchLine(step) << std::endl;
      for (const v1::SpikeEvent& event : step.spikes()) invocation.out << "            " << event.text() << std::endl;
      if (++shown == steps) return kOk;
    }
    std::this_thread::sleep_for(std::chrono::duration<double>(interval_s));
  }
}

int Run(const Invocation& invocation) {
  double interval_s = 1;
  uint64_t steps = 0;
  if (!absl::SimpleAtod(invocation.Get("interval", "1"), &interval_s) || !(interval_s >= 0.1 && interval_s <= 3600)) {
    invocation.err << "--interval wants 0.1 to 3600 seconds, got '" << invocation.Get("interval", "") << "'\n";
    return kUsage;
  }
  if (!absl::SimpleAtoi(invocation.Get("steps", "0"), &steps)) {
    invocation.err << "--steps wants a number, got '" << invocation.Get("steps", "") << "'\n";
    return kUsage;
  }
  const auto client = Connect(invocation);
  if (!client.ok()) return Fail(invocation, client.status());
  return Watch(invocation, **client, interval_s, steps);
}

}  // namespace

Command WatchCommand() {
  return {.name = "watch",
          .arguments = {"RUN"},
          .summary = "follow a run, a line a step, until it is deleted or Ctrl-C",
          .details =
              "NORM is the gradient's before clipping, RMS the largest RMS_t of a layer, FOUND why a step was not\n"
              "applied, and loss spikes or what tells of them.\n",
          .flags = {{"interval", "SECONDS", "between looks; 1"}, {"steps", "N", "end after so many steps"}},
          .run = Run};
}

}  // namespace ballast::ctl
