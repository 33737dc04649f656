// What a run has written of its steps as they are made, and what waits for that.
#include <algorithm>
#include <utility>

#include "absl/strings/str_cat.h"

#include "server/run/step_executor.h"
#include "server/storage/journal_files.h"
#include "server/storage/journal_writer.h"

namespace ballast {
namespace {

// A journal that has grown larger than this times what a checkpoint takes is longer read than it is worth.
constexpr uint64_t kCheckpointsWorth = 4;
constexpr uint64_t kLeastJournal = uint64_t{1} << 30;

static_assert(JournalWriter::kBytes == kJournalBuffers, "the plan counts it");

JournaledUpdate UpdateOf(uint32_t tensor, const ParameterStore::UpdateValues& values) {
  return {.step = values.step,
          .tensor = tensor,
          .gradient_divisor = values.gradient_divisor,
          .clip = values.clip,
          .full_statistics = values.statistics == kernels::StatisticsLevel::kFull,
          .hyper = {values.hyper.begin(), values.hyper.end()},
          .gradient_format = std::string(kernels::WireFormats()[static_cast<size_t>(values.gradient_format)].name)};
}

}  // namespace

std::unique_ptr<Journal> StepExecutor::MakeJournal(const Environment& environment) {
  if (!HasJournal(*spec_)) return nullptr;
  return std::make_unique<Journal>(
      Journal::Environment{.run_id = spec_->run_id,
                           .spec_sha256 = environment.spec_sha256,
                           .products = environment.products,
                           .tells_late = spec_->checkpoints->durability == DurabilityMode::kJournalSync,
                           .most_steps = spec_->checkpoints->journal_steps,
                           .strand = environment.strand,
                           .fs = environment.storage.fs,
                           .folder = absl::StrCat(environment.storage.folder->path(), "/", kJournalFolder),
                           .most_bytes = std::max(kLeastJournal, Product(kCheckpointsWorth, plan_->bytes.stored())),
                           .on_moved = [this] { OnJournalMoved(); },
                           .on_failed = [this](const absl::Status& why) { reporter_.OnJournalFailed(why); },
                           .on_logged = [this](uint64_t bytes) { reporter_.OnJournaled(bytes); },
                           .on_sync_took = environment.storage.on_journal_sync});
}

std::function<void(uint32_t, const ParameterStore::UpdateValues&, absl::AnyInvocable<void()>)>
StepExecutor::UpdateLog() {
  if (!HasJournal(*spec_)) return nullptr;
  return [this](uint32_t tensor, const ParameterStore::UpdateValues& values, absl::AnyInvocable<void()> then) {
    LogUpdate(tensor, values, std::move(then));
  };
}

void StepExecutor::LogUpdate(uint32_t tensor, const ParameterStore::UpdateValues& values,
                             absl::AnyInvocable<void()> then) {
  const uint64_t bytes = spec_->tensors[tensor].elements * WireBytes(values.gradient_format);
  journal_->LogUpdate(UpdateOf(tensor, values), {values.gradient, bytes}, std::move(then));
}

void StepExecutor::LogClosed(const Unkept& closed) {
  if (journal_ == nullptr) return;
  if (journal_->WantsCheckpoint()) checkpointer_->Want();
  if (!journal_->writes()) return;
  const RunMemory memory = Memory();
  std::vector<ParameterStore::UpdateCount> counts;
  for (uint32_t t = 0; t < spec_->tensors.size(); ++t) counts.push_back(store_->count(t));
  std::string body = codec_->run_bytes(*spec_, Figures(), memory, counts);
  const uint64_t run_bytes = body.size();
  for (const auto& state : memory.client_states) {
    if (state) absl::StrAppend(&body, state->bytes);
  }
  journal_->LogClosed(closed.step, run_bytes, body, closed.averages);
}

uint64_t StepExecutor::DurableStep() const {
  const uint64_t written = checkpointer_ == nullptr ? 0 : checkpointer_->durable_step();
  return journal_ == nullptr ? written : std::max(written, journal_->durable_step());
}

void StepExecutor::Tell(const effect::Result& e) {
  for (StepRecord record : results_) {
    if (record.step != e.step) continue;
    record.durable_step = std::max(record.durable_step, DurableStep());
    links_[e.rank].outbox().Result(record);
  }
}

void StepExecutor::OnJournalMoved() {
  if (const uint64_t durable = DurableStep(); durable != shown_durable_) {
    shown_durable_ = durable;
    reporter_.ShowDurable(durable);
  }
  if (journal_->on()) reporter_.ShowJournaling();
  while (holds_results() && journal_->MayTell(held_results_.front().step)) {
    Tell(held_results_.front());
    held_results_.pop_front();
  }
  settle_();
}

bool StepExecutor::MustWaitToBegin() const {
  if (unkept_) return true;
  return journal_ != nullptr && !machine_.step_open() && journal_->Behind(machine_.step() - 1);
}

void StepExecutor::WhenRewound(absl::AnyInvocable<void(absl::Status)> done) {
  if (checkpointer_ == nullptr) return done(absl::OkStatus());
  checkpointer_->WhenSetAside([this, done = std::move(done)](absl::Status aside) mutable {
    if (journal_ == nullptr || !aside.ok()) return done(std::move(aside));
    journal_->WhenRewound(std::move(done));
  });
}

void StepExecutor::Replay(const JournaledUpdate& update, std::function<void()> done) {
  using kernels::StatisticsLevel;
  rewinder_.BeforeUpdate(update.tensor);
  store_->Update(update.tensor,
                 {.step = update.step,
                  .gradient_divisor = update.gradient_divisor,
                  .clip = update.clip,
                  .statistics = update.full_statistics ? StatisticsLevel::kFull : StatisticsLevel::kCore,
                  .hyper = update.hyper,
                  .gradient = GradientRoom(update.tensor),
                  .gradient_format = SlabFormat(*spec_, spec_->tensors[update.tensor]),
                  .measured = false},  // even if it was then: no task has read what was just put there
                 [done = std::move(done)](const TaskResult&) { done(); });
}

void StepExecutor::AverageOthers(uint64_t step) {
  for (uint32_t t = 0; t < spec_->tensors.size(); ++t) {
    if (store_->step_of(t) == step) continue;
    rewinder_.BeforeUpdate(t);
    store_->Average(t, step);
  }
}

void StepExecutor::GoOnFrom(const RunFigures& figures, const RunMemory& memory) {
  machine_.GoOnFrom(StepMachine::Past(std::max(figures.generation + 1, machine_.generation()), memory.result.step));
  Recall(memory);
  judge_.set_detector(memory.detector);
  judge_.set_policy(figures.policy);
  held_before_ = figures.ranks_held;
  reporter_.ShowRestored(figures);
}

void StepExecutor::GoOnFrom(const Journal::Place& place) {
  const uint64_t step = results_.back().step;
  awaits_journal_ = false;
  checkpointer_->set_closed(step);
  journal_->GoOnFrom(step, place);
  OnJournalMoved();
}

void StepExecutor::ForgetJournal() {
  awaits_journal_ = false;
  if (journal_ != nullptr) journal_->OnRewound(results_.back().step, machine_.generation(), /*jumps=*/true);
}

void StepExecutor::End() {
  held_results_.clear();
  if (journal_ != nullptr) journal_->End();
}

}  // namespace ballast
