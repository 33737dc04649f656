#include "client/cpp/stream/open_step.h"

#include <algorithm>
#include <limits>
#include <map>
#include <utility>

#include "absl/strings/str_cat.h"
#include "proto/bitmap.h"
#include "proto/checksum.h"

namespace ballast {
namespace {

// Of gradients that wait to be sent: so much is worth waking the daemon for.
constexpr uint64_t kWorthSendingBytes = 64 << 10;

}  // namespace

OpenStep::OpenStep(const TensorTable& tensors, v1::StepBegin begin, uint32_t micros, absl::Time now)
    : tensors_(tensors),
      begin_(std::move(begin)),
      micros_(micros),
      buffer_(tensors.size()),
      arrivals_(tensors.size()),
      losses_(1),
      began_at_(now) {}

absl::Status OpenStep::MayPush(uint32_t tensor) const {
  if (pushed_all()) {
    return absl::FailedPreconditionError(absl::StrCat(
        "Push of ", tensors_.Name(tensor), " after ", ended() ? "EndStep" : "MeasureStep", " of step ", number(),
        ended() ? "; wait for its result, then BeginStep" : ", which measured all that was pushed; call EndStep"));
  }
  if (!buffer_.pushed(buffer_.micro(), tensor)) return absl::OkStatus();
  return absl::FailedPreconditionError(absl::StrCat(tensors_.Name(tensor), " was pushed before in step ", number(),
                                                    "; one gradient per tensor and ",
                                                    micros_ != 1 ? "micro-batch" : "step"));
}

void OpenStep::Push(uint32_t tensor, std::vector<std::string> chunks, Freed* freed) {
  buffer_.Add(tensor, tensors_[tensor].first_chunk, std::move(chunks));
  if (result_) buffer_.FreeAll(freed);
}

bool OpenStep::MaySendNow(uint64_t bytes, const CreditWindow& credit) const {
  return next_ == Next::kGradients && all_sent() && sending_ == buffer_.micro() && credit.Allows(bytes);
}

ChunkRef OpenStep::PushSent(uint32_t tensor, uint64_t bytes, const GradientRoom& room, CreditWindow* credit,
                            v1::TrainRequest* request) {
  const ChunkRef id = buffer_.AddSent(tensor, tensors_[tensor].first_chunk, bytes, room);
  Spend(id, credit);
  FillHeader(id, request->mutable_gradient());
  return id;
}

absl::Status OpenStep::MayEndMicro() const {
  if ((micros_ == 0 || buffer_.micro() + 1 < micros_) && !pushed_all()) return absl::OkStatus();
  if (micros_ == 0) {
    return absl::FailedPreconditionError(absl::StrCat("EndMicro after ", ended() ? "EndStep" : "MeasureStep",
                                                      " of step ", number(), ", which ended its last micro-batch"));
  }
  return absl::FailedPreconditionError(absl::StrCat("EndMicro in the last of ", micros_, " micro-batches of step ",
                                                    number(), "; call EndStep, or begin the step with more"));
}

void OpenStep::EndMicro(std::optional<double> loss, bool next_is_last) {
  losses_.back() = loss;
  losses_.emplace_back();
  buffer_.BeginMicro();
  if (next_is_last) micros_ = buffer_.micro() + 1;
}

absl::Status OpenStep::MayEndLast(const char* call) const {
  if (micros_ == 0 || buffer_.micro() + 1 == micros_) return absl::OkStatus();
  return absl::FailedPreconditionError(absl::StrCat(call, " in micro-batch ", buffer_.micro() + 1, " of ", micros_,
                                                    " of step ", number(), "; call EndMicro after each but the last"));
}

absl::Status OpenStep::MayMeasure() const {
  if (pushed_all()) {
    return absl::FailedPreconditionError(absl::StrCat("MeasureStep of step ", number(), " after its ",
                                                      ended() ? "EndStep" : "MeasureStep",
                                                      "; a step is measured once"));
  }
  return MayEndLast("MeasureStep");
}

absl::Status OpenStep::MayEnd(bool discard) const {
  if (ended()) {
    return absl::FailedPreconditionError(absl::StrCat("EndStep of step ", number(), " was called before"));
  }
  return discard ? absl::OkStatus() : MayEndLast("EndStep");
}

void OpenStep::EndLast(absl::Time now) {
  timing_.backward_s = absl::ToDoubleSeconds(now - began_at_);
  timing_.pushed_bytes_in_backward = timing_.pushed_bytes;
  timing_.pulled_bytes_in_backward = timing_.pulled_bytes;
}

std::future<absl::StatusOr<MeasuredStep>> OpenStep::Measure(std::optional<double> loss, absl::Time now) {
  losses_.back() = loss;
  EndLast(now);
  measured_promise_.emplace();
  auto future = measured_promise_->get_future();
  if (result_) SetUnmeasured();
  return future;
}

std::future<absl::StatusOr<StepResult>> OpenStep::End(std::optional<double> loss, v1::StepEnd end, absl::Time now,
                                                      Freed* freed) {
  end_ = std::move(end);
  if (!asked()) {
    losses_.back() = loss;
    EndLast(now);
  } else if (loss && !losses_.back()) {
    end_.set_loss(*loss);
  }
  ended_at_ = now;
  if (end_.discard()) {
    buffer_.FreeAll(freed);
    if (next_ != Next::kStepBegin && next_ != Next::kNothing) next_ = Next::kStepEnd;
  }
  return promise_.get_future();
}

void OpenStep::SetMeasured(const v1::StepMeasured& measured) {
  if (measured.step() == number() && !measured.discarded()) {
    MeasuredStep step{.grad_norm = measured.grad_norm(), .nonfinite_tensors = measured.nonfinite_tensors()};
    step.squares.assign(measured.squares().begin(), measured.squares().end());
    if (measured.has_first_nonfinite()) step.first_nonfinite = measured.first_nonfinite();
    return FinishMeasure(std::move(step));
  }
  SetUnmeasured();
}

void OpenStep::SetUnmeasured() {
  const bool applied = result_ && result_->outcome() == v1::STEP_OUTCOME_APPLIED;
  FinishMeasure(
      MeasuredStep{.grad_norm = std::numeric_limits<double>::quiet_NaN(), .measured = false, .applied = applied});
}

void OpenStep::FinishMeasure(absl::StatusOr<MeasuredStep> measured) {
  if (asked() && !std::exchange(has_measured_, true)) measured_promise_->set_value(std::move(measured));
}

bool OpenStep::MayGo(const ChunkRef& id, const CreditWindow& credit) const { return credit.Allows(buffer_.Bytes(id)); }

bool OpenStep::HasRequest(const CreditWindow& credit) const {
  if (next_ == Next::kNothing) return false;
  if (next_ == Next::kStepEnd) return ended();
  if (next_ != Next::kGradients) return true;
  return MicroEndIsDue() ||
         (!MicroSent() && (MayGo(buffer_.next(), credit) || (credit.AllowsWanted() && WantedIsQueued())));
}

bool OpenStep::MayGather() const {
  return next_ == Next::kGradients && !MicroEnded() && !WantedIsQueued() && buffer_.queued_bytes() < kWorthSendingBytes;
}

void OpenStep::NextRequest(CreditWindow* credit, v1::TrainRequest* request) {
  switch (next_) {
    case Next::kStepBegin:
      *request->mutable_step_begin() = begin_;
      next_ = end_.discard() ? Next::kStepEnd : Next::kMicroBegin;
      return;
    case Next::kMicroBegin:
      request->mutable_micro_begin()->set_micro(sending_);
      request->mutable_micro_begin()->set_last(sending_ + 1 == micros_);
      micro_end_sent_ = false;
      next_ = Next::kGradients;
      return;
    case Next::kGradients:
      return NextOfMicro(credit, request);
    case Next::kStepMeasure:
      request->mutable_step_measure();
      next_ = Next::kStepEnd;
      return;
    case Next::kStepEnd:
      *request->mutable_step_end() = end_;
      next_ = Next::kNothing;
      return;
    case Next::kNothing:
      return;
  }
}

// MicroEnd goes before gradients that wait for credit, since the other ranks' credit may wait for the list of tensors
// that are absent here.
void OpenStep::NextOfMicro(CreditWindow* credit, v1::TrainRequest* request) {
  const bool within = !MicroSent() && MayGo(buffer_.next(), *credit);
  if (!within && MicroEndIsDue()) {
    FillMicroEnd(request->mutable_micro_end());
    micro_end_sent_ = true;
  } else {
    const ChunkRef id = within ? buffer_.next() : *std::exchange(wanted_, std::nullopt);
    Spend(id, credit);
    FillHeader(id, request->mutable_gradient());
    *request->mutable_gradient()->mutable_data() = buffer_.Lend(id);
  }
  if (!micro_end_sent_ || !MicroSent()) return;
  next_ = AfterMicro();
  if (next_ == Next::kMicroBegin) ++sending_;
}

OpenStep::Next OpenStep::AfterMicro() {
  if (sending_ < buffer_.micro()) return Next::kMicroBegin;
  return asked() ? Next::kStepMeasure : Next::kStepEnd;
}

void OpenStep::Spend(const ChunkRef& id, CreditWindow* credit) {
  credit->Spend(buffer_.Bytes(id));
  unacknowledged_.push_back({.number = credit->sent(), .id = id});
  timing_.pushed_bytes += buffer_.Bytes(id);
}

void OpenStep::FillHeader(const ChunkRef& id, v1::Gradient* gradient) const {
  gradient->set_micro(id.micro);
  gradient->set_tensor(id.tensor);
  gradient->set_chunk(id.chunk);
  gradient->set_format(tensors_[id.tensor].gradient);
  gradient->set_crc32c(buffer_.Checksum(id));
}

void OpenStep::FillMicroEnd(v1::MicroEnd* end) const {
  std::vector<bool> absent(tensors_.size());
  for (uint32_t i = 0; i < tensors_.size(); ++i) absent[i] = !buffer_.pushed(sending_, i);
  end->set_micro(sending_);
  end->set_absent(PackBits(absent));
  if (losses_[sending_]) end->set_loss(*losses_[sending_]);
}

void OpenStep::Sent(v1::TrainRequest* request) {
  if (!request->has_gradient()) return;
  v1::Gradient& gradient = *request->mutable_gradient();
  buffer_.BringBack({gradient.micro(), gradient.tensor(), gradient.chunk()}, gradient.mutable_data());
}

void OpenStep::Acknowledge(uint64_t gradients, Freed* freed) {
  for (; !unacknowledged_.empty() && unacknowledged_.front().number <= gradients; unacknowledged_.pop_front()) {
    buffer_.Free(unacknowledged_.front().id, freed);
  }
}

absl::Status OpenStep::CheckWeights(const v1::Weights& weights, uint64_t data_bytes) const {
  const auto wrong = [&](const auto&... what) {
    return absl::InternalError(absl::StrCat("the daemon sent weights of ", tensors_.Name(weights.tensor()), " in step ",
                                            number(), " ", what...));
  };
  if (weights.tensor() >= tensors_.size()) return wrong("of which the run has ", tensors_.size());
  const WireTensor& wire = tensors_[weights.tensor()];
  if (wire.shard.contributes && !pushed(weights.tensor()) && !ended()) return wrong("before its gradient was pushed");
  if (weights.format() != wire.serving) return wrong("as '", weights.format(), "', not '", wire.serving, "'");
  if (weights.chunk() < wire.first_chunk || weights.chunk() >= wire.end_chunk) {
    return wrong("with chunk ", weights.chunk(), ", wanted those from ", wire.first_chunk, " to below ",
                 wire.end_chunk);
  }
  const ShardPiece piece = tensors_.PieceOf(weights.tensor(), weights.chunk());
  const uint64_t wanted = piece.size() * wire.serving_element_bytes;
  if (data_bytes != wanted) {
    return wrong("with ", data_bytes, " bytes in chunk ", weights.chunk(), " instead of ", wanted);
  }
  const uint64_t scales = ScalesNeeded(wire.row_length, piece.first, piece.last);
  if (static_cast<uint64_t>(weights.scales_size()) != scales) {
    return wrong("with ", weights.scales_size(), " scales in chunk ", weights.chunk(), " instead of ", scales);
  }
  return absl::OkStatus();
}

bool OpenStep::Received(const v1::Weights& weights, uint64_t data_bytes) {
  Arrivals& arrivals = arrivals_[weights.tensor()];
  arrivals.chunks.resize(tensors_[weights.tensor()].chunks);
  if (arrivals.chunks[weights.chunk()]) return false;
  arrivals.chunks[weights.chunk()] = true;
  ++arrivals.count;
  timing_.pulled_bytes += data_bytes + static_cast<uint64_t>(weights.scales_size()) * sizeof(float);
  return true;
}

absl::Status OpenStep::SetResult(const v1::StepResult& result, Freed* freed) {
  const bool updates = result.outcome() == v1::STEP_OUTCOME_APPLIED || result.outcome() == v1::STEP_OUTCOME_PARTIAL;
  std::vector<bool> expected(tensors_.size());
  for (uint32_t i = 0; i < tensors_.size(); ++i) expected[i] = updates && pushed(i);
  for (const uint32_t tensor : result.tensors_not_applied()) {
    if (tensor < tensors_.size()) expected[tensor] = false;
  }
  for (uint32_t i = 0; i < tensors_.size(); ++i) {
    if (expected[i] && !weights_in(i)) {
      return absl::InternalError(absl::StrCat("the daemon closed step ", number(), " with ", arrivals_[i].count, " of ",
                                              tensors_[i].held_chunks(), " weight chunks of ", tensors_.Name(i),
                                              " sent"));
    }
  }
  result_ = result;
  next_ = Next::kNothing;
  buffer_.FreeAll(freed);
  SetUnmeasured();  // who still waits for it, waits for nothing
  return absl::OkStatus();
}

StepResult OpenStep::result(absl::Time now) const {
  StepResult result{.result = *result_, .timing = timing_};
  result.timing.buffered_bytes_most = buffer_.most_bytes();
  result.timing.wait_s = absl::ToDoubleSeconds(now - *ended_at_);
  for (uint32_t i = 0; i < tensors_.size(); ++i) {
    if (arrivals_[i].count > 0 && weights_in(i)) result.received.push_back(i);
  }
  return result;
}

absl::Status OpenStep::Resume(const v1::AttachResponse& grant, v1::Open* open) {
  if (grant.resume_step() < number()) {
    return absl::FailedPreconditionError(absl::StrCat("step ", number(), " is open here, but the daemon is at step ",
                                                      grant.resume_step(), "; attach again and pull the weights"));
  }
  std::vector<bool> received(tensors_.size());
  for (uint32_t i = 0; i < tensors_.size(); ++i) received[i] = weights_in(i);
  open->set_weights_step(number());
  open->set_weights_received(PackBits(received));

  const bool closed = grant.resume_step() > number();
  next_ = closed || result_ ? Next::kNothing : Next::kStepBegin;
  sending_ = 0;
  wanted_.reset();
  unacknowledged_.clear();
  if (next_ != Next::kNothing && end_.discard()) return absl::OkStatus();
  if (next_ != Next::kNothing) return RequeueAllBut(grant);
  Freed freed;
  buffer_.FreeAll(&freed);
  return absl::OkStatus();
}

absl::Status OpenStep::RequeueAllBut(const v1::AttachResponse& grant) {
  const std::vector<bool> applied = UnpackBits(grant.tensors_applied(), tensors_.size());
  std::map<std::pair<uint32_t, uint32_t>, std::vector<bool>> held;  // by micro-batch and tensor
  std::map<uint32_t, std::vector<bool>> whole;                      // tensors, by micro-batch
  uint32_t whole_micros = 0;
  for (const v1::ChunksHeld& entry : grant.held()) {
    whole_micros = std::max(whole_micros, entry.whole_micros());
    if (!entry.whole_tensors().empty()) whole[entry.micro()] = UnpackBits(entry.whole_tensors(), tensors_.size());
    if (entry.chunks().empty() || entry.tensor() >= tensors_.size()) continue;
    held[{entry.micro(), entry.tensor()}] = UnpackBits(entry.chunks(), tensors_[entry.tensor()].chunks);
  }
  const auto lost = buffer_.Requeue([&](const ChunkRef& id) {
    if (applied[id.tensor] || id.micro < whole_micros) return true;
    if (const auto found = whole.find(id.micro); found != whole.end() && found->second[id.tensor]) return true;
    const auto found = held.find({id.micro, id.tensor});
    return found != held.end() && found->second[id.chunk];
  });
  if (!lost) return absl::OkStatus();
  return absl::InternalError(absl::StrCat("chunk ", lost->chunk, " of ", tensors_.Name(lost->tensor), " in step ",
                                          number(), ": the daemon acknowledged it and now lacks it"));
}

}  // namespace ballast
