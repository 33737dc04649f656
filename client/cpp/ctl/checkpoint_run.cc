#include <chrono>
#include <future>
#include <optional>
#include <string>
#include <vector>

#include "absl/strings/str_cat.h"
#include "absl/strings/str_join.h"

#include "client/cpp/ctl/command.h"
#include "client/cpp/ctl/run_text.h"
#include "client/cpp/ctl/table.h"

namespace ballast::ctl {
namespace {

constexpr std::chrono::seconds kBetweenLooks(2);

// Of the open step.
std::string WaitText(const v1::RunStatus& run) {
  std::vector<std::string> ranks;
  for (const v1::AwaitedRank& rank : run.awaited()) ranks.push_back(AwaitedText(rank));
  return absl::StrCat("waiting for step ", run.step() + 1, " to close: ", absl::StrJoin(ranks, "; "));
}

// Says to `err` what it waits for, where that takes long: once for each step.
absl::StatusOr<v1::CheckpointResponse> Write(Client& client, const std::string& run_id, std::ostream& err) {
  auto written = std::async(std::launch::async, [&] { return client.Checkpoint(run_id); });
  std::optional<uint64_t> told_after;  // which closed step
  while (written.wait_for(kBetweenLooks) != std::future_status::ready) {
    const auto run = client.GetRun(run_id);
    if (!run.ok() || run->status().awaited().empty() || told_after == run->status().step()) continue;
    err << Visible(WaitText(run->status())) << std::endl;
    told_after = run->status().step();
  }
  return written.get();
}

int CheckpointRun(const Invocation& invocation) {
  const auto client = Connect(invocation);
  if (!client.ok()) return Fail(invocation, client.status());
  const std::string& run_id = invocation.arguments[0];
  const auto written = Write(**client, run_id, invocation.err);
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
              "Training goes on meanwhile; a step that is open and has changed weights already is waited for, however\n"
              "long its trainers take, and is what is written. The daemon needs storage (storage.dir).\n",
          .flags = {},
          .run = CheckpointRun};
}

}  // namespace ballast::ctl
