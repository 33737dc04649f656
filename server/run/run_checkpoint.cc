// How a run is written to the disk when somebody asks for it, and how it becomes what a checkpoint says.
#include <string>
#include <utility>

#include "absl/strings/str_cat.h"

#include "server/base/clock.h"
#include "server/base/status_macros.h"
#include "server/run/checkpoint_content.h"
#include "server/run/run.h"

namespace ballast {

void Run::Checkpoint(CheckpointTrigger trigger, Checkpointer::Done done) {
  Post([this, trigger, done = std::move(done)]() mutable {
    if (ended_ || closed_) return done(Gone());
    driver_->Checkpoint(trigger, std::move(done));
  });
}

void Run::CheckpointAnew(Checkpointer::Done done) {
  Post([this, done = std::move(done)]() mutable {
    if (ended_ || closed_) return done(Gone());
    driver_->executor().OnReplaced();
    driver_->Checkpoint(CheckpointTrigger::kRequest, std::move(done));
  });
}

absl::StatusOr<RunFigures> Run::Bring(const CheckpointReader& checkpoint) {
  SnapshotRing* ring = nullptr;
  std::optional<uint64_t> id;
  StoreImage* image = nullptr;
  PostAndWait([&] {
    if (ended_ || closed_) return;
    ring = &driver_->executor().rewinder().snapshots();
    id = ring->BeginBringing();
    if (id) image = ring->PinnedImage(*id);
  });
  if (ring == nullptr) return Gone();
  if (!id) {
    return absl::UnavailableError(
        absl::StrCat("run '", spec_.run_id, "' is being written to the disk: ask again when that is done"));
  }
  // Copies of a snapshot that had that place, and was dropped, may still be under way.
  store_->WaitIdle();
  auto read = ReadContent(checkpoint, spec_, *store_, *storage_.codec, storage_.threads, image);
  absl::StatusOr<RunFigures> figures = absl::UnknownError("");
  PostAndWait([&] {
    if (!read.ok()) ring->Unpin(*id);
    if (!read.ok()) return void(figures = read.status());
    figures = read->figures;
    ring->Bring(*id, std::move(read->memory), std::move(read->counts));
  });
  return figures;
}

void Run::GoOnFrom(const RunFigures& figures, const CheckpointWritten& from, std::string restored, bool older) {
  PostAndWait([&] {
    driver_->GoOnFrom(figures, from);
    loader_->GoOnFrom(static_cast<uint32_t>(spec_.tensors.size()));
    metrics_->OnRestored(older ? "older" : "latest");
    metrics_->OnDurable(from.place.step);
    board_.Write([&](RunStatus& s) {
      s.durability->durable_step = from.place.step;
      s.durability->checkpoint_bytes = from.bytes;
      s.durability->written_at_s = MonotonicSeconds() - from.age_seconds;
      s.durability->restored = std::move(restored);
    });
  });
}

}  // namespace ballast
