#include "server/step_runner.h"

#include <algorithm>
#include <cstring>
#include <string_view>
#include <utility>

#include "absl/strings/str_cat.h"

#include "server/clock.h"

namespace ballast {
namespace {

StepMachineOptions MachineOptions(const RunSpec& spec) {
  StepMachineOptions options;
  options.lease_s = spec.lease_s;
  options.rank_timeout_s = spec.rank_timeout_s;
  for (const TensorSpec& t : spec.tensors) {
    options.tensor_names.push_back(t.name);
    options.chunks.push_back(ChunkCount(spec, t));
  }
  return options;
}

std::vector<std::vector<double>> SpecHyper(const RunSpec& spec) {
  std::vector<std::vector<double>> hyper;
  for (const GroupSpec& group : spec.groups) hyper.push_back(group.hyper);
  return hyper;
}

double LearningRate(const GroupSpec& group, const std::vector<double>& hyper) {
  for (size_t h = 0; h < hyper.size(); ++h) {
    if (std::string_view(group.kernel->hypers[h].name) == "lr") return hyper[h];
  }
  return 0;
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
      machine_(MachineOptions(*environment_.spec)),
      sender_({.spec = environment_.spec,
               .store = environment_.store,
               .on_sent =
                   [this](uint64_t bytes) {
                     environment_.metrics->OnSent(bytes);
                     environment_.board->Write([&](RunStatus& s) { s.sent_bytes += bytes; });
                   }},
              *environment_.plan),
      statistics_(environment_.spec, environment_.layers),
      tensors_(environment_.spec->tensors.size()),
      hyper_(SpecHyper(*environment_.spec)) {
  for (DeviceBuffer& memory : environment_.pools) {
    const uint64_t bytes = memory.bytes();
    pools_.push_back({.memory = std::move(memory), .slabs = ReducePool(bytes, tensors_.size())});
  }
}

uint64_t StepRunner::pool_bytes() const {
  uint64_t bytes = 0;
  for (const Pool& pool : pools_) bytes += pool.memory.bytes();
  return bytes;
}

StepRunner::AttachOutcome StepRunner::Attach(const event::Attach& attach, const std::string& peer) {
  const std::string holder = peer_;
  const bool connected = machine_.connected();
  StepEffects effects = machine_.Handle(attach, MonotonicSeconds());
  AttachOutcome outcome;
  for (const StepEffect& e : effects) {
    if (const auto* reject = std::get_if<effect::Reject>(&e)) outcome.retry_after_s = reject->retry_after_s;
    if (const auto* attached = std::get_if<effect::Attached>(&e)) {
      outcome.session = attached->session;
      outcome.resumed = attached->resumed;
    }
  }
  outcome.status = Execute(std::move(effects));
  if (absl::IsAlreadyExists(outcome.status)) {
    outcome.status =
        absl::AlreadyExistsError(absl::StrCat("rank 0 of run '", environment_.spec->run_id, "' is held by ", holder,
                                              connected ? "" : " (connection lost)", ": ", outcome.status.message()));
  }
  if (outcome.status.ok()) peer_ = peer;
  ShowRank();
  Settle();
  return outcome;
}

void StepRunner::OpenStream(const std::shared_ptr<RankStream>& stream, const event::StreamOpened& opened) {
  StepEffects effects = machine_.Handle(opened, MonotonicSeconds());
  if (!effects.empty() && std::holds_alternative<effect::Reject>(effects.front())) {
    stream->Finish(std::get<effect::Reject>(effects.front()).status);
    return;
  }
  if (stream_ != nullptr) {
    // Its own client left it for this one; nobody reads what it would still say.
    stream_->Cancel();
    environment_.metrics->OnReconnect();
  }
  stream_ = stream;
  stream_session_ = opened.session;
  input_closed_ = false;
  parked_.clear();
  peer_ = stream->peer();
  sender_.Bind(stream);
  sender_.Open();
  if (draining_) sender_.Drain("the daemon is shutting down");
  ShowRank();
  Execute(std::move(effects)).IgnoreError();  // no Reject among them: it was the first or is not there
  Settle();
}

void StepRunner::OnMessage(const std::shared_ptr<RankStream>& stream, RankMessage message) {
  if (stream != stream_) return;
  parked_.push_back(std::move(message));
  if (parked_.size() == 1) TakeParked();
  Settle();
}

void StepRunner::TakeParked() {
  while (!parked_.empty() && stream_ != nullptr) {
    const auto stream = stream_;
    RankMessage message = std::move(parked_.front());
    parked_.pop_front();
    if (!std::visit([this](auto& m) { return Take(m); }, message)) {
      parked_.push_front(std::move(message));
      return;
    }
    stream->Consumed();
  }
}

bool StepRunner::Take(message::StepBegin& m) {
  if (!weights_loaded_) {
    EndStream(absl::FailedPreconditionError("StepBegin before the weights are loaded; send them with LoadState first"));
  } else if (draining_ && !machine_.step_open()) {
    EndStream(absl::UnavailableError("the daemon is shutting down; no new step begins"));
  } else {
    const bool opens = !machine_.step_open();
    if (opens) {
      hyper_ = std::move(m.hyper);
      loss_scale_ = m.loss_scale;
    }
    HandleFromStream(event::StepBegin{stream_session_, m.step, std::move(m.content)});
  }
  return true;
}

bool StepRunner::Take(message::Gradient& m) {
  Tensor& t = tensors_[m.tensor];
  const uint64_t slab_bytes = SlabBytes(environment_.spec->tensors[m.tensor]);
  const ReducePool& pool = PoolOf(m.tensor).slabs;
  if (machine_.step_open() && !t.begun && !t.slab && !pool.Fits(slab_bytes)) {
    if (updating_ > 0) return false;
    EndStream(absl::ResourceExhaustedError(
        absl::StrCat("tensor '", environment_.spec->tensors[m.tensor].name, "': its gradient takes ", slab_bytes,
                     " bytes, and of the ", pool.bytes(), " bytes of the reduce pool ", pool.used(),
                     " are held by half-sent tensors (", DescribeHalfSent(ShardOf(m.tensor)),
                     "); finish a tensor before beginning others, or raise limits.credit_bytes")));
    return true;
  }
  gradient_ = &m;
  HandleFromStream(event::Chunk{stream_session_, m.micro, m.tensor, m.chunk, m.crc});
  gradient_ = nullptr;
  return true;
}

bool StepRunner::Take(message::MicroEnd& m) {
  if (m.loss) loss_ = m.loss;
  HandleFromStream(event::MicroEnd{stream_session_, m.micro, std::move(m.absent)});
  return true;
}

bool StepRunner::Take(message::StepEnd&) {
  HandleFromStream(event::StepEnd{stream_session_});
  return true;
}

bool StepRunner::Take(message::Ignored&) { return true; }

bool StepRunner::Take(message::Bad& m) {
  EndStream(std::move(m.status));
  return true;
}

std::string StepRunner::DescribeHalfSent(uint32_t shard) const {
  std::string names;
  int shown = 0;
  for (uint32_t i = 0; i < tensors_.size(); ++i) {
    if (!tensors_[i].slab || ShardOf(i) != shard) continue;
    if (++shown > 8) return names + ", ...";
    absl::StrAppend(&names, names.empty() ? "'" : ", '", environment_.spec->tensors[i].name, "'");
  }
  return names;
}

void StepRunner::HandleFromStream(const StepEvent& event) {
  if (auto s = Execute(machine_.Handle(event, MonotonicSeconds())); !s.ok()) EndStream(std::move(s));
}

absl::Status StepRunner::Execute(StepEffects effects) {
  absl::Status refusal;
  for (const StepEffect& e : effects) {
    if (const auto* reject = std::get_if<effect::Reject>(&e)) refusal = reject->status;
    std::visit(
        [this](const auto& one) {
          using E = std::decay_t<decltype(one)>;
          if constexpr (!std::is_same_v<E, effect::Reject> && !std::is_same_v<E, effect::Attached>) Do(one);
        },
        e);
  }
  return refusal;
}

void StepRunner::Do(const effect::Fence& e) {
  if (stream_ != nullptr && stream_session_ == e.session) {
    if (e.status.code() == absl::StatusCode::kDataLoss) environment_.metrics->OnDuplicateChunk(false);
    Detach(e.status);
  }
  peer_.clear();
  ShowRank();
}

void StepRunner::Do(const effect::Opened&) {
  sender_.DropPublished();
  statistics_.Begin();
  loss_.reset();
  clock_ = {.begin_s = MonotonicSeconds()};
  learning_rate_ = LearningRate(environment_.spec->groups[0], hyper_[0]);
  environment_.metrics->OnState("training");
  environment_.board->Write([](RunStatus& s) { s.state = RunStatus::State::kTraining; });
}

void StepRunner::Do(const effect::Store& e) {
  const RunSpec& spec = *environment_.spec;
  Tensor& t = tensors_[e.tensor];
  const TensorSpec& tensor = spec.tensors[e.tensor];
  if (!t.slab) t.slab = PoolOf(e.tensor).slabs.Allocate(SlabBytes(tensor));  // Take saw that it fits
  const uint64_t offset = ChunkBegin(spec, e.chunk) * WireBytes(tensor.gradient_format);
  std::memcpy(PoolOf(e.tensor).memory.data() + t.slab->offset + offset, gradient_->data.data(), gradient_->data.size());
  const uint64_t bytes = gradient_->data.size();
  clock_.last_byte_s = MonotonicSeconds();
  if (clock_.first_byte_s == 0) clock_.first_byte_s = clock_.last_byte_s;
  sender_.Credit(bytes);
  environment_.metrics->OnReceived(bytes);
  environment_.board->Write([&](RunStatus& s) { s.received_bytes += bytes; });
}

void StepRunner::Do(const effect::Duplicate&) {
  sender_.Credit(gradient_->data.size());
  environment_.metrics->OnDuplicateChunk(true);
}

void StepRunner::Do(const effect::Update& e) {
  const RunSpec& spec = *environment_.spec;
  const Slab slab = *std::exchange(tensors_[e.tensor].slab, std::nullopt);
  tensors_[e.tensor].begun = true;
  ++updating_;
  environment_.store->Update(
      e.tensor,
      {.step = e.step,
       .loss_scale = loss_scale_,
       .statistics = e.step == 1 || e.step % spec.stats_every == 0 ? kernels::StatisticsLevel::kFull
                                                                   : kernels::StatisticsLevel::kCore,
       .hyper = hyper_[spec.tensors[e.tensor].group],
       .gradient = PoolOf(e.tensor).memory.data() + slab.offset},
      [this, step = e.step, tensor = e.tensor, slab](const TaskResult& result) {
        OnUpdated(step, tensor, slab, result);
      });
}

void StepRunner::OnUpdated(uint64_t step, uint32_t tensor, Slab slab, const TaskResult& result) {
  PoolOf(tensor).slabs.Free(slab);
  --updating_;
  if (machine_.step_open() && machine_.step() == step) {
    statistics_.Add(tensor, result.statistics);
    clock_.update_s += result.seconds;
    clock_.last_update_s = MonotonicSeconds();
  }
  Execute(machine_.Handle(event::TensorApplied{step, tensor}, MonotonicSeconds())).IgnoreError();  // never refused
  TakeParked();
  Settle();
}

void StepRunner::Do(const effect::Publish& e) { sender_.Publish(e.step, e.tensor); }

void StepRunner::Do(const effect::Close& e) {
  ClosedStep closed{.step = e.step, .outcome = e.outcome, .reason = e.reason, .not_applied = e.not_applied};
  statistics_.Complete(&closed);
  last_result_ = closed;
  sender_.Result(std::move(closed));
  Report(e);
  DropStep();
}

void StepRunner::Do(const effect::RepeatResult&) {
  if (last_result_) sender_.Result(*last_result_);
}

void StepRunner::Do(const effect::Discard&) { DropStep(); }

void StepRunner::DropStep() {
  for (uint32_t i = 0; i < tensors_.size(); ++i) {
    if (tensors_[i].slab) PoolOf(i).slabs.Free(*tensors_[i].slab);
    tensors_[i] = {};
  }
}

void StepRunner::Report(const effect::Close& e) {
  const double now_s = MonotonicSeconds();
  StepReport report;
  report.step = e.step;
  report.outcome = e.outcome;
  report.reason = e.reason;
  report.loss = loss_;
  report.seconds = (clock_.last_update_s > 0 ? clock_.last_update_s : now_s) - clock_.begin_s;
  report.receive_seconds = clock_.last_byte_s - clock_.first_byte_s;
  report.update_seconds = clock_.update_s;
  report.learning_rate = learning_rate_;
  statistics_.Complete(&report);
  environment_.metrics->OnStep(report);
  environment_.board->Write([&](RunStatus& s) {
    s.step = e.step;
    s.loss = loss_;
    s.last_result = last_result_;
    s.step_s = clock_.first_byte_s > 0 ? now_s - clock_.first_byte_s : now_s - clock_.begin_s;
    s.applied += e.outcome == Outcome::kApplied ? 1 : 0;
    s.partial += e.outcome == Outcome::kPartial ? 1 : 0;
    s.aborted += e.outcome == Outcome::kAborted ? 1 : 0;
    s.rms_ratio_max.reset();
    for (double rms : report.tensor_rms) s.rms_ratio_max = std::max(s.rms_ratio_max.value_or(0), rms);
    s.layers.resize(report.layers.size());
    for (size_t i = 0; i < report.layers.size(); ++i) s.layers[i] = Latest(s.layers[i], report.layers[i]);
  });
}

}  // namespace ballast
