// States of a run that its daemons can go back to: snapshots, and checkpoints on their disks.
#include <algorithm>
#include <limits>
#include <set>
#include <utility>

#include "absl/strings/match.h"
#include "absl/strings/str_cat.h"
#include "absl/strings/str_join.h"

#include "client/cpp/parts/for_all.h"
#include "client/cpp/parts/merge.h"
#include "client/cpp/parts/parts_client.h"
#include "client/cpp/parts/step_of_all.h"

namespace ballast {
namespace {

// A run whose checkpoint is asked for while it trains: the daemons may close a step in between.
constexpr int kCheckpointTries = 20;

// Of RewindResponse and RestoreResponse: all went to the same step.
template <typename Answer>
Answer MergedBack(const std::vector<Answer>& answers) {
  std::vector<uint64_t> generations;
  for (const Answer& answer : answers) generations.push_back(answer.generation());
  Answer whole = answers.front();
  whole.set_generation(MergeGenerations(generations));
  return whole;
}

}  // namespace

absl::StatusOr<v1::RewindResponse> PartsClient::Rewind(const v1::RewindRequest& request) {
  const auto run = GetRun(request.run_id());
  if (!run.ok()) return run.status();
  const auto& kept = run->status().snapshot_steps();
  const uint64_t back = request.target_case() == v1::RewindRequest::kStepsBack ? request.steps_back() : 0;
  const uint64_t most = run->status().step() - std::min(run->status().step(), back);
  std::optional<uint64_t> target;
  for (const uint64_t step : kept) {
    const bool fits = request.target_case() == v1::RewindRequest::kToStep ? step == request.to_step() : step <= most;
    if (fits) target = step;
  }
  if (!target) {
    return absl::FailedPreconditionError(absl::StrCat(
        "run '", request.run_id(), "' cannot be rewound so: the snapshots that all of its daemons have are ",
        kept.empty() ? "none" : absl::StrCat("of steps ", absl::StrJoin(kept, ", "))));
  }
  v1::RewindRequest to_step = request;
  to_step.set_to_step(*target);
  auto rewound = AskAll<v1::RewindResponse>([&](uint32_t, DaemonClient& daemon) { return daemon.Rewind(to_step); });
  if (!rewound.ok()) return rewound.status();
  return MergedBack(*rewound);
}

absl::Status PartsClient::CheckAllHave(const std::string& run_id, uint64_t step) {
  const auto stored = AskAll<v1::ListCheckpointsResponse>(
      [&](uint32_t, DaemonClient& daemon) { return daemon.ListCheckpoints(run_id); });
  if (!stored.ok()) return stored.status();
  for (uint32_t part = 0; part < parts(); ++part) {
    const auto& there = (*stored)[part].checkpoints();
    const auto is = [&](const v1::StoredCheckpoint& one) {
      return one.step() == step && !absl::StartsWith(one.state(), "damaged");
    };
    if (std::any_of(there.begin(), there.end(), is)) continue;
    return absl::FailedPreconditionError(
        absl::StrCat(names_[part], " has no checkpoint of step ", step, " of run '", run_id,
                     "', and nothing was changed: restore it to a step of which all of its daemons have one"));
  }
  return absl::OkStatus();
}

absl::StatusOr<v1::RestoreResponse> PartsClient::Restore(const std::string& run_id, uint64_t step,
                                                         const std::string& from) {
  if (step == 0) {
    return absl::InvalidArgumentError(
        "Restore of a run on several daemons: name the step, which must be the same on all of them");
  }
  // One that lacks it would refuse what the others have done by then, and the run would be at two steps.
  if (auto s = from.empty() ? CheckAllHave(run_id, step) : absl::OkStatus(); !s.ok()) return s;
  auto restored =
      AskAll<v1::RestoreResponse>([&](uint32_t, DaemonClient& daemon) { return daemon.Restore(run_id, step, from); });
  if (!restored.ok()) return restored.status();
  return MergedBack(*restored);
}

absl::StatusOr<v1::CheckpointResponse> PartsClient::Checkpoint(const std::string& run_id) {
  for (int i = 0; i < kCheckpointTries; ++i) {
    auto written =
        AskAll<v1::CheckpointResponse>([&](uint32_t, DaemonClient& daemon) { return daemon.Checkpoint(run_id); });
    if (!written.ok()) return written.status();
    v1::CheckpointResponse whole = written->front();
    bool same = true;
    whole.set_bytes(0);
    for (const v1::CheckpointResponse& part : *written) {
      same = same && part.step() == whole.step();
      whole.set_bytes(whole.bytes() + part.bytes());
      whole.set_seconds(std::max(whole.seconds(), part.seconds()));
    }
    if (same) return whole;
  }
  return absl::UnavailableError(absl::StrCat(
      "run '", run_id, "' makes steps so fast that its daemons have not written the same one ", kCheckpointTries,
      " times: have it written by steps (RunSpec.checkpoint.every_steps), or between two steps of its trainers"));
}

absl::StatusOr<v1::ListCheckpointsResponse> PartsClient::ListCheckpoints(const std::string& run_id) {
  auto lists = AskAll<v1::ListCheckpointsResponse>(
      [&](uint32_t, DaemonClient& daemon) { return daemon.ListCheckpoints(run_id); });
  if (!lists.ok()) return lists.status();
  return MergeCheckpoints(*lists, names_);
}

// Daemons that come back at different steps go back to a checkpoint that all have; with journals, all are at the last step that
// a trainer has the result of, or at the next.
uint64_t PartsClient::DurableStep(const v1::RunSpec& spec, absl::Span<const v1::RunStatus> statuses) {
  std::set<uint64_t> steps;
  bool journaled = spec.checkpoint().durability() == v1::DURABILITY_MODE_JOURNAL_SYNC;
  for (const v1::RunStatus& status : statuses) {
    steps.insert(status.durability().durable_step());
    journaled = journaled && status.durability().journal_failure().empty();
  }
  const bool same = spec.checkpoint().durability() == v1::DURABILITY_MODE_CHECKPOINT && steps.size() == 1;
  if (journaled || same) return *steps.begin();
  std::vector<std::set<uint64_t>> kept(parts());
  for (uint32_t part = 0; part < parts(); ++part) {
    if (auto stored = CheckpointsOf(part, spec.run_id()); stored.ok()) kept[part] = *std::move(stored);
  }
  return LastCommonStep(kept, std::numeric_limits<uint64_t>::max()).value_or(0);
}

absl::StatusOr<std::set<uint64_t>> PartsClient::CheckpointsOf(uint32_t part, const std::string& run_id) {
  const auto stored = daemons_[part]->ListCheckpoints(run_id);
  if (!stored.ok()) return NamedBy(names_[part], stored.status());
  std::set<uint64_t> steps;
  for (const v1::StoredCheckpoint& checkpoint : stored->checkpoints()) {
    if (checkpoint.state() == "newest" || checkpoint.state() == "kept") steps.insert(checkpoint.step());
  }
  return steps;
}

}  // namespace ballast
