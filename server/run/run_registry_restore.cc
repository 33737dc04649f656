// A run that is taken back to a checkpoint of its own, as an operator asks for it.
#include <memory>
#include <string>
#include <utility>
#include <vector>

#include "absl/strings/str_cat.h"
#include "absl/strings/str_join.h"
#include "absl/synchronization/notification.h"

#include "server/base/status_macros.h"
#include "server/run/run_registry.h"

namespace ballast {
namespace {

// The steps of those that can be restored.
std::string StepsIn(const std::vector<CheckpointEntry>& entries) {
  std::vector<uint64_t> kept, discarded;
  for (const CheckpointEntry& entry : entries) {
    if (entry.counts()) kept.push_back(entry.place.step);
    if (entry.state == CheckpointState::kSetAside) discarded.push_back(entry.place.step);
  }
  std::string steps =
      kept.empty() ? "there are none" : absl::StrCat("there are those of steps ", absl::StrJoin(kept, ", "));
  if (!discarded.empty()) {
    absl::StrAppend(&steps, ", and discarded ones, of steps that were undone: ", absl::StrJoin(discarded, ", "));
  }
  return steps;
}

// The newest of the step, one that counts before one that was set aside.
const CheckpointEntry* EntryOf(const std::vector<CheckpointEntry>& entries, uint64_t step) {
  const CheckpointEntry* found = nullptr;
  for (const CheckpointEntry& entry : entries) {
    const bool readable = entry.counts() || entry.state == CheckpointState::kSetAside;
    if (!readable || entry.place.step != step) continue;
    if (found == nullptr || entry.counts() || !found->counts()) found = &entry;
  }
  return found;
}

}  // namespace

void RunRegistry::Restore(std::string run_id, uint64_t step, Payer payer,
                          absl::AnyInvocable<void(absl::StatusOr<Rewound>)> done) {
  InTurn(run_id, [this, run_id, step, payer = std::move(payer), done = std::move(done)]() mutable {
    RestoreNow(run_id, step, payer, std::move(done));
  });
}

void RunRegistry::RestoreNow(const std::string& run_id, uint64_t step, const Payer& payer, RewindDone done) {
  if (!has_storage()) return done(NoStorage());
  if (draining()) return done(absl::UnavailableError("the daemon is shutting down; no run is restored"));
  uint64_t number = 0;
  const absl::StatusOr<CheckpointReader> checkpoint = OpenOfStep(run_id, step, &number);
  if (const auto living = Find(run_id); living.ok()) CountDamage(checkpoint.status(), living->get());
  if (!checkpoint.ok()) return done(checkpoint.status());
  RestoreOf(run_id, *checkpoint, {.only = number, .payer = payer}, std::move(done));
}

absl::StatusOr<CheckpointReader> RunRegistry::OpenOfStep(const std::string& run_id, uint64_t step,
                                                         uint64_t* number) const {
  ASSIGN_OR_RETURN(const bool there, options_.storage->Has(run_id));
  if (!there) return absl::NotFoundError(absl::StrCat("no run '", run_id, "' is on the disk"));
  ASSIGN_OR_RETURN(const std::shared_ptr<RunFolder> folder, options_.storage->FolderOf(run_id));
  ASSIGN_OR_RETURN(const std::vector<CheckpointEntry> entries, folder->List());
  const CheckpointEntry* const entry = EntryOf(entries, step);
  if (entry == nullptr) {
    return absl::FailedPreconditionError(
        absl::StrCat("run '", run_id, "' has no checkpoint of step ", step, "; ", StepsIn(entries)));
  }
  *number = entry->place.number;
  return CheckpointReader::Open(options_.storage->fs(), folder->PathOf(*entry));
}

void RunRegistry::RestoreOf(const std::string& run_id, const CheckpointReader& checkpoint, Origin origin,
                            RewindDone done) {
  const uint64_t step = checkpoint.manifest().step();
  const auto living = Find(run_id);
  if (living.ok() && (*living)->Status().state != RunState::kFailed) {
    const auto status = std::make_shared<absl::Status>();
    return WorkAside(
        run_id, [this, checkpoint, run = *living, status] { *status = RestoreLiving(checkpoint, run.get()); },
        [this, run = *living, step, status, done = std::move(done)]() mutable {
          if (!status->ok()) return done(*status);
          MakeNewest({.run = std::move(run), .step = step, .lived = true}, std::move(done));
        });
  }
  absl::StatusOr<CreateRequest> request = RequestOf(checkpoint);
  if (!request.ok()) return done(request.status());
  request->payer = origin.payer;
  MakeAside(*std::move(request), std::move(origin),
            [this, step, done = std::move(done)](absl::StatusOr<Created> created) mutable {
              if (!created.ok()) return done(created.status());
              created->run->ForgetJournal();
              MakeNewest({.run = std::move(created->run), .step = step}, std::move(done));
            });
}

// The run's state is one of the past: it is written again, so that it is what a restart finds, whatever came after it.
void RunRegistry::MakeNewest(Restored restored, RewindDone done) {
  Run* const run = restored.run.get();
  run->CheckpointAnew([this, restored = std::move(restored),
                       done = std::move(done)](const absl::StatusOr<CheckpointWritten>& written) mutable {
    const std::string run_id = restored.run->spec().run_id;
    InTurn(run_id, [this, restored = std::move(restored), done = std::move(done), why = written.status()]() mutable {
      if (why.ok()) return done(EndRestore(restored));
      done(
          absl::Status(why.code(), absl::StrCat("the run is restored in memory, and a restart of the daemon would undo "
                                                "that, since it could not be written: ",
                                                why.message())));
    });
  });
}

absl::StatusOr<Rewound> RunRegistry::EndRestore(const Restored& restored) {
  RETURN_IF_ERROR(CheckThere(*restored.run));
  if (!restored.lived) {
    ASSIGN_OR_RETURN(const std::shared_ptr<RunFolder> folder, options_.storage->FolderOf(restored.run->spec().run_id));
    RETURN_IF_ERROR(folder->SetAside(restored.step));
  }
  return Rewound{restored.step, restored.run->Status().generation};
}

absl::Status RunRegistry::RestoreLiving(const CheckpointReader& checkpoint, Run* run) {
  if (checkpoint.manifest().spec_sha256() != run->spec_sha256()) {
    ASSIGN_OR_RETURN(const CreateRequest existing, RequestOf(checkpoint));
    return absl::FailedPreconditionError(
        absl::StrCat(checkpoint.folder(),
                     " is from before the run was amended; delete the run with --keep-checkpoints, and restore "
                     "it then"));
  }
  absl::Status status;
  absl::Notification answered;
  run->Restore(checkpoint, Progress(), [&](const absl::StatusOr<Rewound>& rewound) {
    status = rewound.status();
    answered.Notify();
  });
  answered.WaitForNotification();
  CountDamage(status, run);
  return status;
}

}  // namespace ballast
