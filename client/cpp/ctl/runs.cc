#include "absl/strings/str_cat.h"

#include "client/cpp/ctl/command.h"
#include "client/cpp/ctl/run_text.h"
#include "client/cpp/ctl/table.h"

namespace ballast::ctl {
namespace {

int PrintRuns(const Invocation& invocation) {
  const auto client = Connect(invocation);
  if (!client.ok()) return Fail(invocation, client.status());
  const auto runs = (*client)->ListRuns();
  if (!runs.ok()) return Fail(invocation, runs.status());
  if (invocation.json) return PrintJson(invocation, *runs);
  if (runs->runs().empty()) {
    invocation.out << "no runs on " << (*client)->server() << "\n";
    return kOk;
  }
  constexpr auto kWord = Table::kLeft, kFigure = Table::kRight;
  Table table({kWord, kWord, kFigure, kFigure, kFigure, kFigure, kFigure, kFigure, kWord});
  table.Row({"RUN", "STATE", "STEP", "LOSS", "GRAD NORM", "PARAMETERS", "MEMORY", "STORED", "OPTIMIZER"});
  for (const v1::RunStatus& run : runs->runs()) {
    table.Row({run.run_id(), StateText(run), absl::StrCat(run.step()), run.has_loss() ? Number(run.loss()) : "-",
               run.step() > 0 && !run.has_relay() ? Number(run.grad_norm()) : "-", Grouped(run.parameters()),
               Bytes(TotalBytes(run.bytes())),
               run.has_relay() ? "-" : PerParameter(StoredBytes(run.bytes()), run.parameters()), run.optimizer()});
  }
  table.Print(invocation.out);
  for (const v1::RunStatus& run : runs->runs()) {
    if (const std::string matter = MatterText(run); !matter.empty()) {
      invocation.out << Visible(absl::StrCat(run.run_id(), ": ", matter)) << "\n";
    }
  }
  return kOk;
}

}  // namespace

Command RunsCommand() {
  return {.name = "runs",
          .arguments = {},
          .summary = "all runs, one a line",
          .details = "A run with which something is the matter has a line with the reason below.\n",
          .flags = {},
          .run = PrintRuns};
}

}  // namespace ballast::ctl
