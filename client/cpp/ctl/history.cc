#include "client/cpp/ctl/command.h"
#include "client/cpp/ctl/step_text.h"

namespace ballast::ctl {
namespace {

int PrintHistory(const Invocation& invocation) {
  const auto after = WholeNumber("--after", invocation.Get("after", "0"));
  if (!after.ok()) return Misused(invocation.err, after.status(), "history");
  const auto client = Connect(invocation);
  if (!client.ok()) return Fail(invocation, client.status());
  const auto history = (*client)->GetHistory(invocation.arguments[0], *after);
  if (!history.ok()) return Fail(invocation, history.status());
  if (invocation.json) return PrintJson(invocation, *history);
  PrintCsv(*history, invocation.out);
  return kOk;
}

}  // namespace

Command HistoryCommand() {
  return {.name = "history",
          .arguments = {"RUN"},
          .summary = "a run's last steps as CSV, or with --json as JSON",
          .details =
              "One row a step, the last 2,048 at most: outcome, loss, norms, times, what was found, and RMS_t of\n"
              "every layer with a tensor that is watched (spikes.rms_min_elements). After a rewind a step's number\n"
              "comes again.\n",
          .flags = {{"after", "STEP", "only later steps"}},
          .run = PrintHistory};
}

}  // namespace ballast::ctl
