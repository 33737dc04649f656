// How a run is written to the disk when somebody asks for it, and how it becomes what a snapshot or a checkpoint says.
#include <algorithm>
#include <optional>
#include <string>
#include <utility>

#include "absl/strings/str_cat.h"
#include "absl/synchronization/notification.h"
#include "proto/retry_after.h"

#include "server/base/clock.h"
#include "server/base/status_macros.h"
#include "server/metrics/metric_table.h"
#include "server/plan/plan.h"
#include "server/run/checkpoint_content.h"
#include "server/run/run.h"

namespace ballast {
namespace {

// When a restore may be asked for again that found the run being written.
constexpr double kAskAgainS = 0.2;

// The same updates have been made as when the journal was written.
absl::Status CheckCounts(const ParameterStore& store, const std::vector<ParameterStore::UpdateCount>& wanted) {
  for (uint32_t t = 0; t < wanted.size(); ++t) {
    const ParameterStore::UpdateCount count = store.count(t);
    if (count == wanted[t]) continue;
    return absl::DataLossError(absl::StrCat("the journal leads to ", count.updates, " updates of tensor ", t,
                                            ", the last in step ", count.step, "; wanted: ", wanted[t].updates, " and ",
                                            wanted[t].step));
  }
  return absl::OkStatus();
}

}  // namespace

void Run::Checkpoint(CheckpointTrigger trigger, Checkpointer::Done done) {
  Post([this, trigger, done = std::move(done)]() mutable {
    if (ended_ || closed_) return done(Gone());
    driver_->Checkpoint(trigger, std::move(done));
  });
}

void Run::WriteLast(std::string why, absl::AnyInvocable<void(absl::Status)> done) {
  Post([this, why = std::move(why), done = std::move(done)]() mutable {
    if (ended_ || closed_) return done(absl::OkStatus());  // as whoever ended it has seen to, or it has failed
    driver_->WriteLast(std::move(why), std::move(done));
  });
}

void Run::CheckpointAnew(Checkpointer::Done done) {
  Post([this, done = std::move(done)]() mutable {
    if (ended_ || closed_) return done(Gone());
    driver_->executor().OnReplaced();
    driver_->Checkpoint(CheckpointTrigger::kRequest, std::move(done));
  });
}

void Run::Rewind(RewindOrder order, RewindDone done) {
  Post([this, order = std::move(order), done = std::move(done)]() mutable {
    if (ended_ || closed_) return done(Gone());
    if (held_) return done(BeingAmended());  // what takes its place has copied some of the planes already
    const bool restores = order.brought.has_value();
    driver_->Rewind(std::move(order), [this, restores,
                                       done = std::move(done)](absl::StatusOr<Rewound> rewound) mutable {
      if (rewound.ok()) loader_->OnRewound();
      if (!rewound.ok()) return done(std::move(rewound));
      // Who is told of the rewind may rely on it: also after a crash. What is restored is written anew in any case.
      driver_->executor().WhenRewound([rewound = *rewound, restores, done = std::move(done)](absl::Status s) mutable {
        if (s.ok() || restores) return done(absl::StatusOr<Rewound>(rewound));
        done(absl::Status(s.code(), absl::StrCat("the run is rewound in memory, and a restart of the daemon would undo "
                                                 "that, since what came after is still on the disk: ",
                                                 s.message())));
      });
    });
  });
}

absl::Status Run::CheckGoesBack(const CheckpointReader& checkpoint) {
  const uint64_t step = checkpoint.manifest().step();
  uint64_t closed = 0;
  absl::Status gone;
  PostAndWait([&] {
    if (ended_ || closed_) return void(gone = Gone());
    closed = driver_->executor().machine().step() - 1;
  });
  if (!gone.ok() || step <= closed) return gone;
  return absl::FailedPreconditionError(
      absl::StrCat("run '", spec_.run_id, "' is at step ", closed, ", and ", checkpoint.folder(), " is of step ", step,
                   ", which is later: a run that is there only goes back. To go on from that checkpoint all the same, "
                   "keep a copy of it, delete the run (`ballastctl delete ",
                   spec_.run_id, " --keep-checkpoints`), and restore it then"));
}

void Run::Restore(const CheckpointReader& checkpoint, const std::function<void()>& progress, RewindDone done) {
  const uint64_t step = checkpoint.manifest().step();
  if (absl::Status s = CheckGoesBack(checkpoint); !s.ok()) return done(s);
  const auto brought = Read(checkpoint, progress);
  if (!brought.ok()) return done(brought.status());
  Rewind({.to_step = step, .reason = "restore", .brought = brought->id},
         [this, id = brought->id, folder = checkpoint.folder(),
          done = std::move(done)](absl::StatusOr<Rewound> rewound) mutable {
           if (rewound.ok()) board_.Write([&](RunStatus& s) { s.durability->restored = folder; });
           // The run is not there, and goes on as it was: nor may another rewind lead there.
           if (!rewound.ok() && !ended_) snapshots().Unpin(id);
           done(std::move(rewound));
         });
}

absl::StatusOr<std::optional<uint64_t>> Run::BeginBringing(SnapshotRing::OldestSnapshot oldest) {
  absl::StatusOr<std::optional<uint64_t>> id = std::optional<uint64_t>();
  PostAndWait([&] {
    if (ended_ || closed_) return void(id = Gone());
    if (snapshots().HasPlace()) return void(id = driver_->executor().rewinder().BeginBringing(oldest));
    id = WithRetryAfter(absl::UnavailableError(absl::StrCat(
                            "run '", spec_.run_id, "' is being written to the disk: ask again when that is done")),
                        kAskAgainS);
  });
  return id;
}

absl::StatusOr<Run::Brought> Run::Read(const CheckpointReader& checkpoint, const std::function<void()>& progress) {
  using enum SnapshotRing::OldestSnapshot;
  const auto read = [&](StoreImage* image) {
    return ReadContent(checkpoint, spec_, *store_, *storage_.codec, storage_.threads, progress, image);
  };
  ASSIGN_OR_RETURN(std::optional<uint64_t> id, BeginBringing(kStays));
  if (!id) {
    RETURN_IF_ERROR(read(nullptr).status());  // no snapshot goes for what cannot be read
    ASSIGN_OR_RETURN(id, BeginBringing(kMayGo));
  }
  StoreImage* image = nullptr;
  PostAndWait([&] { image = ended_ ? nullptr : snapshots().PinnedImage(*id); });
  if (image == nullptr) return Gone();
  // Copies of a snapshot that had that place, and was dropped, may still be under way.
  store_->WaitIdle();
  auto content = read(image);
  PostAndWait([&] {
    if (ended_) return void(content = Gone());
    if (!content.ok()) return snapshots().Unpin(*id);
    snapshots().Bring(*id, std::move(content->memory), std::move(content->counts));
  });
  RETURN_IF_ERROR(content.status());
  return Brought{*id, content->figures};
}

absl::StatusOr<RunFigures> Run::Bring(const CheckpointReader& checkpoint, const std::function<void()>& progress) {
  ASSIGN_OR_RETURN(const Brought brought, Read(checkpoint, progress));
  PostAndWait([&] {
    if (!ended_) snapshots().Accept(brought.id);
  });
  return brought.figures;
}

absl::Status Run::Replay(const JournalSurvey& survey, uint64_t base, uint64_t base_step,
                         const std::function<void()>& progress) {
  StepExecutor* executor = nullptr;
  PostAndWait([&] {
    executor = &driver_->executor();
    if (survey.files.empty()) executor->GoOnWithoutJournal();
  });
  if (survey.files.empty()) return absl::OkStatus();
  const JournalTarget target{.fs = storage_.fs,
                             .spec = &spec_,
                             .codec = storage_.codec,
                             .room = [&](uint32_t tensor) -> absl::Span<std::byte> {
                               return {executor->GradientRoom(tensor), SlabBytes(spec_, spec_.tensors[tensor])};
                             },
                             .update =
                                 [&](const JournaledUpdate& update) {
                                   absl::Notification done;
                                   Post([&] { executor->Replay(update, [&] { done.Notify(); }); });
                                   done.WaitForNotification();
                                   progress();
                                 },
                             .average = [&](uint64_t step) { PostAndWait([&] { executor->AverageOthers(step); }); }};
  std::optional<CheckpointedRun> last;
  if (survey.steps > 0) {
    ASSIGN_OR_RETURN(last, ReplayJournal(target, survey));
    last->figures.generation = std::max(last->figures.generation, survey.generation);
  }
  absl::Status status;
  PostAndWait([&] {
    if (last) status = CheckCounts(*store_, last->counts);
    if (!status.ok()) return;
    if (last) executor->GoOnFrom(last->figures, last->memory);
    executor->GoOnFrom(Journal::Place{.base = base, .base_step = base_step, .tail = survey.tail()});
    ShowState();
    metrics_->Count("ballast_journal_replayed_steps_total", "", static_cast<double>(survey.steps));
  });
  return status;
}

void Run::ForgetJournal() {
  PostAndWait([&] { driver_->executor().ForgetJournal(); });
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
      if (figures.ranks_held == 0) s.left_before_s = s.durability->written_at_s;  // it was written as they left
    });
    ShowState();
  });
}

}  // namespace ballast
