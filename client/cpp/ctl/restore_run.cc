#include "absl/strings/str_cat.h"

#include "client/cpp/ctl/command.h"

namespace ballast::ctl {
namespace {

absl::StatusOr<uint64_t> Step(const Invocation& invocation) {
  if (invocation.Has("step")) return WholeNumber("--step", invocation.Get("step", ""));
  if (invocation.Has("from")) return 0;  // the newest there
  return absl::InvalidArgumentError(absl::StrCat("restore wants --step N: `ballastctl checkpoints ",
                                                 invocation.arguments[0], "` tells which there are"));
}

int RestoreRun(const Invocation& invocation) {
  const auto step = Step(invocation);
  if (!step.ok()) return Misused(invocation.err, step.status(), "restore");
  const auto client = Connect(invocation);
  if (!client.ok()) return Fail(invocation, client.status());
  const std::string& run_id = invocation.arguments[0];
  if (!invocation.Has("from")) {
    if (auto s = CheckWhole(invocation, **client, run_id); !s.ok()) return Fail(invocation, s);
  }
  const auto restored = (*client)->Restore(run_id, *step, invocation.Get("from", ""));
  if (!restored.ok()) return Fail(invocation, restored.status());
  if (invocation.json) return PrintJson(invocation, *restored);
  invocation.out << "run '" << run_id << "' is back at step " << restored->step() << ", generation "
                 << restored->generation() << "; its trainers go on with step " << restored->step() + 1 << "\n";
  return kOk;
}

}  // namespace

Command RestoreCommand() {
  return {
      .name = "restore",
      .arguments = {"RUN"},
      .summary = "take a run back to a checkpoint on the daemon's disk",
      .details =
          "Weights, optimizer state and the trainers' client state become those of that step, to the bit. Trainers\n"
          "that are attached are told, and go on from there (ballast.RunRewound). Later checkpoints count no more;\n"
          "`ballastctl checkpoints` shows them as discarded.\n"
          "With --from DIR the checkpoint is one that was brought back to the daemon's machine: DIR is its folder, or "
          "a\n"
          "run's, beneath the daemon's storage.import_dir. All of it is checked before anything changes, it stays as "
          "it\n"
          "is, and a run that is not there is created; --step is then the newest there, unless it is given.\n",
      .flags = {{"step", "N", "of the checkpoint; `ballastctl checkpoints RUN` lists them"},
                {"from", "DIR", "on the daemon's machine: bring the checkpoint from there"}},
      .run = RestoreRun};
}

}  // namespace ballast::ctl
