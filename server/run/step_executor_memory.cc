// What a run remembers of its steps: for snapshots and checkpoints, and back.
#include <utility>

#include "server/base/clock.h"
#include "server/run/step_executor.h"

namespace ballast {

std::unique_ptr<Checkpointer> StepExecutor::MakeCheckpointer(const Environment& environment) {
  if (!spec_->checkpoints) return nullptr;
  return std::make_unique<Checkpointer>(Checkpointer::Environment{
      .spec = spec_,
      .canonical_spec = environment.canonical_spec,
      .spec_sha256 = environment.spec_sha256,
      .strand = environment.strand,
      .store = environment.store,
      .snapshots = environment.snapshots.get(),
      .storage = environment.storage,
      .figures = [this] { return Figures(); },
      .on_writing = [this](bool writing) { board_->Write([&](RunStatus& s) { s.durability->writing = writing; }); },
      .on_begun =
          [this](uint64_t step) {
            reporter_.OnCheckpointBegun();
            if (journal_ != nullptr) journal_->OnCheckpointBegun(step);
          },
      .on_written = [this](const CheckpointReport& report) { reporter_.OnCheckpoint(report); },
      .on_over =
          [this](bool published) {
            shown_durable_ = checkpointer_->durable_step();
            if (journal_ == nullptr) return;
            journal_->OnCheckpointOver(published);
            OnJournalMoved();
          },
      .on_durable =
          [this](const CheckpointWritten& newest) {
            reporter_.ShowNewest(newest);
            shown_durable_ = newest.place.step;
            if (journal_ != nullptr) OnJournalMoved();
          },
      .on_wanted = [this] { settle_(); }});
}

RunFigures StepExecutor::Figures() const {
  const RunStatus status = board_->Read();
  return {.generation = machine_.generation(),
          .applied = status.applied,
          .skipped = status.skipped,
          .partial = status.partial,
          .aborted = status.aborted,
          .rewinds = status.rewinds,
          .policy = judge_.policy(),
          .ranks_held = machine_.world() == 0 ? held_before_ : CountRanks().held,
          .journal = journal_ == nullptr ? 0 : journal_->base()};
}

void StepExecutor::GoOnFrom(const RunFigures& figures, CheckpointWritten from) {
  const uint64_t step = from.place.step;
  machine_.GoOnFrom(StepMachine::Past(figures.generation + 1, step));
  judge_.set_detector(rewinder_.GoOnFrom(step).detector);
  judge_.set_policy(figures.policy);
  checkpointer_->OnRestored(std::move(from));
  awaits_journal_ = journal_ != nullptr;
  held_before_ = figures.ranks_held;
  reporter_.ShowRestored(figures);
}

void StepExecutor::OnReplaced() {
  had_since_unix_s_ = UnixSeconds();
  if (checkpointer_ != nullptr && !results_.empty()) checkpointer_->OnReplaced();
  if (journal_ != nullptr) journal_->OnReplaced();
}

// A step that is torn closes while some of its tensors are being updated: it is kept with them, and no other step is begun
// before that.
void StepExecutor::KeepClosed() {
  if (unkept_ && updater_.idle()) Keep(*unkept_);
}

void StepExecutor::Keep(const Unkept& closed) {
  const Unkept kept = closed;
  unkept_.reset();
  had_since_unix_s_ = UnixSeconds();
  if (kept.averages) AverageOthers(kept.step);
  LogClosed(kept);
  if (kept.torn) return;
  rewinder_.OnClosed(kept.step, [this] { return Memory(); });
  MakeVersionIfWanted();
}

void StepExecutor::CheckpointIfWanted() {
  if (checkpointer_ == nullptr || awaits_journal_ || results_.empty() || gate_.replacing() || !gate_.weights_loaded())
    return;
  checkpointer_->set_closed(results_.back().step);
  if (journal_ != nullptr && journal_->WantsCheckpoint()) checkpointer_->Want();
  // The step that is open may wait for the very rank that asks.
  if (!checkpointer_->WantsNow() || !updater_.idle() || judge_.awaits_answers()) return;
  if (machine_.step_open() && machine_.UpdatedAny()) return;
  rewinder_.Checkpoint([this] { return Memory(); });
}

void StepExecutor::MakeVersionIfWanted() {
  if (followers_ == nullptr || !followers_->Wants(machine_.generation(), machine_.step() - 1)) return;
  if (gate_.replacing() || !gate_.weights_loaded() || !updater_.idle() || judge_.awaits_answers()) return;
  if (rewinder_.due() || (machine_.step_open() && machine_.UpdatedAny())) return;  // undone, or in the middle of one
  followers_->Make(machine_.generation(), machine_.step() - 1,
                   had_since_unix_s_ > 0 ? had_since_unix_s_ : UnixSeconds());
}

RunMemory StepExecutor::Memory() const {
  RunMemory memory{
      .result = results_.back(), .stopped = gate_.stopped(), .client_states = {}, .detector = judge_.detector()};
  updater_.Remember(&memory);
  for (const RankLink& link : links_) memory.client_states.push_back(link.state());
  return memory;
}

void StepExecutor::Recall(const RunMemory& memory) {
  updater_.GoBackTo(memory);
  for (uint32_t rank = 0; rank < links_.size(); ++rank) links_[rank].GoBackTo(memory.client_states[rank]);
  judge_.GoBackTo(memory.detector);
  settings_.end_values.clear();
  results_ = {memory.result};
  held_results_.clear();
  unkept_.reset();
  had_since_unix_s_ = UnixSeconds();
  gate_.GoBackTo(memory.stopped);
  reporter_.ShowRewound(memory);
  ShowRanks();
}

StepExecutor::Past StepExecutor::past() const {
  return {.steps = machine_.past(),
          .memory = results_.empty() ? std::nullopt : std::optional<RunMemory>(Memory()),
          .spike_policy = judge_.policy(),
          .activity = reporter_.activity()};
}

void StepExecutor::GoOnFrom(Past past) {
  machine_.GoOnFrom(std::move(past.steps));
  judge_.set_policy(std::move(past.spike_policy));
  reporter_.GoOnFrom(past.activity);
  if (past.memory) Recall(*past.memory);
}

}  // namespace ballast
