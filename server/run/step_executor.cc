#include "server/run/step_executor.h"

#include <algorithm>
#include <cmath>
#include <utility>

#include "absl/strings/str_cat.h"

#include "server/base/clock.h"
#include "server/run/machine_options.h"

namespace ballast {
namespace {

// A rank that lacks more than these has been away for longer than any lease.
constexpr size_t kResultsKept = 256;

StepSettings SettingsOf(const RunSpec& spec) {
  StepSettings settings;
  for (const GroupSpec& group : spec.groups) settings.hyper.push_back(group.hyper);
  return settings;
}

}  // namespace

StepExecutor::StepExecutor(Environment environment, std::function<void()> settle)
    : spec_(environment.spec),
      plan_(environment.plan),
      store_(environment.store),
      codec_(environment.storage.codec),
      followers_(environment.followers),
      board_(environment.board),
      settle_(std::move(settle)),
      machine_(MachineOptions(*spec_, *plan_)),
      settings_(SettingsOf(*spec_)),
      reporter_({.spec = spec_,
                 .machine = &machine_,
                 .metrics = environment.metrics,
                 .board = environment.board,
                 .history = environment.history}),
      pool_(spec_, plan_, std::move(environment.pools)),
      links_(spec_->ranks,
             {.spec = spec_,
              .plan = plan_,
              .store = environment.store,
              .on_sent = [this](const std::string& transport, uint64_t b) { reporter_.OnSent(transport, b); },
              .settle = settle_}),
      updater_({.spec = spec_,
                .layers = environment.layers,
                .machine = &machine_,
                .settings = &settings_,
                .store = environment.store,
                .pool = &pool_,
                .log = UpdateLog(),
                .on_updated = [this](const effect::Update& e, const TaskResult* result) { OnUpdated(e, result); }}),
      judge_({.spec = spec_,
              .machine = &machine_,
              .settings = &settings_,
              .updater = &updater_,
              .measured = [this](uint64_t step) { Handle(event::Measured{step}).IgnoreError(); },  // never refused
              .pronounce = [this](const event::Verdict& verdict) { OnVerdict(verdict); },
              .settle = settle_}),
      checkpointer_(MakeCheckpointer(environment)),
      journal_(MakeJournal(environment)),
      rewinder_({.spec = spec_,
                 .machine = &machine_,
                 .store = environment.store,
                 .snapshots = std::move(environment.snapshots),
                 .reporter = &reporter_,
                 .discard = [this](uint64_t to_step) { return Handle(event::Rewind{to_step}); },
                 .recall = [this](const RunMemory& memory) { Recall(memory); },
                 .checkpointer = checkpointer_.get(),
                 .journal = journal_.get()}) {}

uint64_t StepExecutor::client_state_bytes() const {
  return ClientStateBytes(links_.size(), rewinder_.most_snapshots());
}

StepExecutor::AttachOutcome StepExecutor::Attach(const event::Attach& attach) {
  StepEffects effects = machine_.Handle(attach, CoarseSeconds());
  AttachOutcome outcome;
  for (const StepEffect& e : effects) {
    if (const auto* reject = std::get_if<effect::Reject>(&e)) outcome.retry_after_s = reject->retry_after_s;
    if (const auto* attached = std::get_if<effect::Attached>(&e)) {
      outcome.session = attached->session;
      outcome.rank = attached->rank;
      outcome.resumed = attached->resumed;
    }
  }
  outcome.status = Execute(std::move(effects));
  return outcome;
}

absl::Status StepExecutor::OpenStream(const std::shared_ptr<RankStream>& stream, const event::StreamOpened& opened) {
  StepEffects effects = machine_.Handle(opened, CoarseSeconds());
  if (!effects.empty() && std::holds_alternative<effect::Reject>(effects.front())) {
    return std::get<effect::Reject>(effects.front()).status;
  }
  const uint32_t rank = *machine_.RankOf(opened.session);
  links_[rank].Open(stream, opened.session);
  if (gate_.draining()) links_[rank].outbox().Drain("the daemon is shutting down");
  ShowRanks();
  reporter_.LogOpened(rank, *stream);
  return Execute(std::move(effects));  // no Reject among them: it was the first or is not there
}

absl::Status StepExecutor::Handle(const StepEvent& event) { return Execute(machine_.Handle(event, CoarseSeconds())); }

absl::Status StepExecutor::Execute(StepEffects effects) {
  absl::Status refusal;
  ++executing_;
  for (auto e = effects.begin(); e != effects.end(); ++e) {
    if (const auto* reject = std::get_if<effect::Reject>(&*e)) refusal = reject->status;
    if (const effect::Update* update = e + 1 == effects.end() ? nullptr : UpdateBySum(e[0], e[1])) {
      SumAndUpdate(std::get<effect::Sum>(*e++), *update);
      continue;
    }
    std::visit(
        [this](const auto& one) {
          using E = std::decay_t<decltype(one)>;
          if constexpr (!std::is_same_v<E, effect::Reject> && !std::is_same_v<E, effect::Attached>) Do(one);
        },
        *e);
  }
  --executing_;
  return refusal;
}

const effect::Update* StepExecutor::UpdateBySum(const StepEffect& first, const StepEffect& second) const {
  const auto* sum = std::get_if<effect::Sum>(&first);
  const auto* update = std::get_if<effect::Update>(&second);
  if (sum == nullptr || update == nullptr || sum->id.tensor != update->tensor) return nullptr;
  return ChunkCount(*spec_, spec_->tensors[update->tensor]) == 1 ? update : nullptr;
}

void StepExecutor::Do(const effect::Fence& e) {
  RankLink& link = links_[e.rank];
  if (!link.open()) reporter_.LogEnd(e.rank, link.peer(), link.transport(), e.status);
  if (link.open() && link.session() == e.session) {
    if (e.status.code() == absl::StatusCode::kDataLoss) reporter_.metrics().OnDuplicateChunk(false);
    Detach(e.rank, e.status);
  }
  ShowRanks();
}

void StepExecutor::Do(const effect::LeftOut& e) {
  std::vector<uint32_t>& ranks = settings_.left_out;
  ranks.insert(std::upper_bound(ranks.begin(), ranks.end(), e.rank), e.rank);
}

void StepExecutor::Do(const effect::Opened& e) {
  // A step that is only closed, since other parts of the run have done so, has the spec's values.
  settings_ = begin_ != nullptr ? StepSettings{.hyper = std::move(begin_->hyper), .loss_scale = begin_->loss_scale}
                                : StepSettings{.hyper = HyperOfSpec(*spec_)};
  settings_.left_out = e.left_out;
  pool_.SumOnDevice(SumsOnDevice());
  updater_.Begin();
  judge_.Begin();
  reporter_.OnOpened();
}

bool StepExecutor::SumsOnDevice() const {
  bool there = false;
  for (uint32_t rank = 0; rank < machine_.world(); ++rank) {
    if (!machine_.reduction().covers(rank).empty()) return false;  // sums of parts are the host's
    there = there || (links_[rank].open() && links_[rank].stream()->on_device());
  }
  return there;
}

void StepExecutor::Do(const effect::Begun& e) {
  links_[e.rank].outbox().DropPublished();
  links_[e.rank].DropComingState();
}

void StepExecutor::Do(const effect::Hold& e) {
  const uint64_t bytes = gradient_->data.size();
  links_[e.rank].Hold(e.id, std::move(gradient_->data));
  reporter_.OnReceived(links_[e.rank].transport(), bytes);
}

void StepExecutor::Do(const effect::Drop& e) {
  links_[e.rank].outbox().Credit(gradient_->data.size());
  if (e.again) reporter_.metrics().OnDuplicateChunk(true);
}

StepExecutor::Summing StepExecutor::MakeSum(const effect::Sum& e) {
  absl::InlinedVector<Summand, 1> summands;
  const auto take = [&](uint32_t rank) {
    Payload payload = links_[rank].TakeHeld(e.id);
    summands.push_back({rank, links_[rank].session(), payload.size()});
    return payload;
  };
  const auto covers = [&](uint32_t rank) -> const ChunkSet& { return machine_.reduction().covers(rank); };
  SumTask task = pool_.TaskOf(e, take, covers);
  return {std::move(task), [this, summands = std::move(summands)] {
            for (const Summand& s : summands) links_[s.rank].OnSummed(s.session, s.bytes);
            settle_();
          }};
}

void StepExecutor::Do(const effect::Sum& e) {
  Summing summing = MakeSum(e);
  updater_.Sum(e.id.tensor, std::move(summing.task), std::move(summing.done));
}

void StepExecutor::SumAndUpdate(const effect::Sum& sum, const effect::Update& update) {
  Summing summing = MakeSum(sum);
  rewinder_.BeforeUpdate(update.tensor);
  updater_.SumAndUpdate(update, std::move(summing.task), std::move(summing.done));
}

void StepExecutor::Do(const effect::Forget& e) {
  links_[e.rank].DropHeld();
  judge_.ForgetLosses(e.rank);
}

void StepExecutor::Do(const effect::Update& e) {
  rewinder_.BeforeUpdate(e.tensor);
  updater_.Update(e);
}

void StepExecutor::Do(const effect::Measured& e) {
  const GradientFindings found = updater_.statistics().Findings();
  output::Measured measured{.step = e.step, .grad_norm = found.norm, .nonfinite_tensors = found.nonfinite_tensors};
  if (spec_->part) {
    measured.squares = updater_.statistics().GradientSquares();
    if (found.nonfinite_tensors > 0) measured.first_nonfinite = found.first_nonfinite;
  }
  if (e.discarded) measured = {.step = e.step, .grad_norm = std::nan(""), .discarded = true};
  links_[e.rank].outbox().Tell(measured);
}

void StepExecutor::Do(const effect::Judge& e) {
  settings_.TakeEndValues();
  judge_.Judge(e);
}

void StepExecutor::Do(const effect::Publish& e) {
  for (uint32_t rank = 0; rank < machine_.world(); ++rank) {
    if (e.rank && *e.rank != rank) continue;
    // Its trainer may be reading the old weights, since it sends no gradient that says that it has done so.
    const bool waits = machine_.InStep(rank) && e.step == machine_.step() && !machine_.SentAll(rank) &&
                       machine_.reduction().covered(rank, e.tensor) == 0;
    links_[rank].outbox().Publish(e.step, e.tensor, waits);
  }
}

void StepExecutor::Do(const effect::Close& e) {
  DropAllHeld();
  for (RankLink& link : links_) {
    link.KeepComingState();
    link.outbox().Release();
  }
  StepRecord record = RecordOf(e);
  judge_.Observe(&record);
  reporter_.OnSpikes(judge_.ReportOf(record), record);
  if (!record.discarded()) AnswerSpikes(record);
  reporter_.LogSpikes(record);
  results_.push_back(reporter_.Report(std::move(record), updater_.statistics()));
  if (results_.size() > kResultsKept) results_.pop_front();
  if (unkept_) Keep(*unkept_);
  if (settings_.checkpoint && checkpointer_ != nullptr) checkpointer_->Want();
  const bool torn = e.outcome == Outcome::kPartial && spec_->rewinds_torn;
  unkept_ = {.step = e.step, .torn = torn, .averages = e.outcome == Outcome::kApplied && !spec_->averages.empty()};
  KeepClosed();
  if (!torn) return;
  rewinder_.AskItself({.steps_back = 1, .reason = "torn"}, absl::StrCat("step ", e.step, " is torn: ", e.reason),
                      [] {});
}

void StepExecutor::Do(const effect::Result& e) {
  if (journal_ != nullptr && (holds_results() || !journal_->MayTell(e.step))) return held_results_.push_back(e);
  Tell(e);
}

void StepExecutor::Do(const effect::Discard&) { DropAllHeld(); }

void StepExecutor::DropAllHeld() {
  for (RankLink& link : links_) link.DropHeld();
}

void StepExecutor::OnUpdated(const effect::Update& e, const TaskResult* result) {
  if (result != nullptr && !spec_->staged && result->statistics.nonfinite > 0) {
    StopIf(
        StopReason(*spec_, e.step,
                   {.nonfinite_tensors = 1, .first_nonfinite = e.tensor, .first_name = spec_->tensors[e.tensor].name}));
  }
  Handle(event::TensorApplied{e.step, e.tensor, e.slab}).IgnoreError();  // never refused
  settle_();
}

void StepExecutor::OnVerdict(const event::Verdict& verdict) {
  if (verdict.outcome == Outcome::kAborted) StopIf(verdict.detail);
  Handle(verdict).IgnoreError();  // never refused
}

StepRecord StepExecutor::RecordOf(const effect::Close& e) {
  StepRecord record{.step = e.step,
                    .outcome = e.outcome,
                    .reason = e.reason,
                    .detail = e.outcome == Outcome::kApplied ? gate_.stopped() : e.detail,
                    .not_applied = e.not_applied,
                    .left_out = settings_.left_out,
                    .update_seconds = updater_.busy_s(),
                    .loss = judge_.Loss(),
                    .learning_rate = HyperOf(spec_->groups[0], settings_.hyper[0], "lr").value_or(0),
                    .clip_coefficient = settings_.clip};
  record.durable_step = DurableStep();
  if (checkpointer_ != nullptr) record.checkpoint_step = checkpointer_->checkpoint_step();
  updater_.statistics().Complete(&record);
  if (spec_->staged && e.outcome != Outcome::kApplied && !judge_.measured()) {  // perhaps of some tensors
    record.grad_norm = 0;
    record.nonfinite_tensors = 0;
  }
  if (settings_.whole) record.grad_norm = settings_.whole->norm;
  reporter_.Complete(&record, updater_.last_update_s());
  return record;
}

void StepExecutor::AnswerSpikes(const StepRecord& record) {
  StepJudge::Answer answer = judge_.AnswerTo(record);
  switch (answer.what) {
    case SpikePolicy::Answer::kGoOn:
      return;
    case SpikePolicy::Answer::kStop:
      reporter_.metrics().OnSpikeAction("stop");
      return StopIf(std::move(answer.why));
    case SpikePolicy::Answer::kRewind:
      return rewinder_.AskItself({.steps_back = spec_->spikes.rewind_steps, .reason = "spike"}, std::move(answer.why),
                                 [this] { reporter_.metrics().OnSpikeAction("rewind"); });
  }
}

void StepExecutor::StopIf(std::string why) {
  if (gate_.Stop(std::move(why))) reporter_.ShowStopped(gate_.stopped());
}

void StepExecutor::Detach(uint32_t rank, absl::Status status) {
  reporter_.LogEnd(rank, links_[rank].peer(), links_[rank].transport(), status);
  links_[rank].Close(std::move(status));
  std::erase_if(held_results_, [&](const effect::Result& e) { return e.rank == rank; });  // what it lacks comes again
}

void StepExecutor::ShowRanks() { reporter_.ShowRanks(links_.Status(machine_)); }

RunActivity::Ranks StepExecutor::CountRanks() const {
  if (machine_.world() == 0) return {.held = 0, .lost = held_before_.value_or(0)};
  const double now_s = MonotonicSeconds();
  RunActivity::Ranks ranks;
  for (uint32_t rank = 0; rank < machine_.world(); ++rank) {
    ranks.held += machine_.held(rank, now_s) || machine_.returning_since_s(rank, now_s) ? 1 : 0;
    ranks.lost += machine_.lost(rank, now_s) ? 1 : 0;
  }
  return ranks;
}

void StepExecutor::ShowState() {
  const RunState before = reporter_.state();
  reporter_.ShowState(CountRanks(), !gate_.stopped().empty());
  const bool finishes = reporter_.state() == RunState::kFinished && before != RunState::kFinished;
  // Not of one that was read from the disk, and has had no trainer since.
  if (finishes && checkpointer_ != nullptr && machine_.world() > 0) checkpointer_->Want();
}

}  // namespace ballast
