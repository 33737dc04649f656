// Runs as they are made: what is decided is decided on the strand, and what takes long, memory and reading, goes on aside.
#include <pthread.h>

#include <utility>

#include "absl/strings/str_cat.h"
#include "absl/strings/str_join.h"

#include "kernels/matrix/product.h"
#include "server/base/clock.h"
#include "server/base/log.h"
#include "server/base/start_thread.h"
#include "server/base/status_macros.h"
#include "server/run/run_registry.h"

namespace ballast {
namespace {

void LogCreated(const Run& run) {
  const std::string& run_id = run.spec().run_id;
  Log(LogLevel::kInfo, "run_created", "run created",
      {{"run_id", run_id}, {"bytes", run.plan().bytes.total()}, {"devices", absl::StrJoin(run.devices(), ",")}});
  if (!HasMatrices(run.spec())) return;
  const bool slow = run.products() == kernels::PlainProduct().library;
  Log(slow ? LogLevel::kWarn : LogLevel::kInfo, "matrix_products",
      slow ? "no OpenBLAS is found: matrix products take ten times as long; install libopenblas0-pthread"
           : "matrix products are made by a library",
      {{"run_id", run_id}, {"library", run.products()}});
}

}  // namespace

void RunRegistry::Create(CreateRequest request, absl::AnyInvocable<void(absl::StatusOr<Created>)> done) {
  if (auto existing = Existing(request)) {  // trainers that come back wait for no run that is made
    if (existing->ok()) {
      strand_.Post([this, run = (*existing)->run, payer = request.payer] {
        if (CheckThere(*run).ok()) Claim(run->spec().run_id, payer);
      });
    }
    return done(*std::move(existing));
  }
  std::string run_id = request.spec.run_id;
  InTurn(std::move(run_id), [this, request = std::move(request), done = std::move(done)]() mutable {
    if (auto existing = Existing(request)) {
      if (existing->ok()) Claim(request.spec.run_id, request.payer);
      return done(*std::move(existing));
    }
    MakeAside(std::move(request), {}, std::move(done));
  });
}

std::optional<absl::StatusOr<RunRegistry::Created>> RunRegistry::Existing(const CreateRequest& request) const {
  const std::string& run_id = request.spec.run_id;
  const auto existing = Find(run_id);
  if (!existing.ok()) return std::nullopt;
  if ((*existing)->spec_sha256() != request.spec_sha256) {
    return absl::FailedPreconditionError(absl::StrCat(
        "run '", run_id,
        "' exists with another spec: ", request.difference((*existing)->canonical_spec(), request.canonical_spec),
        "; use another run_id, or delete the run"));
  }
  if ((*existing)->Status().state != RunState::kFailed) return Created{*existing, false};
  if (draining()) return absl::UnavailableError("the daemon is shutting down; create the run at the next one");
  return std::nullopt;
}

absl::StatusOr<RunRegistry::Created> RunRegistry::CreateNow(CreateRequest request) {
  if (auto existing = Existing(request)) return *std::move(existing);
  ASSIGN_OR_RETURN(const std::shared_ptr<Making> making, Prepare(std::move(request), {}));
  making->made = Build(*making);
  return Publish(making.get());
}

void RunRegistry::MakeAside(CreateRequest request, Origin origin,
                            absl::AnyInvocable<void(absl::StatusOr<Created>)> done) {
  const auto prepared = Prepare(std::move(request), std::move(origin));
  if (!prepared.ok()) return done(prepared.status());
  const std::shared_ptr<Making>& making = *prepared;
  WorkAside(
      making->request.spec.run_id, [this, making] { making->made = Build(*making); },
      [this, making, done = std::move(done)]() mutable { done(Publish(making.get())); });
}

absl::StatusOr<std::shared_ptr<RunRegistry::Making>> RunRegistry::Prepare(CreateRequest request, Origin origin) {
  const std::string run_id = request.spec.run_id;
  RETURN_IF_ERROR(AdmitQuota(request.payer, request.spec, /*amends=*/false));
  // It failed: nothing is left to go on from, but what is on the disk.
  if (const auto failed = Find(run_id); failed.ok()) Remove(*failed);
  auto making = std::make_shared<Making>();
  if (has_storage()) {
    ASSIGN_OR_RETURN(making->candidates, Candidates(request, origin.only, &making->damaged));
    if (origin.imported) {
      making->candidates.assign(1, *origin.imported);
      making->damaged.clear();  // what is to be replaced
    }
    ASSIGN_OR_RETURN(making->folder, options_.storage->FolderOf(run_id));
  }
  ASSIGN_OR_RETURN(Placement placement, Admit(request.spec));
  making->plan = MakePlan(request.spec, std::move(placement));
  making->replays = !origin.only && !origin.imported;
  making->request = std::move(request);
  options_.devices->Reserve(making->plan);
  making_[run_id] = making;
  ShowMemory();
  return making;
}

absl::StatusOr<std::shared_ptr<Run>> RunRegistry::Build(const Making& making) {
  const CreateRequest& request = making.request;
  const double began_s = MonotonicSeconds();
  auto run = Run::Create({.spec = request.spec,
                          .canonical_spec = request.canonical_spec,
                          .spec_sha256 = request.spec_sha256,
                          .plan = making.plan,
                          .devices = options_.devices->Of(making.plan.placement),
                          .metrics = options_.metrics,
                          .storage = StorageOf(making.folder)});
  if (!run.ok()) {
    options_.metrics->OnAdmissionRejected("memory");
    return absl::Status(run.status().code(), absl::StrCat("run '", request.spec.run_id, "': ", run.status().message()));
  }
  if (making.candidates.empty() && making.damaged.empty()) return run;
  if (absl::Status read = GoOnFromNewest(making.candidates, making.replays, making.damaged, run->get()); !read.ok()) {
    (*run)->metrics().OnRestored("failed");
    (*run)->End(read);
    return read;
  }
  options_.metrics->OnRestore(MonotonicSeconds() - began_s);
  return run;
}

absl::StatusOr<RunRegistry::Created> RunRegistry::Publish(Making* making) {
  const std::string run_id = making->request.spec.run_id;
  making_.erase(run_id);
  absl::StatusOr<std::shared_ptr<Run>> made = std::move(making->made);
  if (made.ok() && draining()) {
    const absl::Status why = absl::UnavailableError("the daemon is shutting down; create the run at the next one");
    (*made)->End(why);
    made = why;
  }
  if (!made.ok()) {
    options_.devices->Release(making->plan);
    ShowMemory();
    return made.status();
  }
  {
    absl::MutexLock lock(&mu_);
    runs_[run_id] = *made;
  }
  Claim(run_id, making->request.payer);
  ShowMemory();
  LogCreated(**made);
  const std::vector<DevicePool::State> states = options_.devices->Read();
  for (const size_t device : making->plan.placement.devices) {
    if (!states[device].failure.ok()) FailWith(states[device].failure, made->get());  // meanwhile
  }
  return Created{*std::move(made), true};
}

void RunRegistry::InTurn(std::string run_id, RunTurns::Task task) {
  strand_.Post(
      [this, run_id = std::move(run_id), task = std::move(task)]() mutable { turns_.Take(run_id, std::move(task)); });
}

void RunRegistry::WorkAside(const std::string& run_id, RunTurns::Task work, RunTurns::Task then) {
  turns_.Begin(run_id);
  {
    absl::MutexLock lock(&mu_);
    ++working_;
  }
  const auto end = std::make_shared<RunTurns::Task>([this, run_id, then = std::move(then)]() mutable {
    then();
    turns_.End(run_id);
    absl::MutexLock lock(&mu_);
    --working_;
  });
  const auto shared_work = std::make_shared<RunTurns::Task>(std::move(work));
  try {
    std::thread thread = StartThread([this, run_id, shared_work, end] {
      (*shared_work)();
      strand_.Post([this, run_id, end] {
        threads_.extract(run_id).mapped().join();
        (*end)();
      });
    });
    pthread_setname_np(thread.native_handle(), "run-maker");
    threads_.emplace(run_id, std::move(thread));
  } catch (const NoThread&) {  // others wait, as long as there are so many threads
    (*shared_work)();
    (*end)();
  }
}

}  // namespace ballast
