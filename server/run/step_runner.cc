#include "server/run/step_runner.h"

#include <algorithm>
#include <string_view>
#include <utility>

#include "absl/strings/str_cat.h"

#include "server/base/clock.h"
#include "server/base/log.h"

namespace ballast {
namespace {

StepMachineOptions MachineOptions(const RunSpec& spec, const Plan& plan) {
  StepMachineOptions options;
  options.lease_s = spec.lease_s;
  options.rank_timeout_s = spec.rank_timeout_s;
  options.step_timeout_s = spec.step_timeout_s;
  options.leaves_out_lost = spec.leaves_out_lost;
  options.commit = spec.staged ? Commit::kStaged : Commit::kRelease;
  options.most_micros = options.reduction.micros = spec.accumulation;
  options.reduction.pool_of = plan.placement.shard_of;
  for (const ShardPlan& shard : plan.shards) options.reduction.pool_bytes.push_back(shard.pool_bytes);
  for (const TensorSpec& t : spec.tensors) {
    options.tensor_names.push_back(t.name);
    options.reduction.chunks.push_back(ChunkCount(spec, t));
    options.reduction.slab_bytes.push_back(SlabBytes(spec, t));
  }
  return options;
}

std::vector<std::vector<double>> SpecHyper(const RunSpec& spec) {
  std::vector<std::vector<double>> hyper;
  for (const GroupSpec& group : spec.groups) hyper.push_back(group.hyper);
  return hyper;
}

std::vector<double> RmsThresholds(const RunSpec& spec) {
  std::vector<double> thresholds;
  for (const LayerSpec& layer : spec.layers) thresholds.push_back(layer.rms_threshold);
  return thresholds;
}

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

StepRunner::StepRunner(Environment environment)
    : environment_(std::move(environment)),
      machine_(MachineOptions(*environment_.spec, *environment_.plan)),
      pools_(std::move(environment_.pools)),
      statistics_(environment_.spec, environment_.layers),
      detector_(environment_.spec->spikes, RmsThresholds(*environment_.spec)),
      policy_(environment_.spec->spikes),
      last_lr_(environment_.spec->tensors.size()),
      links_(environment_.spec->ranks),
      hyper_(SpecHyper(*environment_.spec)) {
  if (environment_.spec->tensor_clip)
    tensor_clip_.emplace(*environment_.spec->tensor_clip, environment_.spec->tensors.size());
  for (Link& link : links_) {
    const auto on_sent = [this, &link](uint64_t bytes) {
      environment_.metrics->OnSent(link.lane, bytes);
      sent_bytes_ += bytes;
      environment_.board->Write([&](RunStatus& s) { s.sent_bytes += bytes; });
    };
    link.sender = std::make_unique<Sender>(
        Sender::Environment{.spec = environment_.spec, .store = environment_.store, .on_sent = on_sent},
        *environment_.plan);
  }
}

uint64_t StepRunner::gradient_bytes() const {
  uint64_t bytes = links_.size() * environment_.plan->window_bytes;
  for (const DeviceBuffer& pool : pools_) bytes += pool.bytes();
  return bytes;
}

uint64_t StepRunner::slot_bytes() const {
  uint64_t bytes = 0;
  for (const Link& link : links_) bytes += link.sender->slot_bytes();
  return bytes;
}

StepRunner::AttachOutcome StepRunner::Attach(const event::Attach& attach, const std::string& peer) {
  std::string holder;
  if (attach.rank < machine_.world()) {
    holder = absl::StrCat("rank ", attach.rank, " of run '", environment_.spec->run_id, "' is held by ",
                          links_[attach.rank].peer, machine_.connected(attach.rank) ? "" : " (connection lost)", ": ");
  }
  StepEffects effects = machine_.Handle(attach, MonotonicSeconds());
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
  if (absl::IsAlreadyExists(outcome.status)) {
    outcome.status = absl::AlreadyExistsError(absl::StrCat(holder, outcome.status.message()));
  }
  if (outcome.status.ok()) links_[outcome.rank].peer = peer;
  if (outcome.status.ok() && !outcome.resumed) links_[outcome.rank].sender->Receive(attach.coverage.receives);
  if (outcome.resumed) LeaveOldStream(outcome.rank);
  ShowRanks();
  Settle();
  return outcome;
}

void StepRunner::OpenStream(const std::shared_ptr<RankStream>& stream, const event::StreamOpened& opened) {
  StepEffects effects = machine_.Handle(opened, MonotonicSeconds());
  if (!effects.empty() && std::holds_alternative<effect::Reject>(effects.front())) {
    stream->Finish(std::get<effect::Reject>(effects.front()).status);
    LogRefused(*stream, std::get<effect::Reject>(effects.front()).status);
    return;
  }
  Link& link = links_[*machine_.RankOf(opened.session)];
  if (link.stream != nullptr) link.stream->Cancel();
  KeepHeld(&link);
  link.stream = stream;
  link.session = opened.session;
  link.input_closed = false;
  link.parked.clear();
  link.peer = stream->peer();
  link.lane = stream->lane();
  link.sender->Bind(stream);
  link.sender->Open();
  // Summed since the client was told what is held.
  if (link.held_promised > link.held_bytes) link.sender->Credit(link.held_promised - link.held_bytes);
  link.held_promised = 0;
  if (draining_) link.sender->Drain("the daemon is shutting down");
  ShowRanks();
  Log(LogLevel::kInfo, "stream", "rank opened its stream",
      {{"run_id", environment_.spec->run_id},
       {"rank", uint64_t{*machine_.RankOf(opened.session)}},
       {"lane", link.lane},
       {"peer", link.peer}});
  Execute(std::move(effects)).IgnoreError();  // no Reject among them: it was the first or is not there
  Settle();
}

// Its own client left it; nobody reads what it would still say, and what it still brings comes again.
void StepRunner::LeaveOldStream(uint32_t rank) {
  Link& link = links_[rank];
  link.held_promised = link.held_bytes;
  environment_.metrics->OnReconnect(rank);
  if (link.stream == nullptr) return;
  link.stream->Cancel();
  EndStream(rank, absl::AbortedError("its client attached again"));
}

void StepRunner::OnMessage(const std::shared_ptr<RankStream>& stream, RankMessage message) {
  const auto rank = RankOf(stream.get());
  if (!rank) return;
  links_[*rank].parked.push_back(std::move(message));
  Settle();
}

void StepRunner::TakeParked(uint32_t rank) {
  Link& link = links_[rank];
  while (!link.parked.empty() && link.stream != nullptr && !MustWait(link, link.parked.front())) {
    const auto stream = link.stream;
    RankMessage message = std::move(link.parked.front());
    link.parked.pop_front();
    std::visit([&](auto& m) { Take(rank, m); }, message);
    stream->Consumed();
  }
}

bool StepRunner::MustWait(const Link& link, const RankMessage& message) const {
  if (const auto* begin = std::get_if<message::MicroBegin>(&message)) {
    return machine_.MustWait({link.session, begin->micro, begin->last});
  }
  const auto* gradient = std::get_if<message::Gradient>(&message);
  return gradient != nullptr && link.held_bytes + gradient->data.size() > environment_.plan->window_bytes;
}

// Nothing else can make room for a rank that sums wait for.
void StepRunner::RefuseStuck(uint32_t rank) {
  const Link& link = links_[rank];
  if (link.parked.empty() || updating_ > 0 || !machine_.InStep(rank)) return;
  if (!std::holds_alternative<message::Gradient>(link.parked.front())) return;
  const auto wanted = machine_.Wanted(rank);
  if (!wanted) return;
  EndStream(rank, absl::ResourceExhaustedError(absl::StrCat(
                      link.held_bytes,
                      " bytes of gradients wait to be summed, and more were sent without credit, but not chunk ",
                      wanted->chunk, " of tensor '", environment_.spec->tensors[wanted->tensor].name,
                      "', which sums wait for; heed Credit, or raise limits.credit_bytes")));
}

void StepRunner::Take(uint32_t rank, message::StepBegin& m) {
  if (!weights_loaded_) {
    EndStream(rank,
              absl::FailedPreconditionError("StepBegin before the weights are loaded; send them with LoadState first"));
  } else if (draining_ && !machine_.step_open()) {
    EndStream(rank, absl::UnavailableError("the daemon is shutting down; no new step begins"));
  } else if (!stopped_.empty() && !machine_.step_open() && m.step == machine_.step()) {
    EndStream(rank, absl::FailedPreconditionError(stopped_));
  } else {
    begin_ = &m;
    HandleFrom(rank, event::StepBegin{links_[rank].session, m.step, m.content});
    begin_ = nullptr;
  }
}

void StepRunner::Take(uint32_t rank, message::MicroBegin& m) {
  HandleFrom(rank, event::MicroBegin{links_[rank].session, m.micro, m.last});
}

void StepRunner::Take(uint32_t rank, message::Gradient& m) {
  gradient_ = &m;
  HandleFrom(rank, event::Chunk{links_[rank].session, m.micro, m.tensor, m.chunk, m.crc});
  gradient_ = nullptr;
  links_[rank].sender->Acknowledge();
}

void StepRunner::Take(uint32_t rank, message::MicroEnd& m) {
  Link& link = links_[rank];
  if (m.loss && machine_.InStep(rank)) link.losses[m.micro] = *m.loss;
  HandleFrom(rank, event::MicroEnd{link.session, m.micro, std::move(m.absent)});
}

void StepRunner::Take(uint32_t rank, message::StepEnd& m) {
  Link& link = links_[rank];
  const bool in_step = machine_.InStep(rank), again = machine_.Ended(rank);
  if (in_step && !m.client_state.empty()) {
    link.coming_state = ClientState{machine_.step(), std::move(m.client_state)};  // the step may close by this
  }
  StepEffects effects = machine_.Handle(event::StepEnd{link.session, std::move(m.content)}, MonotonicSeconds());
  const bool refused = !effects.empty() && std::holds_alternative<effect::Reject>(effects.front());
  if (refused) link.coming_state.reset();
  if (in_step && !refused) {
    end_values_ = std::move(m.values);
    if (!again) CountWait(rank);
  }
  if (auto s = Execute(std::move(effects)); !s.ok()) EndStream(rank, std::move(s));
}

void StepRunner::Take(uint32_t rank, message::Bad& m) { EndStream(rank, std::move(m.status)); }

void StepRunner::HandleFrom(uint32_t rank, const StepEvent& event) {
  if (auto s = Execute(machine_.Handle(event, MonotonicSeconds())); !s.ok()) EndStream(rank, std::move(s));
}

absl::Status StepRunner::Execute(StepEffects effects) {
  absl::Status refusal;
  ++executing_;
  for (const StepEffect& e : effects) {
    if (const auto* reject = std::get_if<effect::Reject>(&e)) refusal = reject->status;
    std::visit(
        [this](const auto& one) {
          using E = std::decay_t<decltype(one)>;
          if constexpr (!std::is_same_v<E, effect::Reject> && !std::is_same_v<E, effect::Attached>) Do(one);
        },
        e);
  }
  --executing_;
  return refusal;
}

// Of all that the ranks told, each with the same weight.
std::optional<double> StepRunner::Loss() const {
  double sum = 0;
  uint32_t ranks = 0;
  for (const Link& link : links_) {
    if (link.losses.empty()) continue;
    double of_rank = 0;
    for (const auto& [_, loss] : link.losses) of_rank += loss;
    sum += of_rank / static_cast<double>(link.losses.size());
    ++ranks;
  }
  return ranks == 0 ? std::nullopt : std::optional<double>(sum / ranks);
}

StepReport StepRunner::ReportOf(const effect::Close& e) const {
  StepReport report;
  report.step = e.step;
  report.outcome = e.outcome;
  report.reason = e.reason;
  report.loss = Loss();
  report.seconds = (clock_.last_update_s > 0 ? clock_.last_update_s : MonotonicSeconds()) - clock_.begin_s;
  report.receive_seconds = clock_.last_byte_s - clock_.first_byte_s;
  report.update_seconds = clock_.update_s;
  report.learning_rate = HyperOf(environment_.spec->groups[0], hyper_[0], "lr").value_or(0);
  statistics_.Complete(&report);
  return report;
}

void StepRunner::Report(const effect::Close& e, const StepFindings& found) {
  const double now_s = MonotonicSeconds();
  const StepReport report = ReportOf(e);
  environment_.metrics->OnStep(report);
  LogTorn(e);
  Remember(report, found);
  environment_.board->Write([&](RunStatus& s) {
    s.step = e.step;
    s.loss = report.loss;
    s.last_result = last_result();
    s.step_s = clock_.first_byte_s > 0 ? now_s - clock_.first_byte_s : now_s - clock_.begin_s;
    s.applied += e.outcome == Outcome::kApplied ? 1 : 0;
    s.skipped += e.outcome == Outcome::kSkipped ? 1 : 0;
    s.partial += e.outcome == Outcome::kPartial ? 1 : 0;
    s.aborted += e.outcome == Outcome::kAborted ? 1 : 0;
    if (e.outcome == Outcome::kSkipped || e.outcome == Outcome::kAborted) return;  // nothing was updated
    s.tensors = statistics_.First(kTensorsShown);
    s.rms_ratio_max.reset();
    for (double rms : report.tensor_rms) s.rms_ratio_max = std::max(s.rms_ratio_max.value_or(0), rms);
    s.layers.resize(report.layers.size());
    for (size_t i = 0; i < report.layers.size(); ++i) s.layers[i] = Latest(s.layers[i], report.layers[i]);
  });
}

}  // namespace ballast
