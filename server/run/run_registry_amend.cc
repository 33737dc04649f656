// Another spec for a run that exists. The run is held while the one that takes its place is made beside it; only when
// that has all it needs does it take over.
#include <algorithm>
#include <utility>

#include "absl/strings/str_cat.h"
#include "absl/strings/str_join.h"

#include "server/base/log.h"
#include "server/base/status_macros.h"
#include "server/run/run_registry.h"

namespace ballast {

void RunRegistry::Amend(AmendRequest request, absl::AnyInvocable<void(absl::StatusOr<Amended>)> done) {
  std::string run_id = request.spec.run_id;
  InTurn(std::move(run_id), [this, request = std::move(request), done = std::move(done)]() mutable {
    HoldAndAmend(std::move(request), std::move(done));
  });
}

void RunRegistry::HoldAndAmend(AmendRequest request, absl::AnyInvocable<void(absl::StatusOr<Amended>)> done) {
  if (draining()) return done(absl::UnavailableError("the daemon is shutting down; no run is amended"));
  auto found = Find(request.spec.run_id);
  if (!found.ok()) return done(found.status());
  const std::shared_ptr<Run> run = *std::move(found);
  if (run->spec_sha256() == request.spec_sha256) {
    const RunStatus status = run->Status();
    const uint64_t step = status.last_result ? status.last_result->step : 0;
    return done(Amended{.run = run, .taken = {.step = step, .generation = status.generation}});
  }
  if (auto s = request.check(run->canonical_spec()); !s.ok()) return done(s);
  const SessionId session = request.session;
  run->Hold(session, [this, run, request = std::move(request), done = std::move(done)](absl::Status held) mutable {
    if (!held.ok()) return done(std::move(held));
    InTurn(run->spec().run_id, [this, run, request = std::move(request), done = std::move(done)]() mutable {
      auto amended = AmendNow(std::move(request), run);
      if (!amended.ok()) run->Release();
      done(std::move(amended));
    });
  });
}

absl::StatusOr<RunRegistry::Amended> RunRegistry::AmendNow(AmendRequest request, const std::shared_ptr<Run>& run) {
  const std::string run_id = request.spec.run_id;
  const auto still_wanted = [&]() -> absl::Status {
    if (draining()) return absl::UnavailableError("the daemon is shutting down; no run is amended");
    if (!request.abandoned()) return absl::OkStatus();
    return absl::CancelledError("the call was cancelled while it waited; the run goes on as it was");
  };
  RETURN_IF_ERROR(still_wanted());
  RETURN_IF_ERROR(CheckThere(*run));
  const size_t kept = run->spec().tensors.size();
  Placement placement = Extended(run->plan().placement, request.spec, options_.devices->FreeBytes());
  std::vector<Device*> devices = options_.devices->Of(placement);
  Plan plan = MakePlan(request.spec, std::move(placement));
  std::shared_ptr<RunFolder> folder;
  if (has_storage()) {
    ASSIGN_OR_RETURN(folder, options_.storage->FolderOf(run_id));
  }
  RETURN_IF_ERROR(AdmitRules(request.spec));
  RETURN_IF_ERROR(AdmitQuota(request.payer, request.spec, /*amends=*/true));
  RETURN_IF_ERROR(AdmitAmended(request.spec, plan, *run));
  RETURN_IF_ERROR(AdmitSeries(request.spec));
  auto successor = Run::Create({.spec = std::move(request.spec),
                                .canonical_spec = std::move(request.canonical_spec),
                                .spec_sha256 = std::move(request.spec_sha256),
                                .plan = std::move(plan),
                                .devices = std::move(devices),
                                .metrics = options_.metrics,
                                .past = run.get(),
                                .still_wanted = still_wanted,
                                .storage = StorageOf(folder)});
  if (!successor.ok()) {
    if (absl::IsResourceExhausted(successor.status())) options_.metrics->OnAdmissionRejected("memory");
    return absl::Status(successor.status().code(), absl::StrCat("run '", run_id, "': ", successor.status().message()));
  }
  Amended amended{.run = *std::move(successor), .amended = true};
  ASSIGN_OR_RETURN(amended.taken, amended.run->TakeOver(run.get()));
  amended.tensors_added = static_cast<uint32_t>(amended.run->spec().tensors.size() - kept);
  options_.devices->Release(run->plan());
  options_.devices->Reserve(amended.run->plan());
  {
    absl::MutexLock lock(&mu_);
    runs_[run_id] = amended.run;
  }
  if (draining()) amended.run->Drain([] {});
  ShowMemory();
  Log(LogLevel::kWarn, "amended", "the run has another spec; its ranks attach anew",
      {{"run_id", run_id},
       {"step", amended.taken.step},
       {"generation", amended.taken.generation},
       {"tensors_added", uint64_t{amended.tensors_added}},
       {"snapshots_dropped", absl::StrJoin(amended.taken.snapshots_dropped, ",")},
       {"bytes", amended.run->plan().bytes.total()}});
  return amended;
}

// While both are there, the new one has all of its plan but the planes that it takes over, beside all of the old one's.
absl::Status RunRegistry::AdmitAmended(const RunSpec& spec, const Plan& plan, const Run& run) const {
  const std::vector<uint64_t> free = options_.devices->FreeBytes();
  const std::optional<uint64_t> host_free = options_.devices->host_free_bytes();
  const std::vector<uint64_t> staying = run.StayingBytes(spec);
  bool fits = !host_free || plan.bytes.beside_device() <= *host_free;
  uint64_t needed = 0;
  for (size_t s = 0; s < plan.shards.size(); ++s) {
    const PlanBytes& bytes = plan.shards[s].bytes;
    const uint64_t whole = host_free ? bytes.on_device() : bytes.total();
    const uint64_t beside = whole == kUncountable ? whole : whole - staying[s];
    Add(&needed, beside);
    fits = fits && beside <= free[plan.placement.devices[s]];
  }
  if (fits && needed != kUncountable) return absl::OkStatus();
  options_.metrics->OnAdmissionRejected("memory");
  return absl::ResourceExhaustedError(
      absl::StrCat("run '", spec.run_id, "' with this spec needs ", DescribeBytes(plan.bytes),
                   ", and while it is amended ", needed, " beside the ", run.plan().bytes.total(), " that it has, ",
                   DescribeRoom(), "; the run goes on as it was. Delete a run, ",
                   spec.snapshots > 0 ? "keep fewer snapshots, " : "", "add less, or raise memory_limit"));
}

}  // namespace ballast
