#include "absl/strings/str_cat.h"

#include "client/cpp/ctl/command.h"
#include "client/cpp/ctl/table.h"

namespace ballast::ctl {
namespace {

std::string FolderOfRun(const v1::StoredCheckpoint& stored) {
  return stored.folder().substr(0, stored.folder().rfind('/'));
}

int PrintCheckpoints(const Invocation& invocation) {
  const auto client = Connect(invocation);
  if (!client.ok()) return Fail(invocation, client.status());
  const std::string& run_id = invocation.arguments[0];
  const auto listed = (*client)->ListCheckpoints(run_id);
  if (!listed.ok()) return Fail(invocation, listed.status());
  if (invocation.json) return PrintJson(invocation, *listed);
  if (listed->checkpoints().empty()) {
    invocation.out << "run '" << run_id << "' has no checkpoint yet; `ballastctl checkpoint " << run_id
                   << "` writes one\n";
    return kOk;
  }
  Table table({Table::kRight, Table::kRight, Table::kLeft, Table::kRight, Table::kLeft});
  table.Row({"NUMBER", "STEP", "WRITTEN", "BYTES", "STATE"});
  for (const v1::StoredCheckpoint& stored : listed->checkpoints()) {
    table.Row({absl::StrCat(stored.number()), absl::StrCat(stored.step()),
               stored.written_at().empty() ? "-" : stored.written_at(), Bytes(stored.bytes()), stored.state()});
  }
  table.Print(invocation.out);
  const bool several = OfEachDaemon(invocation).size() > 1;
  invocation.out << "in " << FolderOfRun(listed->checkpoints(0)) << " on "
                 << (several ? "the first daemon's machine; bytes are of all daemons\n" : "the daemon's machine\n");
  return kOk;
}

}  // namespace

Command CheckpointsCommand() {
  return {.name = "checkpoints",
          .arguments = {"RUN"},
          .summary = "the checkpoints of a run on the daemon's disk, also of a run that is there alone",
          .details =
              "STATE is newest, which a daemon that starts reads back; kept; discarded: a rewind or a restore has\n"
              "undone its steps; or damaged, and how, as far as its manifest and the sizes of its files tell:\n"
              "`ballastctl verify` reads every byte. `ballastctl restore` goes back to one.\n",
          .flags = {},
          .run = PrintCheckpoints};
}

}  // namespace ballast::ctl
