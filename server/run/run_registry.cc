#include "server/run/run_registry.h"

#include <algorithm>
#include <atomic>
#include <utility>

#include "absl/strings/str_cat.h"
#include "absl/synchronization/blocking_counter.h"
#include "absl/synchronization/notification.h"
#include "absl/time/time.h"

#include "server/base/clock.h"
#include "server/base/log.h"
#include "server/base/status_macros.h"

namespace ballast {
namespace {

constexpr double kExpireAgainS = 60;

// What the run answers to a question whose answer its strand gives soon.
template <typename Ask>
absl::Status AnswerTo(Ask ask) {
  absl::Status status;
  absl::Notification answered;
  ask([&](absl::Status s) {
    status = std::move(s);
    answered.Notify();
  });
  answered.WaitForNotification();
  return status;
}

absl::Status CheckOnAll(const RunSpec& spec, const RunRegistry::DeleteMode& mode) {
  if (!spec.part || mode.force || mode.daemons == 0 || mode.daemons >= spec.part->count) return absl::OkStatus();
  return absl::FailedPreconditionError(absl::StrCat(
      "this daemon has part ", spec.part->index, " of ", spec.part->count, " of run '", spec.run_id,
      "', and the other parts stay on the other daemons, where nothing can go on without this one: name all "
      "daemons of the run, as its trainers do, or delete this part alone with force"));
}

}  // namespace

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

void RunRegistry::Delete(std::string run_id, DeleteMode mode, Deleted done) {
  InTurn(run_id, [this, run_id, mode, done = std::move(done)]() mutable { DeleteNow(run_id, mode, std::move(done)); });
}

void RunRegistry::DeleteNow(const std::string& run_id, DeleteMode mode, Deleted done) {
  if (draining()) return done(absl::UnavailableError("the daemon is shutting down; its runs end with it"));
  auto found = Find(run_id);
  if (!found.ok()) return done(DeleteStored(run_id, mode, found.status()));
  if (auto s = CheckOnAll((*found)->spec(), mode); !s.ok()) return done(s);
  if (!has_storage() || !mode.keep_checkpoints) return done(DeleteWritten(*found, mode));
  WriteLast(*found, mode.force,
            [this, run = *found, mode, done = std::move(done)](const absl::Status& written) mutable {
              done(written.ok() ? DeleteWritten(run, mode) : absl::StatusOr<uint64_t>(written));
            });
}

void RunRegistry::WriteLast(const std::shared_ptr<Run>& run, bool force, absl::AnyInvocable<void(absl::Status)> done) {
  // Its open step is a trainer's that is there, and is not to be closed for a deletion that is refused.
  if (!force) {
    const absl::Status status = AnswerTo([&](auto answer) { run->CheckUnattended(std::move(answer)); });
    if (!status.ok()) return done(status);
  }
  run->WriteLast("the run was deleted in the middle of the step", [this, run_id = run->spec().run_id,
                                                                   done = std::move(done)](absl::Status s) mutable {
    InTurn(run_id, [run_id, done = std::move(done), s = std::move(s)]() mutable {
      if (s.ok()) return done(s);
      done(absl::Status(s.code(),
                        absl::StrCat("run '", run_id, "' stays: its last steps could not be written: ", s.message())));
    });
  });
}

absl::StatusOr<uint64_t> RunRegistry::DeleteStored(const std::string& run_id, DeleteMode mode, absl::Status unknown) {
  if (!has_storage() || mode.keep_checkpoints) return unknown;
  ASSIGN_OR_RETURN(const bool there, options_.storage->Has(run_id));
  if (!there) return unknown;
  const auto request = NewestRequest(run_id);
  if (request.ok() && *request) RETURN_IF_ERROR(CheckOnAll((*request)->spec, mode));
  RETURN_IF_ERROR(options_.storage->Remove(run_id));
  return 0;
}

absl::StatusOr<uint64_t> RunRegistry::DeleteWritten(const std::shared_ptr<Run>& run, DeleteMode mode) {
  if (draining()) return absl::UnavailableError("the daemon is shutting down; its runs end with it");
  RETURN_IF_ERROR(CheckThere(*run));
  if (!mode.force) RETURN_IF_ERROR(AnswerTo([&](auto answer) { run->Close(std::move(answer)); }));
  const uint64_t freed = Remove(run);
  if (!has_storage() || mode.keep_checkpoints) return freed;
  RETURN_IF_ERROR(options_.storage->Remove(run->spec().run_id));
  return freed;
}

absl::Status RunRegistry::CheckThere(const Run& run) const {
  const std::string& run_id = run.spec().run_id;
  ASSIGN_OR_RETURN(const std::shared_ptr<Run> there, Find(run_id));
  if (there.get() == &run) return absl::OkStatus();
  return absl::UnavailableError(absl::StrCat("run '", run_id, "' was made anew; ask again"));
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
    if (idle_s >= options_.idle_run_timeout_s && !turns_.under_way(run->spec().run_id)) Expire(run, idle_s);
  }
}

void RunRegistry::Expire(const std::shared_ptr<Run>& run, double idle_s) {
  const std::string run_id = run->spec().run_id;
  Expiry& expiry = expiries_[run_id];
  if (expiry.under_way || MonotonicSeconds() < expiry.not_before_s) return;
  expiry.under_way = true;
  DeleteNow(run_id, {.keep_checkpoints = true}, [this, run, run_id, idle_s](const absl::StatusOr<uint64_t>& freed) {
    expiries_.erase(run_id);
    if (freed.ok()) {
      return Log(LogLevel::kInfo, "run_expired",
                 "a run was taken from memory: no trainer came for longer than idle_run_timeout",
                 {{"run_id", run_id}, {"dur_s", idle_s}});
    }
    if (draining() || !run->Status().unattended_since_s) return;  // or a trainer has come meanwhile
    expiries_[run_id].not_before_s = MonotonicSeconds() + kExpireAgainS;
    Log(LogLevel::kError, "run_not_expired",
        "a run that no trainer comes to cannot be taken from memory; it is tried again",
        {{"run_id", run_id}, {"err", std::string(freed.status().message())}});
  });
}

uint64_t RunRegistry::Remove(const std::shared_ptr<Run>& run) {
  const std::string& run_id = run->spec().run_id;
  {
    absl::MutexLock lock(&mu_);
    runs_.erase(run_id);
  }
  payers_.erase(run_id);
  expiries_.erase(run_id);
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
  const std::string label = options_.devices->at(device)->label();
  Log(LogLevel::kError, "device_failed", "a device failed: its runs are lost, and must be created anew",
      {{"device", label}, {"err", std::string(why.message())}});
  options_.metrics->OnDeviceFailed(label);
  ShowMemory();
  for (const auto& run : All()) {
    const auto& devices = run->plan().placement.devices;
    if (std::find(devices.begin(), devices.end(), device) != devices.end()) FailWith(why, run.get());
  }
  if (!any_left && options_.on_last_failure) options_.on_last_failure(why);
}

void RunRegistry::FailWith(const absl::Status& why, Run* run) {
  run->Fail(absl::DataLossError(absl::StrCat("run '", run->spec().run_id, "' is lost: ", why.message(),
                                             "; create it anew and load the weights")));
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
  // Whatever begins on the strand from now on sees that.
  absl::Notification heard;
  strand_.Post([&] { heard.Notify(); });
  heard.WaitForNotification();
  {
    const auto none = [this]() ABSL_SHARED_LOCKS_REQUIRED(mu_) { return working_ == 0; };
    absl::MutexLock lock(&mu_);
    mu_.Await(absl::Condition(&none));
  }
  strand_.Stop();
  for (const auto& run : All()) run->End(status);
  absl::MutexLock lock(&mu_);
  runs_.clear();
}

}  // namespace ballast
