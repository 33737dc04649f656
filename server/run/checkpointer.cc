#include "server/run/checkpointer.h"

#include <algorithm>
#include <limits>
#include <optional>
#include <utility>

#include "server/base/clock.h"
#include "server/base/log.h"
#include "server/storage/checkpoint_facts.h"

namespace ballast {

std::string_view TriggerName(CheckpointTrigger trigger) {
  switch (trigger) {
    case CheckpointTrigger::kInterval:
      return "interval";
    case CheckpointTrigger::kRequest:
      return "request";
    case CheckpointTrigger::kDrain:
      return "drain";
  }
  return "";
}

Checkpointer::Checkpointer(Environment environment)
    : environment_(std::move(environment)),
      writer_(
          {.fs = environment_.storage.fs, .threads = environment_.storage.threads, .rate = environment_.storage.rate}),
      last_begun_s_(MonotonicSeconds()) {}

bool Checkpointer::Due(uint64_t step) const {
  if (!ended_.ok() || writing_) return false;
  const CheckpointSettings& settings = *environment_.spec->checkpoints;
  if (!asked_.empty() || replaced_ || wanted_) return true;
  if (settings.every_steps > 0 && step % settings.every_steps == 0) return true;
  return EveryS() > 0 && MonotonicSeconds() - last_begun_s_ >= EveryS();
}

bool Checkpointer::WantsNow() const {
  if (!ended_.ok() || writing_) return false;
  if (!asked_.empty() || replaced_ || wanted_) return true;
  return closed_ != begun_step_ && EveryS() > 0 && MonotonicSeconds() - last_begun_s_ >= EveryS();
}

double Checkpointer::EveryS() const { return environment_.spec->part ? 0 : environment_.spec->checkpoints->every_s; }

void Checkpointer::OnBegun(uint64_t snapshot) {
  environment_.snapshots->Pin(snapshot);
  const uint64_t step = environment_.snapshots->PinnedMemory(snapshot).result.step;
  last_begun_s_ = MonotonicSeconds();
  writing_ =
      Writing{.snapshot = snapshot,
              .step = step,
              .trigger = asked_.empty() ? CheckpointTrigger::kInterval : trigger_,
              .waiting = std::exchange(asked_, {}),
              .began_s = last_begun_s_,
              .replaces = !replaced_ && durable_step_ == step && last_.place.step == step ? last_.place.number : 0};
  begun_step_ = step;
  replaced_ = wanted_ = false;
  environment_.on_begun(step);
  environment_.on_writing(true);
  environment_.snapshots->WhenSaved(snapshot, [this, snapshot](bool saved) { OnSaved(snapshot, saved); });
}

void Checkpointer::OnSaved(uint64_t snapshot, bool saved) {
  if (!saved || !ended_.ok()) return OnWritten(absl::CancelledError("the step was undone before it was written"));
  writing_->snapshot_seconds = MonotonicSeconds() - writing_->began_s;
  writing_->stall_seconds = environment_.snapshots->PinnedStallSeconds(snapshot);
  const RunFigures figures = environment_.figures();
  CheckpointSource source{.spec = environment_.spec,
                          .canonical_spec = environment_.canonical_spec,
                          .store = environment_.store,
                          .codec = environment_.storage.codec,
                          .image = environment_.snapshots->PinnedImage(snapshot),
                          .memory = &environment_.snapshots->PinnedMemory(snapshot),
                          .counts = &environment_.snapshots->PinnedCounts(snapshot),
                          .figures = figures};
  BeginAtWriter();
  writer_.Write({.folder = environment_.storage.folder,
                 .run_id = environment_.spec->run_id,
                 .spec_sha256 = environment_.spec_sha256,
                 .step = writing_->step,
                 .generation = figures.generation,
                 .content = [source = std::move(source)] { return MakeContent(source); },
                 .cancelled = writing_->cancelled,
                 .retain = environment_.spec->checkpoints->retain,
                 .replaces = writing_->replaces,
                 .spares = environment_.spec->part ? std::optional(kept_step_) : std::nullopt},
                [this](absl::StatusOr<CheckpointWritten> written) {
                  PostFromWriter([this, written = std::move(written)]() mutable { OnWritten(std::move(written)); });
                });
}

void Checkpointer::OnWritten(absl::StatusOr<CheckpointWritten> written) {
  Writing writing = *std::exchange(writing_, std::nullopt);
  environment_.snapshots->Unpin(writing.snapshot);
  environment_.on_writing(false);
  const bool undone = *writing.cancelled;
  if (written.ok() && !undone) {
    durable_step_ = writing.step;
    last_ = *written;
    aside_ = absl::OkStatus();  // it is newer than any that is undone
  }
  if (!written.ok()) begun_step_ = 0;
  if (undone_) OnWrittenSince(undone ? absl::CancelledError("a rewind undid it") : written.status());
  // One that a rewind or the run's end gave up has not failed.
  if (written.ok() || !absl::IsCancelled(written.status())) {
    environment_.on_written({.trigger = writing.trigger,
                             .step = writing.step,
                             .written = written,
                             .snapshot_seconds = writing.snapshot_seconds,
                             .stall_seconds = writing.stall_seconds});
  }
  environment_.on_over(written.ok() && !undone);
  if (undone && ended_.ok()) {
    // Who has asked wants the state that there is, whichever it is.
    for (Done& done : writing.waiting) asked_.push_back(std::move(done));
    return;
  }
  for (Done& done : writing.waiting) done(ended_.ok() ? written : absl::StatusOr<CheckpointWritten>(ended_));
}

void Checkpointer::Ask(CheckpointTrigger trigger, Done done) {
  if (!ended_.ok()) return done(ended_);
  if (!replaced_ && writing_ && writing_->step == closed_) return writing_->waiting.push_back(std::move(done));
  if (!replaced_ && !wanted_ && durable_step_ == closed_ && last_.place.step == closed_) {
    if (trigger == CheckpointTrigger::kRequest) environment_.storage.folder->OfferAgain(last_.place);
    return done(last_);
  }
  trigger_ = trigger;
  asked_.push_back(std::move(done));
}

void Checkpointer::OnRewound(uint64_t to_step) {
  if (!ended_.ok()) return;
  if (writing_ && writing_->step > to_step) *writing_->cancelled = true;
  if (kept_step_ > to_step) kept_step_ = 0;
  if (undone_) undone_->after_step = std::min(undone_->after_step, to_step);
  if (aside_.ok() && durable_step_ <= to_step && (!writing_ || writing_->step <= to_step)) return;
  aside_ = absl::OkStatus();
  begun_step_ = 0;
  if (durable_step_ > to_step) durable_step_ = 0;
  ++setting_aside_;
  BeginAtWriter();
  writer_.Run([this, folder = environment_.storage.folder, to_step] {
    const auto all_undone = folder->NewestIfAllAfter(to_step);
    if (all_undone.value_or(0) > 0) {
      return PostFromWriter([this, to_step, last = *all_undone] { OnAllUndone({to_step, last}); });
    }
    SetAsideAtWriter({to_step, std::numeric_limits<uint64_t>::max()});
  });
}

// On the writer's thread.
void Checkpointer::SetAsideAtWriter(const Undone& undone) {
  RunFolder& folder = *environment_.storage.folder;
  const absl::Status aside = folder.SetAside(undone.after_step, undone.last_number);
  auto newest = aside.ok() ? NewestIn(environment_.storage.fs, folder) : absl::StatusOr<CheckpointWritten>(aside);
  PostFromWriter([this, to_step = undone.after_step, newest = std::move(newest)] { OnSetAside(to_step, newest); });
}

void Checkpointer::OnSetAside(uint64_t to_step, const absl::StatusOr<CheckpointWritten>& newest) {
  --setting_aside_;
  if (durable_step_ == 0) {
    const CheckpointWritten durable = newest.value_or(CheckpointWritten{});
    durable_step_ = durable.place.step;
    environment_.on_durable(durable);
  }
  if (!newest.ok()) OnNotSetAside(to_step, newest.status());
  AnswerSetAside();
}

void Checkpointer::OnAllUndone(const Undone& undone) {
  --setting_aside_;
  if (durable_step_ == 0) environment_.on_durable({});
  const Undone before = undone_.value_or(undone);
  undone_ = Undone{std::min(before.after_step, undone.after_step), std::max(before.last_number, undone.last_number)};
  wanted_ = true;
  environment_.on_wanted();
}

void Checkpointer::OnWrittenSince(const absl::Status& written) {
  if (absl::IsCancelled(written)) {
    wanted_ = true;
    return;
  }
  if (!written.ok()) {
    OnNotSetAside(undone_->after_step, written);
    undone_->told = true;
    return AnswerSetAside();
  }
  ++setting_aside_;
  BeginAtWriter();
  writer_.Run([this, undone = *std::exchange(undone_, std::nullopt)] { SetAsideAtWriter(undone); });
}

void Checkpointer::OnNotSetAside(uint64_t to_step, const absl::Status& why) {
  aside_ = why;
  Log(LogLevel::kError, "checkpoint",
      "checkpoints of steps that were undone could not be set aside: a restart may bring them back",
      {{"run_id", environment_.spec->run_id}, {"step", to_step}, {"err", std::string(why.message())}});
}

void Checkpointer::WhenSetAside(absl::AnyInvocable<void(absl::Status)> done) {
  when_set_aside_.push_back(std::move(done));
  AnswerSetAside();
}

void Checkpointer::AnswerSetAside() {
  if (ended_.ok() && (setting_aside_ > 0 || (undone_ && !undone_->told))) return;
  for (auto& done : std::exchange(when_set_aside_, {})) done(aside_);
}

void Checkpointer::OnRestored(CheckpointWritten from) {
  closed_ = durable_step_ = begun_step_ = from.place.step;
  last_ = std::move(from);
  last_begun_s_ = MonotonicSeconds();
}

void Checkpointer::End(const absl::Status& status) {
  ended_ = status;
  for (Done& done : std::exchange(asked_, {})) done(status);
  if (writing_) *writing_->cancelled = true;
  AnswerSetAside();
}

void Checkpointer::BeginAtWriter() {
  absl::MutexLock lock(&at_writer_->mu);
  ++at_writer_->count;
}

void Checkpointer::PostFromWriter(Strand::Task task) {
  const std::shared_ptr<AtWriter> at_writer = at_writer_;
  environment_.strand->Post(std::move(task));
  absl::MutexLock lock(&at_writer->mu);
  --at_writer->count;
}

bool Checkpointer::at_writer() const {
  absl::MutexLock lock(&at_writer_->mu);
  return at_writer_->count > 0;
}

void Checkpointer::WaitWritten() {
  const std::shared_ptr<AtWriter> at_writer = at_writer_;
  const auto none = [&]() ABSL_SHARED_LOCKS_REQUIRED(at_writer->mu) { return at_writer->count == 0; };
  absl::MutexLock lock(&at_writer->mu);
  at_writer->mu.Await(absl::Condition(&none));
}

}  // namespace ballast
