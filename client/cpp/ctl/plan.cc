#include <algorithm>

#include "absl/strings/str_cat.h"
#include "absl/strings/str_join.h"

#include "client/cpp/ctl/command.h"
#include "client/cpp/ctl/plan_spec.h"
#include "client/cpp/ctl/run_text.h"
#include "client/cpp/ctl/table.h"

namespace ballast::ctl {
namespace {

// What a client keeps unless it is told otherwise.
uint64_t MostUnsent(const v1::RunSpec& spec, const v1::RunPlan& plan) {
  const uint64_t micros = std::max(1u, spec.accumulation());
  return std::min(plan.trainer_buffer_bytes() * micros, AttachOptions().gradient_buffer_bytes);
}

void Print(const v1::RunSpec& spec, const v1::RunPlan& plan, std::ostream& out) {
  out << Grouped(plan.parameters()) << " parameters in " << Grouped(plan.tensors()) << " tensors of "
      << spec.tensors(0).dtype() << ", rounding " << spec.groups(0).rounding() << "\n";
  for (const v1::GroupPlan& group : plan.groups()) {
    if (group.parameters() == 0) continue;
    out << "  " << Grouped(group.parameters()) << " with " << group.optimizer() << " (rule/master/state)\n";
  }
  out << "\n";
  Table table({Table::kLeft, Table::kLeft, Table::kRight, Table::kRight, Table::kRight});
  const auto row = [&](const char* where, const char* what, uint64_t bytes) {
    table.Row({where, what, Grouped(bytes), Bytes(bytes), PerParameter(bytes, plan.parameters())});
  };
  table.Row({"WHERE", "WHAT", "BYTES", "", "PER PARAMETER"});
  row("daemon", "weights", plan.server().weights());
  row("", "momentum", plan.server().momentum());
  row("", "variance", plan.server().variance());
  if (plan.server().averages() > 0) row("", "averages of the weights", plan.server().averages());
  row("", "stored", StoredBytes(plan.server()));
  row("", "gradients under way", plan.server().gradients());
  row("", "staging", plan.server().staging());
  if (plan.server().snapshots() > 0) row("", "snapshots, in host memory", plan.server().snapshots());
  if (plan.server().following() > 0)
    row("", "versions that readers follow, in host memory, at most", plan.server().following());
  row("", "client_state, at most", plan.server().client_state());
  row("", "total", TotalBytes(plan.server()));
  const uint64_t unsent = MostUnsent(spec, plan);
  row("trainer", "weights", plan.trainer_weight_bytes());
  row("", "unsent gradients, at most", unsent);
  row("", "total", plan.trainer_weight_bytes() + unsent);
  row("wire", "gradients, a step and rank", plan.wire_push_bytes());
  row("", "weights, a step and rank", plan.wire_pull_bytes());
  row("", "total", plan.wire_push_bytes() + plan.wire_pull_bytes());
  if (plan.journal_bytes() > 0) row("disk", "journal, a step", plan.journal_bytes());
  table.Print(out);
}

// Whether the daemon could reserve it now.
bool Fits(const v1::RunPlan& plan) { return !plan.devices().empty(); }

int PrintVerdict(const Invocation& invocation, const std::string& server, const v1::RunPlan& plan) {
  const uint64_t wanted = TotalBytes(plan.server());
  invocation.out << "\n"
                 << (Fits(plan) ? "fits: " : "does not fit: ") << Bytes(wanted) << " wanted, "
                 << Bytes(plan.memory_free_bytes()) << " free on " << server
                 << (Fits(plan) ? absl::StrCat(", would be on ", absl::StrJoin(plan.devices(), ", ")) : "") << "\n";
  return Fits(plan) ? kOk : kRefused;
}

int PrintPlan(const Invocation& invocation) {
  const auto spec = PlanSpec(invocation);
  if (!spec.ok()) return Misused(invocation.err, spec.status(), "plan");
  const auto client = Connect(invocation);
  if (!client.ok()) return Fail(invocation, client.status());
  const auto plan = (*client)->Plan(*spec);
  if (!plan.ok()) return Fail(invocation, plan.status());
  if (invocation.json) {
    const int printed = PrintJson(invocation, *plan);
    return printed == kOk && !Fits(*plan) ? kRefused : printed;
  }
  Print(*spec, *plan, invocation.out);
  return PrintVerdict(invocation, (*client)->server(), *plan);
}

}  // namespace

Command PlanCommand() {
  return {.name = "plan",
          .arguments = {},
          .summary = "the exact memory and traffic of a model, and whether it fits",
          .details =
              "The daemon computes it with what it reserves by; nothing is created. Exit code 1 when it does not fit.\n"
              "More and smaller tensors need less room for gradients under way.\n",
          .flags = PlanFlags(),
          .run = PrintPlan};
}

}  // namespace ballast::ctl
