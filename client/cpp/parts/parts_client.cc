#include "client/cpp/parts/parts_client.h"

#include <algorithm>
#include <numeric>
#include <set>
#include <utility>

#include "absl/strings/match.h"
#include "absl/strings/str_cat.h"
#include "absl/strings/str_join.h"

#include "client/cpp/parts/for_all.h"
#include "client/cpp/parts/merge.h"

namespace ballast {
namespace {

absl::Status PartIsLost(const std::string& run_id, const std::string& daemon, const std::string& other, uint64_t step) {
  return absl::FailedPreconditionError(
      absl::StrCat("the daemon at ", daemon, " does not have its part of run '", run_id, "' any more, and the one at ",
                   other, " has closed step ", step,
                   ": bring a checkpoint of it back there (ballastctl restore with --from, to that daemon alone), or "
                   "delete the run on all and begin with weights that you have"));
}

// While nobody trains: between two steps of trainers daemons may differ for a moment.
void TellSteps(absl::Span<const v1::RunStatus> statuses, absl::Span<const std::string> names, v1::RunStatus* whole) {
  bool same = true, trained = false;
  std::vector<std::string> each;
  for (size_t part = 0; part < statuses.size(); ++part) {
    same = same && statuses[part].step() == statuses[0].step();
    trained = trained || !statuses[part].ranks().empty();
    each.push_back(absl::StrCat(names[part], " at ", statuses[part].step()));
  }
  if (same || trained || !whole->failure().empty()) return;
  whole->set_failure(absl::StrCat("its daemons are at different steps, ", absl::StrJoin(each, ", "),
                                  ": its trainers bring them to one that all have, when they attach"));
}

}  // namespace

absl::StatusOr<std::unique_ptr<Client>> PartsClient::Connect(ClientOptions options, std::vector<std::string> servers) {
  auto daemons = AllOrError(ForAll(static_cast<uint32_t>(servers.size()),
                                   [&](uint32_t part) {
                                     ClientOptions own = options;
                                     own.server = servers[part];
                                     return DaemonClient::Connect(std::move(own));
                                   }),
                            servers);
  if (!daemons.ok()) return daemons.status();
  return std::unique_ptr<Client>(new PartsClient(std::move(options), std::move(servers), *std::move(daemons)));
}

PartsClient::PartsClient(ClientOptions options, std::vector<std::string> servers,
                         std::vector<std::unique_ptr<DaemonClient>> daemons)
    : options_(std::move(options)),
      names_(std::move(servers)),
      daemons_(std::move(daemons)),
      held_(names_.size()),
      worker_([this] { Work(); }) {}

PartsClient::~PartsClient() {
  {
    absl::MutexLock lock(&mu_);
    leaving_ = true;
  }
  worker_.join();
  // Side by side, since each may say goodbye for a second.
  ForAll(parts(), [this](uint32_t part) {
    daemons_[part]->Detach();
    return 0;
  });
}

const std::string& PartsClient::server() const { return options_.server; }

// --- what is there ---------------------------------------------------------------------------------------------------

absl::StatusOr<std::vector<v1::GetRunResponse>> PartsClient::AskRuns(const std::string& run_id) const {
  auto runs = ForAll(parts(), [&](uint32_t part) { return daemons_[part]->GetRun(run_id); });
  if (auto s = CheckNoneLost(run_id, runs); !s.ok()) return s;
  return AllOrError(std::move(runs), names_);
}

absl::Status PartsClient::CheckNoneLost(const std::string& run_id,
                                        absl::Span<const absl::StatusOr<v1::GetRunResponse>> runs) const {
  const auto has = [](const absl::StatusOr<v1::GetRunResponse>& run) { return run.ok() && run->status().step() > 0; };
  const auto other = std::find_if(runs.begin(), runs.end(), has);
  if (other == runs.end()) return absl::OkStatus();
  for (uint32_t part = 0; part < parts(); ++part) {
    if (!absl::IsNotFound(runs[part].status())) continue;
    const auto stored = daemons_[part]->ListCheckpoints(run_id);
    if (stored.ok() && !stored->checkpoints().empty()) continue;  // whoever attaches has it read back
    return PartIsLost(run_id, names_[part], names_[static_cast<size_t>(other - runs.begin())],
                      (*other)->status().step());
  }
  return absl::OkStatus();
}

absl::StatusOr<PartsClient::Whole> PartsClient::TakeWhole(std::vector<v1::GetRunResponse>* runs) {
  std::vector<v1::RunSpec> specs;
  for (v1::GetRunResponse& run : *runs) specs.push_back(std::move(*run.mutable_spec()));
  auto placement = PartPlacement::OfParts(specs);
  if (!placement.ok()) return placement.status();
  v1::RunSpec spec = placement->WholeOf(specs);
  StepLimits limits(spec);
  return Whole{.run_id = spec.run_id(),
               .placement = *std::move(placement),
               .spec = std::move(spec),
               .limits = std::move(limits)};
}

absl::StatusOr<PartsClient::Whole> PartsClient::Look(const std::string& run_id) const {
  auto runs = AskRuns(run_id);
  return runs.ok() ? TakeWhole(&*runs) : runs.status();
}

absl::StatusOr<v1::GetServerResponse> PartsClient::GetServer() {
  auto servers = AskAll<v1::GetServerResponse>([](uint32_t, DaemonClient& daemon) { return daemon.GetServer(); });
  if (!servers.ok()) return servers.status();
  return MergeServers(*servers, names_);
}

absl::StatusOr<v1::GetRunResponse> PartsClient::GetRun(const std::string& run_id) {
  auto runs = AskRuns(run_id);
  if (!runs.ok()) return runs.status();
  auto whole = TakeWhole(&*runs);
  if (!whole.ok()) return whole.status();
  std::vector<v1::RunStatus> statuses;
  std::vector<std::string> hashes;
  for (const v1::GetRunResponse& run : *runs) {
    statuses.push_back(run.status());
    hashes.push_back(run.spec_sha256());
  }
  v1::GetRunResponse merged;
  *merged.mutable_status() = MergeStatuses(statuses, whole->placement, whole->staged());
  TellSteps(statuses, names_, merged.mutable_status());
  if (merged.status().has_durability()) {
    const uint64_t durable = DurableStep(whole->spec, statuses);
    merged.mutable_status()->mutable_durability()->set_durable_step(durable);
    if (merged.status().has_last_result()) {
      v1::StepResult* const last = merged.mutable_status()->mutable_last_result();
      last->set_durable_step(std::min(durable, last->step()));
    }
  }
  *merged.mutable_spec() = std::move(whole->spec);
  merged.set_spec_sha256(absl::StrJoin(hashes, ","));
  return merged;
}

// Runs of which each daemon has a part are one; others are as their daemon has them. Where a part is lost, the first of those
// that are left says so.
absl::StatusOr<v1::ListRunsResponse> PartsClient::ListRuns() {
  auto lists = AskAll<v1::ListRunsResponse>([](uint32_t, DaemonClient& daemon) { return daemon.ListRuns(); });
  if (!lists.ok()) return lists.status();
  v1::ListRunsResponse whole;
  std::set<std::string> seen;
  for (v1::ListRunsResponse& list : *lists) {
    for (v1::RunStatus& run : *list.mutable_runs()) {
      if (run.parts() == parts()) {
        if (!seen.insert(run.run_id()).second) continue;
        OfWhole(&run);
      }
      *whole.add_runs() = std::move(run);
    }
  }
  return whole;
}

void PartsClient::OfWhole(v1::RunStatus* run) {
  auto merged = GetRun(run->run_id());
  if (merged.ok()) {
    *run = std::move(*merged->mutable_status());
    return;
  }
  if (absl::IsFailedPrecondition(merged.status())) run->set_state(v1::RUN_STATE_FAILED);
  run->set_failure(std::string(merged.status().message()));
}

absl::StatusOr<v1::GetHistoryResponse> PartsClient::GetHistory(const std::string& run_id, uint64_t after_step,
                                                               uint32_t most) {
  auto histories = AskAll<v1::GetHistoryResponse>(
      [&](uint32_t, DaemonClient& daemon) { return daemon.GetHistory(run_id, after_step, most); });
  if (!histories.ok()) return histories.status();
  const auto whole = Look(run_id);
  if (!whole.ok()) return whole.status();
  return MergeHistories(*histories, whole->staged());
}

// --- making and ending runs ------------------------------------------------------------------------------------------

// As the daemons have it, where they have it: an amended run's tensors are not where a new one's would be.
absl::StatusOr<PartPlacement> PartsClient::PlaceNew(const v1::RunSpec& spec) {
  if (spec.has_part()) {
    return absl::InvalidArgumentError(
        "part is given, but the client of several daemons forms the parts: leave it unset");
  }
  const auto lists = AskAll<v1::ListRunsResponse>([](uint32_t, DaemonClient& daemon) { return daemon.ListRuns(); });
  if (!lists.ok()) return lists.status();
  const bool there = std::all_of(lists->begin(), lists->end(), [&](const v1::ListRunsResponse& list) {
    return std::any_of(list.runs().begin(), list.runs().end(),
                       [&](const v1::RunStatus& run) { return run.run_id() == spec.run_id(); });
  });
  if (!there) return PartPlacement::Of(spec, parts());
  const auto whole = Look(spec.run_id());
  if (!whole.ok()) return whole.status();
  return whole->placement.Extended(spec);
}

absl::StatusOr<v1::RunPlan> PartsClient::Plan(const v1::RunSpec& spec) {
  const auto placement = PartPlacement::Of(spec, parts());
  if (!placement.ok()) return placement.status();
  const std::vector<v1::RunSpec> specs = placement->Split(spec);
  auto plans = AskAll<v1::RunPlan>([&](uint32_t part, DaemonClient& daemon) { return daemon.Plan(specs[part]); });
  if (!plans.ok()) return plans.status();
  return MergePlans(*plans);
}

absl::StatusOr<v1::CreateRunResponse> PartsClient::CreateRun(const v1::RunSpec& spec) {
  const auto placement = PlaceNew(spec);
  if (!placement.ok()) return placement.status();
  const std::vector<v1::RunSpec> specs = placement->Split(spec);
  const auto made = ForAll(parts(), [&](uint32_t part) { return daemons_[part]->CreateRun(specs[part]); });
  if (auto s = CheckCreated(spec.run_id(), made); !s.ok()) {
    Undo(spec.run_id(), made);
    return s;
  }
  v1::CreateRunResponse whole;
  std::vector<v1::RunPlan> plans;
  std::vector<std::string> hashes;
  for (const auto& part : made) {
    whole.set_created(whole.created() || part->created());
    plans.push_back(part->plan());
    hashes.push_back(part->spec_sha256());
  }
  *whole.mutable_plan() = MergePlans(plans);
  whole.set_spec_sha256(absl::StrJoin(hashes, ","));
  return whole;
}

// That each daemon has its part, and that none has made it anew which the others have trained.
absl::Status PartsClient::CheckCreated(const std::string& run_id,
                                       const std::vector<absl::StatusOr<v1::CreateRunResponse>>& made) {
  std::string anew;
  for (uint32_t part = 0; part < parts(); ++part) {
    if (!made[part].ok()) return NamedBy(names_[part], made[part].status());
    if (!made[part]->created()) continue;
    const auto run = daemons_[part]->GetRun(run_id);
    if (!run.ok()) return NamedBy(names_[part], run.status());
    if (!run->spec().has_part()) {
      return absl::UnimplementedError(
          absl::StrCat("the daemon at ", names_[part],
                       " is older than this client and does not know runs on several daemons; update the daemon"));
    }
    anew = names_[part];
  }
  for (uint32_t part = 0; part < parts() && !anew.empty(); ++part) {
    if (made[part]->created()) continue;
    const auto run = daemons_[part]->GetRun(run_id);
    if (!run.ok()) return NamedBy(names_[part], run.status());
    if (run->status().step() == 0) continue;
    return PartIsLost(run_id, anew, names_[part], run->status().step());
  }
  return absl::OkStatus();
}

void PartsClient::Undo(const std::string& run_id, const std::vector<absl::StatusOr<v1::CreateRunResponse>>& made) {
  for (uint32_t part = 0; part < parts(); ++part) {
    if (!made[part].ok() || !made[part]->created()) continue;
    const auto gone = daemons_[part]->DeletePart(run_id, /*force=*/false, /*keep_checkpoints=*/false, parts());
    if (!gone.ok()) {
      Log(absl::StrCat("the part of run '", run_id, "' that was made at ", names_[part],
                       " stays there: ", gone.status().message()));
    }
  }
}

std::vector<uint32_t> PartsClient::LikelyRefusersFirst(absl::Span<const v1::RunSpec> specs) {
  const std::vector<uint64_t> room = ForAll(parts(), [&](uint32_t part) -> uint64_t {
    DaemonClient& daemon = *daemons_[part];
    const auto run = daemon.GetRun(specs[part].run_id());
    if (!run.ok() || run->status().generation() != daemon.generation()) return 0;
    const auto plan = daemon.Plan(specs[part]);
    return 1 + (plan.ok() ? plan->memory_free_bytes() : 0);
  });
  std::vector<uint32_t> order(parts());
  std::iota(order.begin(), order.end(), 0);
  std::stable_sort(order.begin(), order.end(), [&](uint32_t a, uint32_t b) { return room[a] < room[b]; });
  return order;
}

absl::StatusOr<v1::AmendRunResponse> PartsClient::AmendRun(const v1::RunSpec& spec) {
  if (!attached_) return NotAttached("AmendRun");
  const auto placement = whole_.placement.Extended(spec);
  if (!placement.ok()) return placement.status();
  const std::vector<v1::RunSpec> specs = placement->Split(spec);
  // All or none would be better than one after the other. What one refuses the first refuses, but for memory and where its
  // session has ended, so those come first; and the call may be made again.
  v1::AmendRunResponse whole;
  std::vector<v1::RunPlan> plans(parts());
  std::vector<std::string> hashes(parts());
  std::vector<uint64_t> generations(parts());
  for (const uint32_t part : LikelyRefusersFirst(specs)) {
    auto amended = daemons_[part]->AmendRun(specs[part]);
    if (!amended.ok()) return NamedBy(names_[part], amended.status());
    whole.set_amended(whole.amended() || amended->amended());
    whole.set_step(amended->step());
    generations[part] = amended->generation();
    whole.set_tensors_added(whole.tensors_added() + amended->tensors_added());
    for (const uint64_t step : amended->snapshots_dropped()) {
      const auto& dropped = whole.snapshots_dropped();
      if (std::find(dropped.begin(), dropped.end(), step) == dropped.end()) whole.add_snapshots_dropped(step);
    }
    plans[part] = amended->plan();
    hashes[part] = amended->spec_sha256();
  }
  *whole.mutable_plan() = MergePlans(plans);
  whole.set_generation(MergeGenerations(generations));
  whole.set_spec_sha256(absl::StrJoin(hashes, ","));
  // On daemons where nothing changed the session goes on; the rank attaches to all anew.
  if (whole.amended()) Fail(RewoundError(whole.step(), whole.generation(), "the run was amended; "));
  return whole;
}

// Of those that have it.
absl::StatusOr<v1::DeleteRunResponse> PartsClient::DeleteRun(const std::string& run_id, bool force,
                                                             bool keep_checkpoints) {
  const auto deleted = ForAll(
      parts(), [&](uint32_t part) { return daemons_[part]->DeletePart(run_id, force, keep_checkpoints, parts()); });
  v1::DeleteRunResponse whole;
  bool any = false;
  for (uint32_t part = 0; part < parts(); ++part) {
    if (!deleted[part].ok() && !absl::IsNotFound(deleted[part].status())) {
      return NamedBy(names_[part], deleted[part].status());
    }
    any = any || deleted[part].ok();
    if (deleted[part].ok()) whole.set_freed_bytes(whole.freed_bytes() + deleted[part]->freed_bytes());
  }
  if (!any) return deleted[0].status();
  return whole;
}

}  // namespace ballast
