// When a run is written to the disk, and what is there of it.
#include <algorithm>

#include "absl/strings/str_cat.h"

#include "server/base/clock.h"
#include "server/convert/convert.h"

namespace ballast {
namespace {

// One that is damaged must leave another; more than these are better taken farther apart.
constexpr uint32_t kLeastCheckpoints = 2, kMostCheckpoints = 100;

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
  out.set_last_failure(durability.last_failure);
  out.set_restored(durability.restored);
  out.set_writing(durability.writing);
  return out;
}

v1::CheckpointResponse FromCheckpointed(const RunRegistry::Checkpointed& checkpointed) {
  v1::CheckpointResponse out;
  out.set_step(checkpointed.step);
  out.set_number(checkpointed.number);
  out.set_folder(checkpointed.folder);
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
    c->set_folder(checkpoint.folder);
    c->set_written_at(checkpoint.written_at);
    c->set_state(checkpoint.state);
  }
  return out;
}

}  // namespace ballast
