#include "client/cpp/ctl/command.h"
#include "client/cpp/ctl/table.h"

namespace ballast::ctl {
namespace {

int DeleteRun(const Invocation& invocation) {
  const auto client = Connect(invocation);
  if (!client.ok()) return Fail(invocation, client.status());
  const std::string& run_id = invocation.arguments[0];
  const auto deleted = (*client)->DeleteRun(run_id, invocation.Has("force"), invocation.Has("keep-checkpoints"));
  if (!deleted.ok()) return Fail(invocation, deleted.status());
  if (invocation.json) return PrintJson(invocation, *deleted);
  invocation.out << "deleted run '" << run_id << "', freed " << Bytes(deleted->freed_bytes()) << "\n";
  return kOk;
}

}  // namespace

Command DeleteCommand() {
  return {
      .name = "delete",
      .arguments = {"RUN"},
      .summary = "delete a run and free its memory",
      .details =
          "Its weights and optimizer state are gone for good, and so are its checkpoints, unless they are kept.\n",
      .flags = {{"force", "", "also when a trainer is attached, whose session ends; or of one part of the run alone"},
                {"keep-checkpoints", "", "leave them on the daemon's disk; `ballastctl restore` brings the run back"}},
      .run = DeleteRun};
}

}  // namespace ballast::ctl
