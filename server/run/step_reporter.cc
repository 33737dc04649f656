#include "server/run/step_reporter.h"

#include <algorithm>
#include <cmath>
#include <utility>

#include "server/base/clock.h"
#include "server/base/log.h"
#include "server/spec/spike_text.h"

namespace ballast {
namespace {

// What is measured only now and then stays until it is measured again.
StepReport::Layer Latest(const StepReport::Layer& before, StepReport::Layer now) {
  for (auto field :
       {&StepReport::Layer::update_to_weight_ratio, &StepReport::Layer::edq_ratio, &StepReport::Layer::unchanged_ratio,
        &StepReport::Layer::hi_edq_ratio, &StepReport::Layer::hi_unchanged_ratio}) {
    if (!(now.*field)) now.*field = before.*field;
  }
  return now;
}

}  // namespace

StepReporter::StepReporter(Environment environment)
    : environment_(std::move(environment)), lease_over_(environment_.spec->ranks) {}

void StepReporter::OnOpened() {
  clock_ = {.begin_s = MonotonicSeconds()};
  environment_.metrics->OnState("training");
  environment_.board->Write([](RunStatus& s) { s.state = RunStatus::State::kTraining; });
}

void StepReporter::OnReceived(const std::string& lane, uint64_t bytes) {
  clock_.last_byte_s = MonotonicSeconds();
  if (clock_.first_byte_s == 0) clock_.first_byte_s = clock_.last_byte_s;
  environment_.metrics->OnReceived(lane, bytes);
  received_bytes_ += bytes;
  environment_.board->Write([&](RunStatus& s) { s.received_bytes += bytes; });
}

void StepReporter::OnSent(const std::string& lane, uint64_t bytes) {
  environment_.metrics->OnSent(lane, bytes);
  sent_bytes_ += bytes;
  environment_.board->Write([&](RunStatus& s) { s.sent_bytes += bytes; });
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

void StepReporter::OnSpikes(const SpikeReport& report, const ClosedStep& closed) {
  environment_.metrics->OnSpikes(report);
  if (closed.reason == "spike") environment_.metrics->OnSpikeAction("skip");
}

void StepReporter::LogSpikes(const ClosedStep& closed) const {
  for (const SpikeEvent& event : closed.spikes) {
    Log(LogLevel::kWarn, "spike", "a loss spike, or what tells of one",
        {{"run_id", environment_.spec->run_id}, {"step", closed.step}, {"err", SpikeText(event, *environment_.spec)}});
  }
}

void StepReporter::Report(StepReport report, double last_update_s, const ClosedStep& closed, const StepFindings& found,
                          const SpikeReport& spikes, const StepStatistics& statistics) {
  const double now_s = MonotonicSeconds();
  report.seconds = (last_update_s > 0 ? last_update_s : now_s) - clock_.begin_s;
  report.receive_seconds = clock_.last_byte_s - clock_.first_byte_s;
  environment_.metrics->OnStep(report);
  LogTorn(closed);
  Remember(report, closed, found, spikes);
  environment_.board->Write([&](RunStatus& s) {
    s.step = closed.step;
    s.loss = report.loss;
    s.last_result = closed;
    s.step_s = clock_.first_byte_s > 0 ? now_s - clock_.first_byte_s : now_s - clock_.begin_s;
    s.applied += closed.outcome == Outcome::kApplied ? 1 : 0;
    s.skipped += closed.outcome == Outcome::kSkipped ? 1 : 0;
    s.partial += closed.outcome == Outcome::kPartial ? 1 : 0;
    s.aborted += closed.outcome == Outcome::kAborted ? 1 : 0;
    if (closed.outcome == Outcome::kSkipped || closed.outcome == Outcome::kAborted) return;  // nothing was updated
    s.tensors = statistics.First(kTensorsShown);
    s.rms_ratio_max.reset();
    for (double rms : report.tensor_rms) s.rms_ratio_max = std::max(s.rms_ratio_max.value_or(0), rms);
    s.layers.resize(report.layers.size());
    for (size_t i = 0; i < report.layers.size(); ++i) s.layers[i] = Latest(s.layers[i], report.layers[i]);
  });
}

void StepReporter::Remember(const StepReport& report, const ClosedStep& closed, const StepFindings& found,
                            const SpikeReport& spikes) {
  StepRecord record{.step = closed.step,
                    .outcome = closed.outcome,
                    .reason = closed.reason,
                    .detail = closed.detail,
                    .closed_at_s = UnixSeconds(),
                    .loss = report.loss,
                    .learning_rate = report.learning_rate,
                    .grad_norm = closed.grad_norm,
                    .clip_coefficient = closed.clip_coefficient,
                    .seconds = report.seconds,
                    .receive_seconds = report.receive_seconds,
                    .update_seconds = report.update_seconds,
                    .wait_seconds = clock_.wait_s,
                    .last_rank = clock_.last_rank,
                    .received_bytes = std::exchange(received_bytes_, 0),
                    .sent_bytes = std::exchange(sent_bytes_, 0),
                    .spikes = closed.spikes};
  record.curvature_ratio = spikes.curvature;
  record.edq_ratio = report.whole.edq_ratio;
  record.unchanged_ratio = report.whole.unchanged_ratio;
  for (const LayerValue& layer : found.rms) {
    record.layer_rms.push_back(layer.value ? static_cast<float>(*layer.value) : std::nanf(""));
  }
  environment_.history->Add(std::move(record));
}

void StepReporter::ShowRanks(std::vector<RankStatus> ranks) {
  const auto connected = std::count_if(ranks.begin(), ranks.end(), [](const RankStatus& r) { return r.connected; });
  environment_.metrics->OnRanks(static_cast<uint32_t>(connected), std::max(static_cast<uint32_t>(ranks.size()), 1u));
  environment_.board->Write([&](RunStatus& s) {
    s.ranks = std::move(ranks);
    s.generation = environment_.machine->generation();
  });
}

void StepReporter::ShowSnapshots(std::vector<uint64_t> steps) {
  environment_.metrics->OnSnapshots(steps.size());
  environment_.board->Write([&](RunStatus& s) { s.snapshots = std::move(steps); });
}

void StepReporter::ShowStopped(const std::string& why) {
  environment_.board->Write([&](RunStatus& s) { s.failure = why; });
}

void StepReporter::ShowRewound(const RunMemory& memory) {
  environment_.board->Write([&](RunStatus& s) {
    s.step = memory.result.step;
    s.loss = memory.loss;
    s.last_result = memory.result;
    s.failure = memory.stopped;
    ++s.rewinds;
  });
}

void StepReporter::OnRewound(uint64_t from_step, uint64_t to_step, const std::string& reason,
                             std::vector<uint64_t> snapshots) {
  environment_.metrics->OnRewind(reason);
  ShowSnapshots(std::move(snapshots));
  Log(LogLevel::kWarn, "rewound", "run rewound to a snapshot",
      {{"run_id", environment_.spec->run_id},
       {"step", to_step},
       {"from_step", from_step},
       {"generation", environment_.machine->generation()},
       {"reason", reason}});
}

void StepReporter::LogNotRewound(const std::string& why) const {
  Log(LogLevel::kWarn, "rewound", "the run cannot be rewound", {{"run_id", environment_.spec->run_id}, {"err", why}});
}

void StepReporter::LogOpened(uint32_t rank, const RankStream& stream) const {
  Log(LogLevel::kInfo, "stream", "rank opened its stream",
      {{"run_id", environment_.spec->run_id},
       {"rank", uint64_t{rank}},
       {"lane", std::string(stream.lane())},
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

void StepReporter::LogEnd(uint32_t rank, const std::string& peer, const std::string& lane,
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
       {"lane", lane},
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

void StepReporter::LogTorn(const ClosedStep& closed) const {
  if (closed.outcome != Outcome::kPartial && closed.outcome != Outcome::kAborted) return;
  Log(LogLevel::kWarn, "step_torn", "a step was not applied, or in part",
      {{"run_id", environment_.spec->run_id},
       {"step", closed.step},
       {"reason", closed.reason},
       {"outcome", std::string(OutcomeName(closed.outcome))},
       {"tensors_not_applied", uint64_t{closed.not_applied.size()}},
       {"err", closed.detail}});
}

}  // namespace ballast
