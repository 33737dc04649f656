#include "server/run/run_registry.h"

#include <algorithm>
#include <atomic>
#include <utility>

#include "absl/strings/str_cat.h"
#include "absl/strings/str_join.h"
#include "absl/synchronization/blocking_counter.h"
#include "absl/synchronization/notification.h"
#include "absl/time/time.h"

#include "kernels/matrix/product.h"
#include "server/base/clock.h"
#include "server/base/log.h"
#include "server/base/status_macros.h"

namespace ballast {
RunRegistry::RunRegistry(Options options)
    : options_(std::move(options)), strand_({.name = "runs", .tick_s = 1, .tick = [this] { Tick(); }}) {
  options_.metrics->KeepEnded(options_.max_runs);
  ShowMemory();
  strand_.Post([this] { ShowStorage(); });
  for (size_t d = 0; d < options_.devices->size(); ++d) {
    options_.devices->at(d)->Watch(
        [this, d](const absl::Status& why) { strand_.Post([this, d, why] { OnDeviceFailed(d, why); }); });
  }
}

RunRegistry::~RunRegistry() {
  for (size_t d = 0; d < options_.devices->size(); ++d) options_.devices->at(d)->Watch(nullptr);
  End(absl::UnavailableError("the daemon is shutting down"));
}

void RunRegistry::Create(CreateRequest request, absl::AnyInvocable<void(absl::StatusOr<Created>)> done) {
  strand_.Post(
      [this, request = std::move(request), done = std::move(done)]() mutable { done(CreateNow(std::move(request))); });
}

absl::StatusOr<RunRegistry::Created> RunRegistry::CreateNow(CreateRequest request, const Origin& origin) {
  const std::string run_id = request.spec.run_id;
  const Payer payer = request.payer;
  const auto existing = Find(run_id);
  if (existing.ok()) {
    if ((*existing)->spec_sha256() != request.spec_sha256) {
      return absl::FailedPreconditionError(absl::StrCat(
          "run '", run_id,
          "' exists with another spec: ", request.difference((*existing)->canonical_spec(), request.canonical_spec),
          "; use another run_id, or delete the run"));
    }
    if ((*existing)->Status().state != RunState::kFailed) {
      Claim(run_id, payer);
      return Created{*existing, false};
    }
    if (draining()) return absl::UnavailableError("the daemon is shutting down; create the run at the next one");
  }
  RETURN_IF_ERROR(AdmitQuota(payer, request.spec, /*amends=*/false));
  if (existing.ok()) Remove(*existing);  // it failed: nothing is left to go on from, but what is on the disk
  ASSIGN_OR_RETURN(std::shared_ptr<Run> run, Make(std::move(request), origin));
  {
    absl::MutexLock lock(&mu_);
    runs_[run_id] = run;
  }
  Claim(run_id, payer);
  ShowMemory();
  Log(LogLevel::kInfo, "run_created", "run created",
      {{"run_id", run_id}, {"bytes", run->plan().bytes.total()}, {"devices", absl::StrJoin(run->devices(), ",")}});
  if (HasMatrices(run->spec())) {
    const bool slow = run->products() == kernels::PlainProduct().library;
    Log(slow ? LogLevel::kWarn : LogLevel::kInfo, "matrix_products",
        slow ? "no OpenBLAS is found: matrix products take ten times as long; install libopenblas0-pthread"
             : "matrix products are made by a library",
        {{"run_id", run_id}, {"library", run->products()}});
  }
  return Created{std::move(run), true};
}

absl::StatusOr<std::shared_ptr<Run>> RunRegistry::Make(CreateRequest request, const Origin& origin) {
  const std::string run_id = request.spec.run_id;
  const double began_s = MonotonicSeconds();
  std::vector<absl::Status> damaged;
  std::vector<CheckpointReader> candidates;
  std::shared_ptr<RunFolder> folder;
  if (has_storage()) {
    ASSIGN_OR_RETURN(candidates, Candidates(request, origin.only, &damaged));
    if (origin.imported != nullptr) {
      candidates.assign(1, *origin.imported);
      damaged.clear();  // what is to be replaced
    }
    ASSIGN_OR_RETURN(folder, options_.storage->FolderOf(run_id));
  }
  ASSIGN_OR_RETURN(Placement placement, Admit(request.spec));
  std::vector<Device*> devices = options_.devices->Of(placement);
  Plan plan = MakePlan(request.spec, std::move(placement));
  auto run = Run::Create({.spec = std::move(request.spec),
                          .canonical_spec = std::move(request.canonical_spec),
                          .spec_sha256 = std::move(request.spec_sha256),
                          .plan = std::move(plan),
                          .devices = std::move(devices),
                          .metrics = options_.metrics,
                          .storage = StorageOf(folder)});
  if (!run.ok()) {
    options_.metrics->OnAdmissionRejected("memory");
    return absl::Status(run.status().code(), absl::StrCat("run '", run_id, "': ", run.status().message()));
  }
  if (!candidates.empty() || !damaged.empty()) {
    const bool replays = !origin.only && origin.imported == nullptr;
    if (absl::Status restored = GoOnFromNewest(candidates, replays, std::move(damaged), run->get()); !restored.ok()) {
      (*run)->metrics().OnRestored("failed");
      (*run)->End(restored);
      return restored;
    }
    options_.metrics->OnRestore(MonotonicSeconds() - began_s);
  }
  options_.devices->Reserve((*run)->plan());
  return run;
}

void RunRegistry::Delete(std::string run_id, DeleteMode mode, absl::AnyInvocable<void(absl::StatusOr<uint64_t>)> done) {
  strand_.Post(
      [this, run_id = std::move(run_id), mode, done = std::move(done)]() mutable { done(DeleteNow(run_id, mode)); });
}

absl::StatusOr<uint64_t> RunRegistry::DeleteNow(const std::string& run_id, DeleteMode mode) {
  if (draining()) return absl::UnavailableError("the daemon is shutting down; its runs end with it");
  const auto found = Find(run_id);
  if (!found.ok() && has_storage() && !mode.keep_checkpoints) {
    const absl::Status removed = options_.storage->Remove(run_id);
    if (absl::IsNotFound(removed)) return found.status();
    return removed.ok() ? absl::StatusOr<uint64_t>(0) : removed;
  }
  RETURN_IF_ERROR(found.status());
  const std::shared_ptr<Run>& run = *found;
  if (has_storage() && mode.keep_checkpoints) RETURN_IF_ERROR(WriteLast(run.get(), mode.force));
  if (!mode.force) {
    absl::Status status;
    absl::Notification answered;
    run->Close([&](absl::Status s) {
      status = std::move(s);
      answered.Notify();
    });
    answered.WaitForNotification();
    RETURN_IF_ERROR(status);
  }
  const uint64_t freed = Remove(run);
  if (!has_storage() || mode.keep_checkpoints) return freed;
  RETURN_IF_ERROR(options_.storage->Remove(run_id));
  return freed;
}

void RunRegistry::Tick() {
  DeleteIdle();
  ShowStorage();
}

void RunRegistry::DeleteIdle() {
  if (options_.idle_run_timeout_s == 0) return;
  for (const auto& run : All()) {
    const std::optional<double> since_s = run->Status().unattended_since_s;
    const double idle_s = since_s ? MonotonicSeconds() - *since_s : 0;
    if (idle_s < options_.idle_run_timeout_s) continue;
    const std::string& run_id = run->spec().run_id;
    // Refused: a trainer has come meanwhile, or the daemon drains.
    if (!DeleteNow(run_id, {.keep_checkpoints = true}).ok()) continue;
    Log(LogLevel::kInfo, "run_expired", "a run was deleted: no trainer came for longer than idle_run_timeout",
        {{"run_id", run_id}, {"dur_s", idle_s}});
  }
}

uint64_t RunRegistry::Remove(const std::shared_ptr<Run>& run) {
  const std::string& run_id = run->spec().run_id;
  {
    absl::MutexLock lock(&mu_);
    runs_.erase(run_id);
  }
  payers_.erase(run_id);
  options_.sessions->Forget(run_id);
  const uint64_t freed = run->End(absl::NotFoundError(absl::StrCat("run '", run_id, "' was deleted")));
  options_.devices->Release(run->plan());
  ShowMemory();
  Log(LogLevel::kInfo, "run_deleted", "run deleted", {{"run_id", run_id}, {"bytes", freed}});
  return freed;
}

absl::StatusOr<std::shared_ptr<Run>> RunRegistry::Find(absl::string_view run_id) const {
  absl::MutexLock lock(&mu_);
  const auto run = runs_.find(std::string(run_id));
  if (run != runs_.end()) return run->second;
  if (draining_) return absl::UnavailableError("the daemon is shutting down; ask again when it is back");
  if (!options_.tells_of_all) return absl::NotFoundError(absl::StrCat("no run '", run_id, "'"));
  std::string known;
  for (const auto& [id, _] : runs_) absl::StrAppend(&known, known.empty() ? "" : ", ", id);
  return absl::NotFoundError(
      absl::StrCat("no run '", run_id, "'; ", known.empty() ? "there are no runs" : "there are: ", known));
}

std::vector<std::shared_ptr<Run>> RunRegistry::All() const {
  absl::MutexLock lock(&mu_);
  std::vector<std::shared_ptr<Run>> all;
  for (const auto& [_, run] : runs_) all.push_back(run);
  return all;
}

void RunRegistry::OnDeviceFailed(size_t device, const absl::Status& why) {
  const bool any_left = options_.devices->Fail(device, why);
  const std::string label = options_.devices->at(device)->label(), reason(why.message());
  Log(LogLevel::kError, "device_failed", "a device failed: its runs are lost, and must be created anew",
      {{"device", label}, {"err", reason}});
  options_.metrics->OnDeviceFailed(label);
  ShowMemory();
  for (const auto& run : All()) {
    const auto& devices = run->plan().placement.devices;
    if (std::find(devices.begin(), devices.end(), device) == devices.end()) continue;
    run->Fail(absl::DataLossError(
        absl::StrCat("run '", run->spec().run_id, "' is lost: ", reason, "; create it anew and load the weights")));
  }
  if (!any_left && options_.on_last_failure) options_.on_last_failure(why);
}

bool RunRegistry::draining() const {
  absl::MutexLock lock(&mu_);
  return draining_;
}

void RunRegistry::ShowMemory() const {
  for (const DevicePool::State& state : options_.devices->Read()) {
    options_.metrics->SetMemory(state.label, state.reserved, state.failure.ok() ? state.limit_bytes : 0);
  }
}

int RunRegistry::Drain(double timeout_s) {
  {
    absl::MutexLock lock(&mu_);
    draining_ = true;
  }
  // Outlives this call in the runs that do not get ready in time.
  struct Pending {
    absl::Mutex mu;
    size_t runs ABSL_GUARDED_BY(mu) = 0;
  };
  const auto pending = std::make_shared<Pending>();
  const auto all = All();
  {
    absl::MutexLock lock(&pending->mu);
    pending->runs = all.size();
  }
  for (const auto& run : all) {
    run->Drain([pending] {
      absl::MutexLock lock(&pending->mu);
      --pending->runs;
    });
  }
  {
    const auto none = [&]() ABSL_SHARED_LOCKS_REQUIRED(pending->mu) { return pending->runs == 0; };
    absl::MutexLock lock(&pending->mu);
    pending->mu.AwaitWithTimeout(absl::Condition(&none), absl::Seconds(timeout_s));
  }
  std::atomic<int> open = 0;
  absl::BlockingCounter asked(static_cast<int>(all.size()));
  for (const auto& run : all) {
    run->AskStepOpen([&](bool step_open) {
      open += step_open ? 1 : 0;
      asked.DecrementCount();
    });
  }
  asked.Wait();
  CheckpointAll();
  return open;
}

double RunRegistry::busy_s() const {
  double most = 0;
  for (const auto& run : All()) most = std::max(most, run->busy_s());
  return most;
}

void RunRegistry::End(const absl::Status& status) {
  {
    absl::MutexLock lock(&mu_);
    draining_ = true;
  }
  strand_.Stop();
  for (const auto& run : All()) run->End(status);
  absl::MutexLock lock(&mu_);
  runs_.clear();
}

}  // namespace ballast
