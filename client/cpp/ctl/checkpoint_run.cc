#include "client/cpp/ctl/command.h"
#include "client/cpp/ctl/table.h"

namespace ballast::ctl {
namespace {

int CheckpointRun(const Invocation& invocation) {
  const auto client = Connect(invocation);
  if (!client.ok()) return Fail(invocation, client.status());
  const std::string& run_id = invocation.arguments[0];
  const auto written = (*client)->Checkpoint(run_id);
  if (!written.ok()) return Fail(invocation, written.status());
  if (invocation.json) return PrintJson(invocation, *written);
  invocation.out << "step " << written->step() << " of run '" << run_id << "' is durable: checkpoint "
                 << written->number() << ", " << Bytes(written->bytes()) << ", written in "
                 << Duration(written->seconds()) << " to " << written->folder() << " on the daemon's machine\n";
  return kOk;
}

}  // namespace

Command CheckpointCommand() {
  return {.name = "checkpoint",
          .arguments = {"RUN"},
          .summary = "write a run's last step to the daemon's disk; returns when it is there for good",
          .details =
              "Training goes on meanwhile; a step that is open and has changed weights already is waited for, and is\n"
              "what is written. The daemon needs storage (storage.dir).\n",
          .flags = {},
          .run = CheckpointRun};
}

}  // namespace ballast::ctl
