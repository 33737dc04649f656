#include "server/run/step_reporter.h"

#include <algorithm>
#include <utility>

#include "server/base/clock.h"
#include "server/base/log.h"
#include "server/metrics/metric_table.h"
#include "server/spec/spike_text.h"

namespace ballast {
namespace {

// What is measured only now and then stays until it is measured again.
StepRecord::Layer Latest(const StepRecord::Layer& before, StepRecord::Layer now) {
  for (auto field :
       {&StepRecord::Layer::update_to_weight_ratio, &StepRecord::Layer::edq_ratio, &StepRecord::Layer::unchanged_ratio,
        &StepRecord::Layer::hi_edq_ratio, &StepRecord::Layer::hi_unchanged_ratio}) {
    if (!(now.*field)) now.*field = before.*field;
  }
  return now;
}

}  // namespace

StepReporter::StepReporter(Environment environment)
    : environment_(std::move(environment)), lease_over_(environment_.spec->ranks) {
  if (environment_.spec->checkpoints)
    environment_.metrics->SetCheckpointInterval(environment_.spec->checkpoints->every_s);
}

void StepReporter::OnOpened() {
  clock_ = {.begin_s = MonotonicSeconds()};
  activity_.OnOpened(clock_.begin_s);
  if (state_ != RunState::kTraining) SetState(RunState::kTraining);
}

void StepReporter::ShowState(RunActivity::Ranks ranks, bool stopped) {
  const double now_s = MonotonicSeconds();
  const bool step_open = environment_.machine->step_open();
  environment_.metrics->OnActivity({.ranks_lost = ranks.lost,
                                    .stopped = stopped,
                                    .step_opened_at_s = step_open ? UnixSeconds() - (now_s - clock_.begin_s) : 0,
                                    .stall_after_s = activity_.stall_after_s(),
                                    .unsaved_s = activity_.unsaved_s()});
  const RunState state = activity_.At(now_s, step_open, ranks);
  if (state != state_) SetState(state);
}

void StepReporter::SetState(RunState state) {
  state_ = state;
  environment_.metrics->OnState(NameOf(state));
  environment_.board->Write([&](RunStatus& s) { s.state = state; });
  const bool lost = state == RunState::kWaiting;  // of a run that has trained: its trainers are gone without a goodbye
  Log(lost ? LogLevel::kWarn : LogLevel::kInfo, "run_state", "the run's state changed",
      {{"run_id", environment_.spec->run_id},
       {"step", environment_.machine->step() - 1},
       {"state", std::string(NameOf(state))}});
}

void StepReporter::OnReceived(const std::string& transport, uint64_t bytes) {
  clock_.last_byte_s = MonotonicSeconds();
  if (clock_.first_byte_s == 0) clock_.first_byte_s = clock_.last_byte_s;
  environment_.metrics->OnReceived(transport, bytes);
  received_bytes_ += bytes;
  environment_.board->Write([&](RunStatus& s) { s.received_bytes += bytes; });
}

void StepReporter::OnSent(const std::string& transport, uint64_t bytes) {
  environment_.metrics->OnSent(transport, bytes);
  sent_bytes_ += bytes;
  environment_.board->Write([&](RunStatus& s) { s.sent_bytes += bytes; });
}

void StepReporter::OnConverted(std::optional<double> flushed, std::optional<double> overflowed) {
  clock_.flushed = std::max(clock_.flushed, flushed);  // none is less than any
  clock_.overflowed = std::max(clock_.overflowed, overflowed);
}

void StepReporter::OnRankEnded(uint32_t rank, uint32_t ranks_in_step) {
  const double now_s = MonotonicSeconds();
  if (++clock_.ended == ranks_in_step && ranks_in_step > 1) {
    clock_.wait_s = now_s - clock_.last_end_s;
    environment_.metrics->OnWaitCaused(rank, clock_.wait_s);
  }
  clock_.last_end_s = now_s;
  clock_.last_rank = rank;
  environment_.metrics->OnRankSeen(rank);
}

void StepReporter::Complete(StepRecord* record, double last_update_s) {
  record->closed_at_s = UnixSeconds();
  record->seconds = (last_update_s > 0 ? last_update_s : MonotonicSeconds()) - clock_.begin_s;
  record->receive_seconds = clock_.last_byte_s - clock_.first_byte_s;
  record->wait_seconds = clock_.wait_s;
  record->last_rank = clock_.last_rank;
  record->gradient_flushed = clock_.flushed;
  record->gradient_overflowed = clock_.overflowed;
  record->received_bytes = std::exchange(received_bytes_, 0);
  record->sent_bytes = std::exchange(sent_bytes_, 0);
}

void StepReporter::OnSpikes(const SpikeReport& report, const StepRecord& record) {
  environment_.metrics->OnSpikes(report);
  if (record.reason == "spike") environment_.metrics->OnSpikeAction("skip");
}

void StepReporter::LogSpikes(const StepRecord& record) {
  constexpr double kEveryS = 60;
  const double now_s = MonotonicSeconds();
  for (const SpikeEvent& event : record.spikes) {
    KindLogged& logged = logged_[static_cast<size_t>(event.kind)];
    if (logged.at_s != 0 && now_s - logged.at_s < kEveryS) {
      ++logged.passed_over;
      continue;
    }
    logged.at_s = now_s;
    Log(LogLevel::kWarn, "spike", "a loss spike, or what tells of one",
        {{"run_id", environment_.spec->run_id},
         {"step", record.step},
         {"passed_over", std::exchange(logged.passed_over, 0)},
         {"err", SpikeText(event, *environment_.spec)}});
  }
}

StepRecord StepReporter::Report(StepRecord record, const StepStatistics& statistics) {
  const double now_s = MonotonicSeconds();
  environment_.metrics->OnStep(record);
  activity_.OnClosed(now_s, record.outcome == Outcome::kApplied || record.outcome == Outcome::kPartial);
  if (environment_.spec->checkpoints) ShowCheckpointInterval();
  LogTorn(record);
  const std::vector<StepRecord::Layer> layers = std::exchange(record.layers, {});
  const std::vector<double> tensor_rms = std::exchange(record.tensor_rms, {});
  environment_.history->Add(record);
  environment_.board->Write([&](RunStatus& s) {
    s.last_result = record;
    s.awaited.clear();
    s.step_s = clock_.first_byte_s > 0 ? now_s - clock_.first_byte_s : now_s - clock_.begin_s;
    s.applied += record.outcome == Outcome::kApplied ? 1 : 0;
    s.skipped += record.outcome == Outcome::kSkipped ? 1 : 0;
    s.partial += record.outcome == Outcome::kPartial ? 1 : 0;
    s.aborted += record.outcome == Outcome::kAborted ? 1 : 0;
    if (record.outcome == Outcome::kSkipped || record.outcome == Outcome::kAborted) return;  // nothing was updated
    s.tensors = statistics.First(kTensorsShown);
    s.rms_ratio_max.reset();
    for (double rms : tensor_rms) s.rms_ratio_max = std::max(s.rms_ratio_max.value_or(0), rms);
    s.layers.resize(layers.size());
    for (size_t i = 0; i < layers.size(); ++i) s.layers[i] = Latest(s.layers[i], layers[i]);
  });
  return record;
}

void StepReporter::ShowCheckpointInterval() {
  const CheckpointSettings& due = *environment_.spec->checkpoints;
  if (due.every_steps == 0 || activity_.pace_s() == 0) return;  // as it was from the start
  const double by_steps_s = due.every_steps * activity_.pace_s();
  environment_.metrics->SetCheckpointInterval(due.every_s > 0 ? std::min(due.every_s, by_steps_s) : by_steps_s);
}

void StepReporter::ShowRanks(std::vector<RankStatus> ranks) {
  const auto connected = std::count_if(ranks.begin(), ranks.end(), [](const RankStatus& r) { return r.connected; });
  environment_.metrics->OnRanks(static_cast<uint32_t>(connected), std::max(static_cast<uint32_t>(ranks.size()), 1u));
  environment_.board->Write([&](RunStatus& s) {
    s.ranks = std::move(ranks);
    s.generation = environment_.machine->generation();
  });
}

void StepReporter::ShowAwaited(std::vector<AwaitedRank> ranks) {
  environment_.board->Write([&](RunStatus& s) { s.awaited = std::move(ranks); });
}

void StepReporter::ShowSnapshots(std::vector<uint64_t> steps) {
  environment_.metrics->OnSnapshots(steps.size());
  environment_.board->Write([&](RunStatus& s) { s.snapshots = std::move(steps); });
}

void StepReporter::ShowStopped(const std::string& why) {
  environment_.board->Write([&](RunStatus& s) { s.failure = why; });
}

void StepReporter::ShowRewound(const RunMemory& memory) {
  environment_.metrics->OnWentBack(memory.result);
  environment_.board->Write([&](RunStatus& s) {
    s.last_result = memory.result;
    s.step_s = 0;  // nobody has kept what else was measured then
    s.tensors.clear();
    s.layers.clear();
    s.rms_ratio_max.reset();
    s.awaited.clear();
    s.failure = memory.stopped;
    ++s.rewinds;
  });
}

void StepReporter::OnRewound(uint64_t from_step, uint64_t to_step, const std::string& reason) {
  environment_.metrics->OnRewind(reason);
  Log(LogLevel::kWarn, "rewound", "run rewound to a snapshot",
      {{"run_id", environment_.spec->run_id},
       {"step", to_step},
       {"from_step", from_step},
       {"generation", environment_.machine->generation()},
       {"reason", reason}});
}

void StepReporter::OnCheckpoint(const CheckpointReport& report) {
  const absl::StatusOr<CheckpointWritten>& written = report.written;
  environment_.board->Write([&](RunStatus& s) {
    s.durability->last_failure = written.ok() ? "" : std::string(written.status().message());
    if (!written.ok()) return;
    s.durability->durable_step = report.step;
    s.durability->checkpoint_bytes = written->bytes;
    s.durability->written_at_s = MonotonicSeconds();
  });
  if (!written.ok()) {
    environment_.metrics->OnCheckpointFailed(TriggerName(report.trigger));
    Log(LogLevel::kError, "checkpoint", "a checkpoint failed; the run goes on, and those before are as they were",
        {{"run_id", environment_.spec->run_id},
         {"step", report.step},
         {"err", std::string(written.status().message())}});
    return;
  }
  activity_.OnCheckpointWritten();
  environment_.metrics->OnCheckpoint({.trigger = TriggerName(report.trigger),
                                      .step = report.step,
                                      .bytes = written->bytes,
                                      .snapshot_seconds = report.snapshot_seconds,
                                      .write_seconds = written->write_seconds,
                                      .publish_seconds = written->publish_seconds,
                                      .stall_seconds = report.stall_seconds});
  if (!written->retained.ok()) {
    Log(LogLevel::kWarn, "checkpoint", "an old checkpoint could not be removed",
        {{"run_id", environment_.spec->run_id}, {"err", std::string(written->retained.message())}});
  }
  Log(LogLevel::kInfo, "checkpoint", "checkpoint written",
      {{"run_id", environment_.spec->run_id},
       {"step", report.step},
       {"bytes", written->bytes},
       {"dur_s", report.snapshot_seconds + written->write_seconds + written->publish_seconds}});
}

void StepReporter::ShowDurable(uint64_t step) {
  environment_.metrics->OnDurable(step);
  environment_.board->Write([&](RunStatus& s) { s.durability->durable_step = step; });
}

void StepReporter::ShowNewest(const CheckpointWritten& newest) {
  environment_.metrics->OnDurable(newest.place.step);
  environment_.board->Write([&](RunStatus& s) {
    s.durability->durable_step = newest.place.step;
    s.durability->checkpoint_bytes = newest.bytes;
    s.durability->written_at_s.reset();
    if (newest.bytes > 0) s.durability->written_at_s = MonotonicSeconds() - newest.age_seconds;
  });
}

void StepReporter::OnJournaled(uint64_t bytes) {
  environment_.metrics->Count("ballast_journal_bytes_total", "", static_cast<double>(bytes));
}

void StepReporter::OnJournalFailed(const absl::Status& why) {
  environment_.metrics->Count("ballast_journal_failures_total");
  environment_.board->Write([&](RunStatus& s) { s.durability->journal_failure = std::string(why.message()); });
  Log(LogLevel::kError, "journal",
      "the journal cannot be written: the run goes on, and a crash takes the steps since the last one that is durable, "
      "until the next checkpoint",
      {{"run_id", environment_.spec->run_id}, {"err", std::string(why.message())}});
}

void StepReporter::ShowJournaling() {
  environment_.board->Write([&](RunStatus& s) { s.durability->journal_failure.clear(); });
}

void StepReporter::ShowRestored(const RunFigures& figures) {
  if (figures.ranks_held) activity_.OnTrained();
  environment_.board->Write([&](RunStatus& s) {
    s.applied = figures.applied;
    s.skipped = figures.skipped;
    s.partial = figures.partial;
    s.aborted = figures.aborted;
    s.rewinds = figures.rewinds;
    s.left_before_s.reset();
    s.generation = environment_.machine->generation();
  });
}

void StepReporter::LogNotRewound(const std::string& why) const {
  Log(LogLevel::kWarn, "rewound", "the run cannot be rewound", {{"run_id", environment_.spec->run_id}, {"err", why}});
}

void StepReporter::LogReplaced(bool whole) const {
  Log(LogLevel::kWarn, "replaced", whole ? "weights or state were replaced" : "a replacement of weights was cut",
      {{"run_id", environment_.spec->run_id},
       {"step", environment_.machine->step() - 1},
       {"generation", environment_.machine->generation()}});
}

void StepReporter::LogOpened(uint32_t rank, const RankStream& stream) const {
  Log(LogLevel::kInfo, "stream", "rank opened its stream",
      {{"run_id", environment_.spec->run_id},
       {"rank", uint64_t{rank}},
       {"transport", std::string(stream.transport())},
       {"peer", stream.peer()}});
}

// A stream that was not taken: as with any other request.
void StepReporter::LogRefused(const RankStream& stream, const absl::Status& why) const {
  Log(LogLevel::kWarn, "refused", "a request was refused",
      {{"run_id", environment_.spec->run_id},
       {"reason", absl::StatusCodeToString(why.code())},
       {"peer", stream.peer()},
       {"method", "Train"},
       {"err", std::string(why.message())}});
}

void StepReporter::LogEnd(uint32_t rank, const std::string& peer, const std::string& transport,
                          const absl::Status& why) const {
  if (why.ok()) return;
  const bool orderly = absl::IsUnavailable(why);  // the daemon is shutting down
  const LogLevel level = absl::IsDataLoss(why) ? LogLevel::kError : orderly ? LogLevel::kInfo : LogLevel::kWarn;
  Log(level, "stream_ended", "a rank's stream or session was ended",
      {{"run_id", environment_.spec->run_id},
       {"rank", uint64_t{rank}},
       {"step", environment_.machine->step()},
       {"reason", absl::StatusCodeToString(why.code())},
       {"peer", peer},
       {"transport", transport},
       {"err", std::string(why.message())}});
}

void StepReporter::LogLeaseIfOver(uint32_t rank, const std::string& peer, double now_s) {
  const StepMachine& machine = *environment_.machine;
  const bool away = machine.session(rank) && !machine.connected(rank);
  const bool over = away && now_s >= machine.disconnected_at_s(rank) + environment_.spec->lease_s;
  if (over && !lease_over_[rank]) {
    Log(LogLevel::kWarn, "lease_expired", "a rank was away for longer than its lease; another process may take it",
        {{"run_id", environment_.spec->run_id},
         {"rank", uint64_t{rank}},
         {"step", machine.step()},
         {"peer", peer},
         {"dur_s", now_s - machine.disconnected_at_s(rank)}});
  }
  lease_over_[rank] = over;
}

void StepReporter::LogTorn(const StepRecord& record) const {
  if (record.outcome != Outcome::kPartial && record.outcome != Outcome::kAborted) return;
  Log(LogLevel::kWarn, "step_torn", "a step was not applied, or in part",
      {{"run_id", environment_.spec->run_id},
       {"step", record.step},
       {"reason", record.reason},
       {"outcome", std::string(OutcomeName(record.outcome))},
       {"tensors_not_applied", uint64_t{record.not_applied.size()}},
       {"err", record.detail}});
}

}  // namespace ballast
