// When a run is written to the disk, and what is there of it.
#include <algorithm>

#include "absl/strings/str_cat.h"

#include "server/base/clock.h"
#include "server/base/status_macros.h"
#include "server/base/utf8.h"
#include "server/convert/convert.h"

namespace ballast {
namespace {

// One that is damaged must leave another; more than these are better taken farther apart.
constexpr uint32_t kLeastCheckpoints = 2, kMostCheckpoints = 100;
constexpr uint32_t kMostJournalSteps = 10'000;

absl::StatusOr<DurabilityMode> ToDurability(v1::DurabilityMode mode) {
  switch (mode) {
    case v1::DURABILITY_MODE_CHECKPOINT:
      return DurabilityMode::kCheckpoint;
    case v1::DURABILITY_MODE_JOURNAL:
      return DurabilityMode::kJournal;
    case v1::DURABILITY_MODE_JOURNAL_SYNC:
      return DurabilityMode::kJournalSync;
    default:
      return absl::InvalidArgumentError(
          absl::StrCat("checkpoint.durability is ", static_cast<int>(mode),
                       ", which this daemon does not know; wanted: "
                       "DURABILITY_MODE_CHECKPOINT, DURABILITY_MODE_JOURNAL or DURABILITY_MODE_JOURNAL_SYNC"));
  }
}

absl::Status TakeJournal(const v1::CheckpointPolicy& policy, CheckpointSettings* settings) {
  ASSIGN_OR_RETURN(settings->durability, ToDurability(policy.durability()));
  const bool journaled = settings->durability != DurabilityMode::kCheckpoint;
  if (policy.journal_steps() > kMostJournalSteps || (policy.journal_steps() != 0 && !journaled)) {
    return absl::InvalidArgumentError(absl::StrCat(
        "checkpoint.journal_steps is ", policy.journal_steps(), "; wanted: 0 (the default, ", kJournalSteps, ") to ",
        kMostJournalSteps, ", and 0 where durability is DURABILITY_MODE_CHECKPOINT"));
  }
  if (journaled) settings->journal_steps = policy.journal_steps() == 0 ? kJournalSteps : policy.journal_steps();
  return absl::OkStatus();
}

}  // namespace

absl::Status TakeCheckpoints(const v1::RunSpec& spec, bool has_storage, RunSpec* made) {
  if (!has_storage) {
    if (!spec.has_checkpoint()) return absl::OkStatus();
    return absl::InvalidArgumentError(
        "checkpoint is given, but this daemon has no storage, and its runs are in its memory alone: leave it unset, or "
        "start the daemon with storage.dir");
  }
  const v1::CheckpointPolicy& policy = spec.checkpoint();
  if (!(policy.every_seconds() >= 0 && policy.every_seconds() <= 1e6)) {
    return absl::InvalidArgumentError(absl::StrCat("checkpoint.every_seconds is ", policy.every_seconds(),
                                                   "; wanted: 0 (not by time) to 1000000 seconds"));
  }
  if (policy.retain() != 0 && (policy.retain() < kLeastCheckpoints || policy.retain() > kMostCheckpoints)) {
    return absl::InvalidArgumentError(
        absl::StrCat("checkpoint.retain is ", policy.retain(), "; wanted: ", kLeastCheckpoints, " to ",
                     kMostCheckpoints, " checkpoints, or 0 (the default, ", CheckpointSettings().retain, ")"));
  }
  CheckpointSettings settings;
  if (policy.every_steps() != 0 || policy.every_seconds() != 0) {
    settings.every_steps = policy.every_steps();
    settings.every_s = policy.every_seconds();
  }
  if (policy.retain() != 0) settings.retain = policy.retain();
  RETURN_IF_ERROR(TakeJournal(policy, &settings));
  made->checkpoints = settings;
  return absl::OkStatus();
}

v1::DurabilityStatus FromDurability(const Durability& durability) {
  v1::DurabilityStatus out;
  out.set_durable_step(durability.durable_step);
  out.set_checkpoint_bytes(durability.checkpoint_bytes);
  if (durability.written_at_s) {
    out.set_checkpoint_age_s(std::max(0.0, MonotonicSeconds() - *durability.written_at_s));
  }
  out.set_last_failure(ValidUtf8(durability.last_failure));
  out.set_restored(ValidUtf8(durability.restored));
  out.set_writing(durability.writing);
  out.set_journal_failure(ValidUtf8(durability.journal_failure));
  return out;
}

v1::CheckpointResponse FromCheckpointed(const RunRegistry::Checkpointed& checkpointed) {
  v1::CheckpointResponse out;
  out.set_step(checkpointed.step);
  out.set_number(checkpointed.number);
  out.set_folder(ValidUtf8(checkpointed.folder));
  out.set_bytes(checkpointed.bytes);
  out.set_seconds(checkpointed.seconds);
  return out;
}

v1::ListCheckpointsResponse FromStored(const std::vector<RunRegistry::StoredCheckpoint>& stored) {
  v1::ListCheckpointsResponse out;
  for (const RunRegistry::StoredCheckpoint& checkpoint : stored) {
    v1::StoredCheckpoint* c = out.add_checkpoints();
    c->set_number(checkpoint.number);
    c->set_step(checkpoint.step);
    c->set_generation(checkpoint.generation);
    c->set_bytes(checkpoint.bytes);
    c->set_folder(ValidUtf8(checkpoint.folder));
    c->set_written_at(checkpoint.written_at);
    c->set_state(ValidUtf8(checkpoint.state));
  }
  return out;
}

}  // namespace ballast
