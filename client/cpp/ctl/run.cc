#include <optional>

#include "absl/strings/str_cat.h"
#include "absl/strings/str_join.h"

#include "client/cpp/ctl/command.h"
#include "client/cpp/ctl/run_text.h"
#include "client/cpp/ctl/table.h"

namespace ballast::ctl {
namespace {

std::string RmsText(const v1::RunStatus& run) {
  if (run.has_rms_ratio_max()) return absl::StrCat(Number(run.rms_ratio_max()), " (highest of all tensors)");
  if (run.step_seconds() > 0) return "none: the rule has no second moment";
  return "not known: no step was made since the run was read from the disk or went back to this one";
}

// A rewind takes the step back, and not what was made.
std::string StepsText(const v1::RunStatus& run) {
  const uint64_t made = run.steps_applied() + run.steps_skipped() + run.steps_partial() + run.steps_aborted();
  return absl::StrCat(run.step(), made == run.step() ? " closed: " : " now; of all made, those since undone too: ",
                      run.steps_applied(), " applied, ", run.steps_skipped(), " skipped, ", run.steps_partial(),
                      " partial, ", run.steps_aborted(), " aborted");
}

void PrintProgress(const v1::RunStatus& run, const v1::RunSpec& spec, std::ostream& out) {
  Table table({Table::kLeft, Table::kLeft});
  table.Row({"run", absl::StrCat(run.run_id(), ", ", StateText(run))});
  if (!run.failure().empty()) table.Row({run.state() == v1::RUN_STATE_FAILED ? "lost" : "stopped", run.failure()});
  table.Row({"device", absl::StrJoin(run.plan().devices(), ", ")});
  table.Row({"optimizer", run.optimizer()});
  const std::string took =
      run.step_seconds() > 0 ? absl::StrCat(", the last one took ", Duration(run.step_seconds())) : "";
  table.Row({"steps", StepsText(run) + took});
  if (run.has_last_result()) {
    const v1::StepResult& last = run.last_result();
    const std::string reason = last.reason().empty() ? "" : absl::StrCat(" (", last.reason(), ")");
    const std::string detail = last.detail().empty() ? "" : absl::StrCat(": ", last.detail());
    table.Row({"last step", absl::StrCat(last.step(), " ", OutcomeName(last.outcome()), reason, detail)});
  }
  for (const v1::AwaitedRank& rank : run.awaited()) {
    const bool first = &rank == &run.awaited(0);
    table.Row({first ? absl::StrCat("step ", run.step() + 1, " awaits") : "", AwaitedText(rank)});
  }
  if (spec.has_rewind()) {
    const std::string kept = run.snapshot_steps().empty() ? "none yet" : absl::StrJoin(run.snapshot_steps(), ", ");
    table.Row({"snapshots", absl::StrCat(kept, "; rewound ", run.rewinds(), " times")});
  }
  if (run.has_durability()) {
    table.Row({"durable", DurabilityText(run.durability())});
    if (!run.durability().restored().empty()) table.Row({"read back", run.durability().restored()});
  }
  if (run.has_follow()) table.Row({"followers", FollowText(run.follow())});
  if (!spec.follow().formats().empty()) {
    table.Row({"in formats", absl::StrCat("as served, ", absl::StrJoin(spec.follow().formats(), ", "))});
  }
  if (run.follow().tags() > 0) {
    table.Row({"names", absl::StrCat(run.follow().tags(), " versions, ", Bytes(run.follow().tag_bytes()))});
  }
  table.Row({"loss", run.has_loss() ? Number(run.loss()) : "not told by the trainer"});
  if (run.step() > 0) {
    table.Row({"gradient norm", Number(run.grad_norm())});
    table.Row({"update RMS", RmsText(run)});
  }
  table.Row({"ranks", run.ranks().empty() ? "none attached" : absl::StrJoin(run.ranks(), "; ")});
  table.Row({"traffic", absl::StrCat(Bytes(run.received_bytes()), " received, ", Bytes(run.sent_bytes()), " sent")});
  table.Print(out);
}

// What is known here of a run that trains elsewhere.
void PrintRelayed(const v1::RunStatus& run, std::ostream& out) {
  Table table({Table::kLeft, Table::kLeft});
  table.Row({"run", absl::StrCat(run.run_id(), ", ", StateText(run))});
  table.Row({"from", RelayText(run.relay())});
  table.Row({"followers", FollowText(run.follow())});
  table.Row({"memory", absl::StrCat(Bytes(run.bytes().following()), " at most, for versions and messages")});
  table.Print(out);
}

void PrintMemory(const v1::RunStatus& run, const v1::RunSpec& spec, std::ostream& out) {
  Table table({Table::kLeft, Table::kRight, Table::kRight});
  const auto row = [&](const std::string& kind, uint64_t bytes) {
    table.Row({kind, Bytes(bytes), PerParameter(bytes, run.parameters())});
  };
  table.Row({"MEMORY", "BYTES", "PER PARAMETER"});
  row("weights", run.bytes().weights());
  row("momentum", run.bytes().momentum());
  row("variance", run.bytes().variance());
  if (run.bytes().averages() > 0) {
    row(absl::StrCat("averages of the weights, ", absl::StrJoin(spec.averages(), ", ")), run.bytes().averages());
  }
  row("stored", StoredBytes(run.bytes()));
  row("gradients under way", run.bytes().gradients());
  row("staging", run.bytes().staging());
  if (run.bytes().snapshots() > 0) row("snapshots, in host memory", run.bytes().snapshots());
  row("client_state, at most", run.bytes().client_state());
  if (run.bytes().following() > 0) row("versions that readers follow, at most", run.bytes().following());
  row("total", TotalBytes(run.bytes()));
  out << "\n" << Grouped(run.parameters()) << " parameters, counted from the live allocations\n";
  table.Print(out);
}

void PrintLayers(const v1::RunStatus& run, std::ostream& out) {
  if (run.layers().empty()) return;
  Table table({Table::kLeft, Table::kRight, Table::kRight, Table::kRight, Table::kRight, Table::kRight});
  table.Row({"LAYER", "UPDATE RMS", "GRADIENT NORM", "UPDATE/WEIGHT", "EDQ", "UNCHANGED"});
  for (const v1::LayerStatistics& layer : run.layers()) {
    table.Row({layer.layer(), layer.has_rms_ratio() ? Number(layer.rms_ratio()) : "-", Number(layer.gradient_norm()),
               Number(layer.update_to_weight_ratio()), Number(layer.edq_ratio()), Number(layer.unchanged_ratio())});
  }
  out << "\n";
  table.Print(out);
}

// Of a relay that has not been told of the run yet: why not. Its GetRun has readers wait. None: any other case.
std::optional<v1::GetRunResponse> NotToldOf(Client& client, const std::string& run_id) {
  const auto server = client.GetServer();
  if (!server.ok() || !server->has_relay()) return std::nullopt;
  const auto runs = client.ListRuns();
  if (!runs.ok()) return std::nullopt;
  for (const v1::RunStatus& run : runs->runs()) {
    if (run.run_id() != run_id || run.relay().connected() || run.has_follow()) continue;
    v1::GetRunResponse answer;
    *answer.mutable_status() = run;
    return answer;
  }
  return std::nullopt;
}

int PrintRun(const Invocation& invocation) {
  const auto client = Connect(invocation);
  if (!client.ok()) return Fail(invocation, client.status());
  const std::string& run_id = invocation.arguments[0];
  const auto not_told_of = NotToldOf(**client, run_id);
  const absl::StatusOr<v1::GetRunResponse> run = not_told_of ? *not_told_of : (*client)->GetRun(run_id);
  if (!run.ok()) return Fail(invocation, run.status());
  if (invocation.json) return PrintJson(invocation, *run);
  if (run->status().has_relay()) {
    PrintRelayed(run->status(), invocation.out);
    return kOk;
  }
  PrintProgress(run->status(), run->spec(), invocation.out);
  PrintMemory(run->status(), run->spec(), invocation.out);
  PrintLayers(run->status(), invocation.out);
  return kOk;
}

}  // namespace

Command RunCommand() {
  return {.name = "run",
          .arguments = {"RUN"},
          .summary = "one run: progress, memory, layers, ranks",
          .details =
              "UPDATE RMS is the highest RMS of a tensor's update in the layer, UPDATE/WEIGHT the norm of the wanted\n"
              "update over that of the weights, EDQ the share of the update that the stored weights took up,\n"
              "UNCHANGED the share of weights whose stored bits stayed the same; the last three are of the last\n"
              "step with full statistics.\n",
          .flags = {},
          .run = PrintRun};
}

}  // namespace ballast::ctl
