// Runs and the disk: what is there when the daemon starts, or a run is created, and what is written.
#include <algorithm>
#include <utility>

#include "absl/strings/str_cat.h"
#include "absl/strings/str_join.h"
#include "absl/synchronization/blocking_counter.h"
#include "absl/synchronization/notification.h"
#include "proto/checkpoint/manifest.h"

#include "server/base/log.h"
#include "server/base/status_macros.h"
#include "server/base/utf8.h"
#include "server/metrics/metric_table.h"
#include "server/run/run_registry.h"
#include "server/storage/checkpoint_facts.h"
#include "server/storage/damage.h"

namespace ballast {
namespace {

// Of what a reader says.
bool IsDamage(const absl::Status& status) { return absl::IsDataLoss(status) || DamageOf(status) == "version"; }

std::string JoinMessages(const std::vector<absl::Status>& statuses) {
  return absl::StrJoin(statuses, "; ",
                       [](std::string* out, const absl::Status& s) { absl::StrAppend(out, s.message()); });
}

// Of a run that ends with the daemon.
std::string DescribeMissed(const Run& run, const absl::Status& why) {
  const RunStatus status = run.Status();
  return absl::StrCat("run '", run.spec().run_id, "' was at step ", status.last_result ? status.last_result->step : 0,
                      ", and durable is step ", status.durability ? status.durability->durable_step : 0, ": ",
                      why.message());
}

}  // namespace

void RunRegistry::CountDamage(const absl::Status& status, Run* run) {
  if (IsDamage(status)) run->metrics().OnVerifyFailed(DamageOf(status));
}

RunStorage RunRegistry::StorageOf(const std::shared_ptr<RunFolder>& folder) const {
  if (!has_storage()) return {};
  return {.fs = options_.storage->fs(),
          .threads = options_.storage->threads(),
          .rate = options_.storage->rate(),
          .codec = options_.codec,
          .folder = folder,
          .on_journal_sync = [metrics = options_.metrics](double seconds) { metrics->OnJournalSync(seconds); }};
}

std::function<void()> RunRegistry::Progress() {
  return [this] { strand_.Progress(); };
}

absl::Status RunRegistry::NoStorage() const {
  return absl::FailedPreconditionError(
      "this daemon has no storage, and its runs are in its memory alone: start it with storage.dir");
}

absl::StatusOr<std::vector<CheckpointReader>> RunRegistry::Candidates(const CreateRequest& request,
                                                                      std::optional<uint64_t> only,
                                                                      std::vector<absl::Status>* damaged) {
  const std::string& run_id = request.spec.run_id;
  ASSIGN_OR_RETURN(const std::shared_ptr<RunFolder> folder, options_.storage->FolderOf(run_id));
  ASSIGN_OR_RETURN(const std::vector<CheckpointEntry> entries, folder->List());
  std::vector<CheckpointReader> candidates;
  for (auto entry = entries.rbegin(); entry != entries.rend(); ++entry) {
    if (only ? entry->place.number != *only : !entry->counts()) continue;
    auto checkpoint = CheckpointReader::Open(options_.storage->fs(), folder->PathOf(*entry));
    if (absl::IsDataLoss(checkpoint.status())) {
      damaged->push_back(checkpoint.status());
      continue;
    }
    RETURN_IF_ERROR(checkpoint.status());
    if (checkpoint->manifest().spec_sha256() == request.spec_sha256) {
      candidates.push_back(*std::move(checkpoint));
      continue;
    }
    if (!candidates.empty()) break;  // from before it was amended
    ASSIGN_OR_RETURN(const CreateRequest existing, RequestOf(*checkpoint));
    return absl::FailedPreconditionError(
        absl::StrCat("run '", run_id, "' is on the disk (", checkpoint->folder(),
                     ") with another spec: ", request.difference(existing.canonical_spec, request.canonical_spec),
                     "; use another run_id, or delete the run (`ballastctl delete ", run_id, "`)"));
  }
  return candidates;
}

absl::StatusOr<RunRegistry::CreateRequest> RunRegistry::RequestOf(const CheckpointReader& checkpoint) const {
  const v1::CheckpointManifest& manifest = checkpoint.manifest();
  ASSIGN_OR_RETURN(const std::string json, checkpoint.ReadText(kSpecName));
  ASSIGN_OR_RETURN(CreateRequest request,
                   options_.read_spec(json, manifest.spec_sha256(), absl::StrCat(checkpoint.folder(), "/", kSpecName)));
  if (request.spec.run_id == manifest.run_id()) return request;
  return absl::DataLossError(absl::StrCat(checkpoint.folder(), "/", kSpecName, " is of run '", request.spec.run_id,
                                          "', and ", kManifestName, " beside it of run '", manifest.run_id(), "'"));
}

absl::Status RunRegistry::GoOnFromNewest(const std::vector<CheckpointReader>& candidates, bool replays,
                                         std::vector<absl::Status> damaged, Run* run) {
  const std::string& run_id = run->spec().run_id;
  for (const absl::Status& s : damaged) CountDamage(s, run);
  for (const CheckpointReader& checkpoint : candidates) {
    const absl::StatusOr<RunFigures> figures = run->Bring(checkpoint, Progress());
    CountDamage(figures.status(), run);
    if (absl::IsDataLoss(figures.status())) {
      damaged.push_back(figures.status());
      continue;
    }
    RETURN_IF_ERROR(figures.status());
    const uint64_t step = checkpoint.manifest().step();
    std::string restored = checkpoint.folder();
    if (!damaged.empty()) absl::StrAppend(&restored, ", since newer ones are damaged: ", JoinMessages(damaged));
    run->GoOnFrom(*figures, WrittenOf(checkpoint), restored, !damaged.empty());
    if (damaged.empty()) {
      Log(LogLevel::kInfo, "restored", "run restored from its newest checkpoint",
          {{"run_id", run_id}, {"step", step}, {"path", checkpoint.folder()}});
    } else {
      ASSIGN_OR_RETURN(const std::shared_ptr<RunFolder> folder, options_.storage->FolderOf(run_id));
      RETURN_IF_ERROR(folder->PassOver(WrittenOf(checkpoint).place.number));
      Log(LogLevel::kError, "restored", "run restored from an older checkpoint: newer ones are damaged",
          {{"run_id", run_id}, {"step", step}, {"path", checkpoint.folder()}, {"err", JoinMessages(damaged)}});
    }
    const absl::Status replayed = replays ? ReplayJournalOf(checkpoint, figures->journal, run) : absl::OkStatus();
    CountDamage(replayed, run);
    return replayed;
  }
  return absl::DataLossError(absl::StrCat(
      "run '", run_id, "' is on the disk, and none of its checkpoints can be read: ", JoinMessages(damaged),
      ". Bring one back, or delete the run (`ballastctl delete ", run_id, "`) to begin anew"));
}

void RunRegistry::RestoreAll() {
  absl::Notification done;
  strand_.Post([&] {
    const auto run_ids = options_.storage->RunIds();
    if (!run_ids.ok()) {
      Log(LogLevel::kError, "restored", "the runs on the disk cannot be listed",
          {{"err", std::string(run_ids.status().message())}});
    }
    for (const std::string& run_id : run_ids.value_or(std::vector<std::string>())) {
      if (absl::Status s = RestoreFromDisk(run_id); !s.ok()) {
        Log(LogLevel::kError, "restored", "a run stays on the disk: it cannot be restored now",
            {{"run_id", run_id}, {"err", std::string(s.message())}});
      }
    }
    done.Notify();
  });
  done.WaitForNotification();
}

absl::StatusOr<std::optional<RunRegistry::CreateRequest>> RunRegistry::NewestRequest(const std::string& run_id) const {
  ASSIGN_OR_RETURN(const std::shared_ptr<RunFolder> folder, options_.storage->FolderOf(run_id));
  ASSIGN_OR_RETURN(const std::vector<CheckpointEntry> entries, folder->List());
  absl::Status damaged;
  for (auto entry = entries.rbegin(); entry != entries.rend(); ++entry) {
    if (!entry->counts()) continue;
    auto checkpoint = CheckpointReader::Open(options_.storage->fs(), folder->PathOf(*entry));
    auto request = checkpoint.ok() ? RequestOf(*checkpoint) : absl::StatusOr<CreateRequest>(checkpoint.status());
    if (absl::IsDataLoss(request.status())) {
      damaged = request.status();
      continue;
    }
    RETURN_IF_ERROR(request.status());
    if (request->spec.run_id == run_id) return *std::move(request);
    return absl::FailedPreconditionError(absl::StrCat(checkpoint->folder(), " is of run '", request->spec.run_id,
                                                      "': give the folder ", folder->path(), " that name"));
  }
  RETURN_IF_ERROR(damaged);
  return std::nullopt;
}

absl::Status RunRegistry::RestoreFromDisk(const std::string& run_id) {
  auto request = NewestRequest(run_id);
  absl::Status why = request.status();
  if (request.ok() && *request) {
    why = CreateNow(**std::move(request)).status();
    if (absl::IsDataLoss(why)) return why;  // the run has counted it
  }
  if (!why.ok()) ShowLost(run_id, why);
  return why;
}

// There is no run that could count it: its series show for a minute, as those of one that has ended.
void RunRegistry::ShowLost(const std::string& run_id, const absl::Status& why) const {
  const auto lost = options_.metrics->AddRun({.run_id = ValidUtf8(run_id), .durable = true});
  lost->OnRestored("failed");
  if (IsDamage(why)) lost->OnVerifyFailed(DamageOf(why));
}

void RunRegistry::Checkpoint(std::string run_id, absl::AnyInvocable<void(absl::StatusOr<Checkpointed>)> done) {
  if (!has_storage()) return done(NoStorage());
  const auto run = Find(run_id);
  if (!run.ok()) return done(run.status());
  (*run)->Checkpoint(CheckpointTrigger::kRequest, [done = std::move(done)](auto written) mutable {
    if (!written.ok()) return done(written.status());
    done(Checkpointed{.step = written->place.step,
                      .number = written->place.number,
                      .folder = written->folder,
                      .bytes = written->bytes,
                      .seconds = written->write_seconds + written->publish_seconds});
  });
}

absl::StatusOr<std::vector<RunRegistry::StoredCheckpoint>> RunRegistry::Checkpoints(const std::string& run_id) const {
  if (!has_storage()) return NoStorage();
  ASSIGN_OR_RETURN(const bool there, options_.storage->Has(run_id));
  if (!there) {
    RETURN_IF_ERROR(Find(run_id).status());
    return std::vector<StoredCheckpoint>();
  }
  ASSIGN_OR_RETURN(const std::shared_ptr<RunFolder> folder, options_.storage->FolderOf(run_id));
  ASSIGN_OR_RETURN(const std::vector<CheckpointEntry> entries, folder->List());
  std::vector<StoredCheckpoint> stored;
  for (const CheckpointEntry& entry : entries) {
    if (!entry.counts() && entry.state != CheckpointState::kSetAside) continue;
    StoredCheckpoint one{.number = entry.place.number, .step = entry.place.step, .folder = folder->PathOf(entry)};
    const auto checkpoint = CheckpointReader::Open(options_.storage->fs(), one.folder);
    one.state = !checkpoint.ok() ? absl::StrCat("damaged: ", checkpoint.status().message())
                                 : (entry.counts() ? "kept" : "discarded");
    if (checkpoint.ok()) {
      one.generation = checkpoint->manifest().generation();
      one.bytes = BytesOf(checkpoint->manifest());
      one.written_at = checkpoint->manifest().written_at();
    }
    stored.push_back(std::move(one));
  }
  const auto newest = std::find_if(stored.rbegin(), stored.rend(), [](const auto& one) { return one.state == "kept"; });
  if (newest != stored.rend()) newest->state = "newest";
  return stored;
}

void RunRegistry::ShowStorage() {
  if (!has_storage()) return;
  const auto room = options_.storage->Space();
  const bool was_unknown = std::exchange(room_unknown_, !room.ok());
  if (room.ok()) return options_.metrics->SetStorage(room->free_bytes, room->size_bytes);
  if (was_unknown) return;
  Log(LogLevel::kWarn, "storage", "how much room is on the disk cannot be read; the metrics keep what they had",
      {{"err", std::string(room.status().message())}});
}

void RunRegistry::OnCopied(const std::string& run_id, std::string_view result) {
  options_.metrics->Count("ballast_checkpoint_hooks_total", result);
  if (const auto run = Find(run_id); run.ok()) (*run)->metrics().OnCopied(result);
}

void RunRegistry::CheckpointAll() {
  if (!has_storage()) return;
  const auto all = All();
  std::vector<absl::Status> written(all.size());
  absl::BlockingCounter asked(static_cast<int>(all.size()));
  for (size_t i = 0; i < all.size(); ++i) {
    all[i]->WriteLast("the daemon was stopped in the middle of the step", [&written, &asked, i](absl::Status status) {
      written[i] = std::move(status);
      asked.DecrementCount();
    });
  }
  asked.Wait();
  std::vector<std::string> missed;
  for (size_t i = 0; i < all.size(); ++i) {
    if (!written[i].ok()) missed.push_back(DescribeMissed(*all[i], written[i]));
  }
  wrote_all_ = missed.empty();
  if (missed.empty()) return;
  Log(LogLevel::kError, "not_written", "the last steps of runs could not be written: the next daemon has older ones",
      {{"err", absl::StrJoin(missed, "; ")}});
}

}  // namespace ballast
