#include <algorithm>
#include <limits>

#include "absl/strings/str_cat.h"
#include "absl/strings/str_join.h"

#include "client/cpp/ctl/command.h"

namespace ballast::ctl {
namespace {

int List(const Invocation& invocation, Client& client) {
  const auto run = client.GetRun(invocation.arguments[0]);
  if (!run.ok()) return Fail(invocation, run.status());
  const v1::RunStatus& status = run->status();
  if (status.has_relay()) {
    return Fail(invocation,
                absl::FailedPreconditionError(absl::StrCat("run '", status.run_id(), "' is relayed here from ",
                                                           status.relay().upstream(), ": it is rewound there")));
  }
  if (invocation.json) return PrintJson(invocation, status);
  invocation.out << "run '" << status.run_id() << "' is at step " << status.step() << "; it can be rewound to "
                 << (status.snapshot_steps().empty()
                         ? "no step yet"
                         : absl::StrCat("step ", absl::StrJoin(status.snapshot_steps(), ", ")));
  if (!run->spec().has_rewind()) invocation.out << ": it was created without snapshots (RunSpec.rewind)";
  invocation.out << "\n";
  return kOk;
}

int Rewind(const Invocation& invocation, Client& client, const v1::RewindRequest& request) {
  if (auto s = CheckWhole(invocation, client, request.run_id()); !s.ok()) return Fail(invocation, s);
  const auto rewound = client.Rewind(request);
  if (!rewound.ok()) return Fail(invocation, rewound.status());
  if (invocation.json) return PrintJson(invocation, *rewound);
  invocation.out << "run '" << request.run_id() << "' is back at step " << rewound->step() << ", generation "
                 << rewound->generation() << "; its trainers go on with step " << rewound->step() + 1 << "\n";
  return kOk;
}

absl::StatusOr<v1::RewindRequest> Request(const Invocation& invocation) {
  v1::RewindRequest request;
  request.set_run_id(invocation.arguments[0]);
  if (invocation.Has("to") && invocation.Has("back")) {
    return absl::InvalidArgumentError("rewind wants --to or --back, not both");
  }
  if (invocation.Has("to")) {
    const auto step = WholeNumber("--to", invocation.Get("to", ""));
    if (!step.ok()) return step.status();
    request.set_to_step(*step);
  }
  if (invocation.Has("back")) {
    const auto steps = WholeNumber("--back", invocation.Get("back", ""));
    if (!steps.ok()) return steps.status();
    constexpr uint64_t kMost = std::numeric_limits<uint32_t>::max();
    request.set_steps_back(static_cast<uint32_t>(std::min(*steps, kMost)));
  }
  return request;
}

int RewindRun(const Invocation& invocation) {
  const auto request = Request(invocation);
  if (!request.ok()) return Misused(invocation.err, request.status(), "rewind");
  const auto client = Connect(invocation);
  if (!client.ok()) return Fail(invocation, client.status());
  const bool lists = request->target_case() == v1::RewindRequest::TARGET_NOT_SET;
  return lists ? List(invocation, **client) : Rewind(invocation, **client, *request);
}

}  // namespace

Command RewindCommand() {
  return {
      .name = "rewind",
      .arguments = {"RUN"},
      .summary = "take a run back to a snapshot; without flags: to which steps it can go",
      .details =
          "Weights, optimizer state and the trainers' client state become those of that step, to the bit. Trainers\n"
          "that are attached are told, and go on from there (ballast.RunRewound). Later snapshots are dropped.\n",
      .flags = {{"to", "STEP", "to this step"},
                {"back", "N", "to N steps before the last one, or the nearest snapshot before that"}},
      .run = RewindRun};
}

}  // namespace ballast::ctl
