// A run that is restored from a checkpoint which was brought to this machine.
#include <utility>

#include "absl/strings/str_cat.h"

#include "server/base/status_macros.h"
#include "server/base/utf8.h"
#include "server/run/run_registry.h"
#include "server/storage/import_folder.h"
#include "server/storage/storage.h"

namespace ballast {

absl::StatusOr<CheckpointReader> RunRegistry::Examine(const std::string& run_id, const std::string& from,
                                                      uint64_t step) const {
  if (!has_storage()) return NoStorage();
  bool is_its = false;
  const auto may = [&](const CheckpointReader& checkpoint) -> absl::Status {
    ASSIGN_OR_RETURN(const CreateRequest request, RequestOf(checkpoint));
    is_its = request.spec.run_id == run_id;
    const auto living = Find(run_id);
    const bool is_there = living.ok() && (*living)->Status().state != RunState::kFailed &&
                          (*living)->spec_sha256() == request.spec_sha256;
    if (is_its) return is_there ? (*living)->CheckGoesBack(checkpoint) : absl::OkStatus();
    return absl::FailedPreconditionError(absl::StrCat(checkpoint.folder(), " is of run '", request.spec.run_id,
                                                      "', not of '", run_id, "': name that run"));
  };
  auto checkpoint = ExamineImported(
      options_.storage->fs(), options_.storage->import_dir(), from, step, [this] { return !draining(); }, may);
  if (checkpoint.ok() || is_its || options_.tells_of_all) return checkpoint;
  // The same for another run's checkpoint as for none.
  return absl::PermissionDeniedError(absl::StrCat("there is no checkpoint of run '", run_id, "' at '",
                                                  ValidUtf8(from, 200), "' that this daemon may read"));
}

void RunRegistry::RestoreFrom(std::string run_id, CheckpointReader checkpoint, Payer payer,
                              absl::AnyInvocable<void(absl::StatusOr<Rewound>)> done) {
  InTurn(run_id, [this, run_id, checkpoint = std::move(checkpoint), payer = std::move(payer),
                  done = std::move(done)]() mutable {
    RestoreImported(run_id, std::move(checkpoint), payer, std::move(done));
  });
}

void RunRegistry::RestoreImported(const std::string& run_id, CheckpointReader checkpoint, const Payer& payer,
                                  RewindDone done) {
  if (draining()) return done(absl::UnavailableError("the daemon is shutting down; no run is restored"));
  const absl::StatusOr<CreateRequest> request = RequestOf(checkpoint);
  if (!request.ok()) return done(request.status());
  if (const auto living = Find(run_id); living.ok() && (*living)->spec_sha256() != request->spec_sha256) {
    return done(absl::FailedPreconditionError(
        absl::StrCat("run '", run_id, "' exists with another spec than ", checkpoint.folder(), ": ",
                     request->difference((*living)->canonical_spec(), request->canonical_spec),
                     "; delete the run first, if it is to become this one")));
  }
  RestoreOf(run_id, checkpoint, {.imported = checkpoint, .payer = payer}, std::move(done));
}

}  // namespace ballast
