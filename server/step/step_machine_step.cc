// What becomes of the open step: the half of the step machine that begins, sums and closes it.
#include <algorithm>
#include <utility>

#include "absl/strings/str_cat.h"

#include "server/step/step_machine.h"

namespace ballast {

StepEffects StepMachine::On(const event::StepBegin& e, double now_s) {
  const auto rank = RankOf(e.session);
  if (!rank) return Refuse(CheckCurrent(e.session));
  Rank& r = ranks_[*rank];
  const bool may_have_missed = r.begun < e.step || (r.begun == e.step && !r.said_end);
  if (e.step <= closed_step_ && r.lacking != 0 && may_have_missed) {
    r.begun = e.step;  // it closed without this rank, or while it was away; it has or gets the result
    r.said_end = false;
    r.lacking = std::max(r.lacking, e.step);
    return {};
  }
  if (e.step != step_) {
    return Refuse(absl::FailedPreconditionError(
        absl::StrCat("StepBegin of step ", e.step, ", but step ", step_, open_ ? " is open" : " is the next")));
  }
  if (InStep(*rank)) {
    if (e.content == begin_content_) return {};
    return Refuse(absl::FailedPreconditionError(
        absl::StrCat("step ", step_, " was begun with other values; a resumed step must repeat them to the bit")));
  }
  StepEffects effects;
  if (!open_) {
    open_ = true;
    opened_at_s_ = now_s;
    begin_content_ = e.content;
    begin_rank_ = *rank;
    effects.push_back(effect::Opened{step_, LeftOutRanks()});
  }
  r.begun = step_;
  r.ended = r.said_end = r.asked = r.said_measure = r.told_norm = r.named_last = r.discards = false;
  r.offered.reset();
  r.lacking = 0;
  effects.push_back(effect::Begun{*rank});
  const auto in_step = [this](const Rank& one) { return one.begun == step_; };
  if (std::all_of(ranks_.begin(), ranks_.end(), in_step)) begun_again_ = 0;
  if (e.content != begin_content_) {
    Close(Outcome::kAborted, "disagreement", BeginConflict(*rank, e.content), &effects);
  }
  return effects;
}

absl::StatusOr<StepMachine::Speaker> StepMachine::CheckSpeaker(SessionId session) const {
  const auto rank = RankOf(session);
  if (!rank) return CheckCurrent(session);
  if (InStep(*rank)) return Speaker{*rank, false};
  const Rank& r = ranks_[*rank];
  if (r.begun != 0 && !r.said_end) return Speaker{*rank, true};
  return absl::FailedPreconditionError(absl::StrCat("no step is open; send StepBegin of step ", step_));
}

StepEffects StepMachine::On(const event::MicroBegin& e, double) {
  const auto speaker = CheckSpeaker(e.session);
  if (!speaker.ok()) return Refuse(speaker.status());
  if (speaker->stale) return {};
  const uint32_t rank = speaker->rank;
  if (discarded_) {
    const absl::Status number = CheckMicroNumber(e.micro);
    return number.ok() ? StepEffects() : Refuse(number);
  }
  if (auto s = CheckMicro(rank, e.micro, e.last); !s.ok()) return Refuse(s);
  if (e.micro < reduction_.micros_begun(rank)) return {};
  if (MustWait(e)) {
    return Refuse(absl::FailedPreconditionError(
        absl::StrCat("micro-batch ", e.micro, " begins, but micro-batch ", reduction_.micros_summed(),
                     " is not summed yet; its ranks may be ", ReductionTracker::kMostLive, " apart")));
  }
  if (std::string conflict = MicroConflict(rank, e.micro, e.last); !conflict.empty()) {
    StepEffects effects;
    Close(Outcome::kAborted, "disagreement", std::move(conflict), &effects);
    return effects;
  }
  reduction_.BeginMicro(rank, e.last);
  StepEffects effects;
  Proceed(&effects);  // what it does not cover may be summed
  return effects;
}

bool StepMachine::MustWait(const event::MicroBegin& e) const {
  const auto rank = RankOf(e.session);
  return rank && InStep(*rank) && !discarded_ && e.micro == reduction_.micros_begun(*rank) &&
         !reduction_.MayBegin(e.micro) && CheckMicro(*rank, e.micro, e.last).ok();  // what is wrong is refused now
}

bool StepMachine::BeginImplied(uint32_t rank, const event::MicroBegin& begin, double now_s, StepEffects* effects) {
  if (reduction_.micros_begun(rank) == 0) *effects = On(begin, now_s);
  return InStep(rank);
}

absl::Status StepMachine::CheckMicroNumber(uint32_t micro) const {
  if (micro < options_.most_micros) return absl::OkStatus();
  return absl::InvalidArgumentError(absl::StrCat("micro-batch ", micro, ", but the run was created for ",
                                                 options_.most_micros, " a step (RunSpec.accumulation), from 0 on"));
}

absl::Status StepMachine::CheckMicro(uint32_t rank, uint32_t micro, bool last) const {
  if (auto s = CheckMicroNumber(micro); !s.ok()) return s;
  const uint32_t begun = reduction_.micros_begun(rank);
  const auto known = reduction_.last_micro(rank);
  if (micro < begun) {
    if (last == (known == micro && !ranks_[rank].named_last)) return absl::OkStatus();
    return absl::FailedPreconditionError(
        absl::StrCat("micro-batch ", micro, " came again as ", last ? "the last" : "not the last"));
  }
  if (micro > begun) {
    return absl::FailedPreconditionError(absl::StrCat("micro-batch ", micro, " begins, but ", begun, " is the next"));
  }
  if (known) {
    return absl::FailedPreconditionError(
        absl::StrCat("micro-batch ", micro, " begins, but ", *known, " was said to be the last"));
  }
  if (begun > 0 && !reduction_.ended(rank, begun - 1)) {
    return absl::FailedPreconditionError(absl::StrCat("micro-batch ", micro, " begins before MicroEnd of ", begun - 1));
  }
  return begun > 0 ? CheckWhole(rank, begun - 1) : absl::OkStatus();
}

StepEffects StepMachine::On(const event::Chunk& e, double now_s) {
  const auto speaker = CheckSpeaker(e.session);
  if (!speaker.ok()) return Refuse(speaker.status());
  const uint32_t rank = speaker->rank;
  if (speaker->stale || discarded_) return {effect::Drop{rank, /*again=*/false}};
  if (auto s = CheckChunk(rank, e); !s.ok()) return Refuse(s);
  StepEffects effects;
  if (!BeginImplied(rank, {e.session, 0, /*last=*/true}, now_s, &effects)) {
    effects.push_back(effect::Drop{rank, /*again=*/false});
    return effects;
  }
  const ChunkId id{e.micro, e.tensor, e.chunk};
  switch (reduction_.Deliver(rank, id, e.crc)) {
    case ReductionTracker::Arrival::kAgain:
      return {effect::Drop{rank, /*again=*/true}};
    case ReductionTracker::Arrival::kOther: {
      const auto why = absl::DataLossError(absl::StrCat("chunk ", e.chunk, " of ", Name(e.tensor), " in step ", step_,
                                                        " came twice with different bytes; the session is closed"));
      effects = Refuse(why);
      Remember(rank, Ending::kDataLoss);
      EndSession(rank, why, "data_loss", now_s, &effects);
      return effects;
    }
    case ReductionTracker::Arrival::kNew:
      effects.push_back(effect::Hold{rank, id});
      Proceed(&effects);
  }
  return effects;
}

absl::Status StepMachine::CheckChunk(uint32_t rank, const event::Chunk& e) const {
  if (e.tensor >= tensors_.size()) {
    return absl::InvalidArgumentError(
        absl::StrCat("gradient of tensor ", e.tensor, ", but the run has ", tensors_.size(), " tensors"));
  }
  const uint64_t chunks = options_.reduction.chunks[e.tensor];
  if (e.chunk >= chunks) {
    return absl::InvalidArgumentError(
        absl::StrCat("chunk ", e.chunk, " of ", Name(e.tensor), ", which has ", chunks, " chunks"));
  }
  if (!Contains(reduction_.covers(rank), e.tensor, e.chunk)) {
    return absl::InvalidArgumentError(absl::StrCat("chunk ", e.chunk, " of ", Name(e.tensor), ", to which rank ", rank,
                                                   " does not contribute (AttachRequest.coverage)"));
  }
  if (auto s = CheckMicroNumber(e.micro); !s.ok()) return s;
  const uint32_t begun = reduction_.micros_begun(rank);
  if (e.micro == 0 && begun == 0) return absl::OkStatus();
  if (e.micro >= begun) {
    return absl::FailedPreconditionError(
        absl::StrCat("gradient of ", Name(e.tensor), " in micro-batch ", e.micro, " before its MicroBegin"));
  }
  if (!reduction_.kept(rank, e.micro)) return absl::OkStatus();
  if (reduction_.ended(rank, e.micro) && reduction_.absent(rank, e.micro)[e.tensor]) {
    return absl::FailedPreconditionError(
        absl::StrCat("a gradient of ", Name(e.tensor), " after its micro-batch ended without one"));
  }
  return absl::OkStatus();
}

StepEffects StepMachine::On(const event::MicroEnd& e, double now_s) {
  const auto speaker = CheckSpeaker(e.session);
  if (!speaker.ok()) return Refuse(speaker.status());
  if (speaker->stale) return {};
  const uint32_t rank = speaker->rank;
  if (auto s = CheckMicroNumber(e.micro); !s.ok()) return Refuse(s);
  if (discarded_) return {};
  StepEffects effects;
  if (e.micro == 0 && !BeginImplied(rank, {e.session, 0, /*last=*/true}, now_s, &effects)) return effects;
  if (e.micro >= reduction_.micros_begun(rank)) {
    return Refuse(absl::FailedPreconditionError(absl::StrCat("MicroEnd of ", e.micro, " before its MicroBegin")));
  }
  std::vector<bool> absent = e.absent;
  absent.resize(tensors_.size());
  if (reduction_.ended(rank, e.micro)) {
    if (!reduction_.kept(rank, e.micro) || absent == reduction_.absent(rank, e.micro)) return {};
    return Refuse(absl::FailedPreconditionError("MicroEnd came again with other absent tensors"));
  }
  if (auto s = CheckAbsent(rank, e.micro, absent); !s.ok()) return Refuse(s);
  reduction_.EndMicro(rank, std::move(absent));
  Proceed(&effects);
  return effects;
}

absl::Status StepMachine::CheckAbsent(uint32_t rank, uint32_t micro, const std::vector<bool>& absent) const {
  for (uint32_t i = 0; i < tensors_.size(); ++i) {
    if (!absent[i] || reduction_.count(rank, micro, i) == 0) continue;
    return absl::InvalidArgumentError(absl::StrCat(Name(i), " is listed absent, but a gradient of it was sent"));
  }
  return absl::OkStatus();
}

absl::Status StepMachine::CheckWhole(uint32_t rank, uint32_t micro) const {
  const std::vector<bool>& absent = reduction_.absent(rank, micro);
  for (uint32_t i = 0; i < tensors_.size(); ++i) {
    const uint64_t delivered = reduction_.count(rank, micro, i), chunks = reduction_.covered(rank, i);
    if (absent[i] || delivered == chunks) continue;
    return absl::InvalidArgumentError(absl::StrCat(Name(i), ": ", delivered, " of ", chunks,
                                                   " gradient chunks sent in step ", step_,
                                                   "; send the rest, or list it absent"));
  }
  return absl::OkStatus();
}

StepEffects StepMachine::On(const event::TensorApplied& e, double) {
  reduction_.Release(e.tensor, e.slab);
  --updating_[e.tensor];
  StepEffects effects;
  if (abandoned_[e.tensor] > 0) {
    --abandoned_[e.tensor];
    Proceed(&effects);
    return effects;
  }
  applied_in_[e.tensor] = e.step;
  if (open_ && e.step == step_) {
    tensors_[e.tensor].state = TensorState::kApplied;
    --unsettled_;
    effects.push_back(effect::Publish{step_, e.tensor});
  } else {
    PublishClosed(e, &effects);
  }
  Proceed(&effects);
  return effects;
}

// Handles an update of a step that closed meanwhile: its ranks still wait for the weights and the result.
void StepMachine::PublishClosed(const event::TensorApplied& e, StepEffects* effects) {
  for (uint32_t r = 0; r < ranks_.size(); ++r) {
    const Rank& rank = ranks_[r];
    if (!rank.session || rank.lacking == 0 || rank.lacking > e.step) continue;
    effects->push_back(effect::Publish{e.step, e.tensor, r});
  }
  const auto closing = closing_.find(e.step);
  if (closing != closing_.end() && --closing->second == 0) closing_.erase(closing);
  TellResults(effects);
}

StepEffects StepMachine::On(const event::Verdict& e, double) {
  if (!open_ || e.step != step_) return {};
  StepEffects effects;
  if (e.outcome != Outcome::kApplied) {
    Close(e.outcome, e.reason, e.detail, &effects);
    return effects;
  }
  for (uint32_t i = 0; i < tensors_.size(); ++i) {
    if (tensors_[i].state != TensorState::kSummed) continue;
    Update(i, *std::exchange(tensors_[i].slab, std::nullopt), &effects);
  }
  favoured_ = true;
  CloseIfDone(&effects);
  return effects;
}

void StepMachine::Update(uint32_t tensor, Slab slab, StepEffects* effects) {
  tensors_[tensor].state = TensorState::kUpdating;
  ++updating_[tensor];
  effects->push_back(effect::Update{step_, tensor, slab});
}

void StepMachine::Proceed(StepEffects* effects) {
  if (discarded_) {
    TellMeasured(effects);
    return CloseIfDone(effects);
  }
  ReductionTracker::Progress progress = reduction_.Advance();
  for (ReductionTracker::Sum& sum : progress.sums) effects->push_back(std::move(sum));
  for (const ReductionTracker::Complete& complete : progress.complete) {
    Tensor& t = tensors_[complete.tensor];
    if (!complete.slab) {
      t.state = TensorState::kAbsent;
      --unsettled_;
    } else if (options_.commit == Commit::kStaged) {
      t = {TensorState::kSummed, complete.slab};
    } else {
      Update(complete.tensor, *complete.slab, effects);
    }
  }
  MeasureIfDue(effects);
  TellMeasured(effects);
  JudgeIfDue(effects);
  CloseIfDone(effects);
}

void StepMachine::CloseIfDone(StepEffects* effects) {
  if (!open_ || !AllEnded()) return;
  if (discarded_) return Close(Outcome::kSkipped, kDiscarded, WhoDiscards(), effects);
  if (unsettled_ == 0 && (!GoesWithOthers() || favoured_)) Close(Outcome::kApplied, "", "", effects);
}

// Closes the step of a process that is gone and of whose contributions some are summed. Tensors that were updated stay
// so.
void StepMachine::CloseTorn(const char* reason, std::string detail, StepEffects* effects) {
  const bool any_updated = UpdatedAny();
  if (any_updated && options_.commit == Commit::kStaged) return Close(Outcome::kApplied, "", "", effects);  // all were
  Close(any_updated ? Outcome::kPartial : Outcome::kAborted, reason, std::move(detail), effects);
}

StepEffects StepMachine::On(const event::Stop& e, double) {
  StepEffects effects;
  if (open_ && UpdatedAny()) CloseAsFarAs("stopped", e.why, &effects);
  return effects;
}

void StepMachine::CloseAsFarAs(const char* reason, std::string detail, StepEffects* effects) {
  if (reduction_.all_complete() && options_.commit == Commit::kRelease) {
    return Close(Outcome::kApplied, "", "", effects);  // nothing was missing but end marks
  }
  CloseTorn(reason, std::move(detail), effects);
}

void StepMachine::Close(Outcome outcome, std::string reason, std::string detail, StepEffects* effects) {
  effect::Close close{.step = step_, .outcome = outcome, .reason = std::move(reason), .detail = std::move(detail)};
  uint64_t updating = 0;
  for (uint32_t i = 0; i < tensors_.size(); ++i) {
    const TensorState state = tensors_[i].state;
    if (state == TensorState::kAwaited || state == TensorState::kSummed) close.not_applied.push_back(i);
    updating += state == TensorState::kUpdating ? 1 : 0;
  }
  effects->push_back(std::move(close));
  if (updating > 0) closing_[step_] = updating;
  closed_step_ = step_++;
  for (Rank& r : ranks_) {
    if (r.session && r.lacking == 0) r.lacking = closed_step_;
  }
  TellResults(effects);
  open_ = false;
  Reset();
}

void StepMachine::Reset() {
  begin_content_.clear();
  judged_ = favoured_ = measured_ = discarded_ = false;
  TakeBackIn();
  std::vector<bool> left_out;
  for (Rank& rank : ranks_) {
    rank.awaited_s = 0;
    rank.lack = {};
    left_out.push_back(rank.left_out);
  }
  DropSums(left_out);
}

void StepMachine::DropSums(const std::vector<bool>& left_out) {
  unsettled_ = tensors_.size();
  for (uint32_t i = 0; i < tensors_.size(); ++i) {
    const std::optional<Slab> slab = std::exchange(tensors_[i], {}).slab;
    if (slab && measuring_) lent_.emplace_back(i, *slab);
    if (slab && !measuring_) reduction_.Release(i, *slab);
  }
  reduction_.Begin(left_out);
}

std::string StepMachine::Name(uint32_t tensor) const {
  return absl::StrCat("tensor ", tensor, " '", options_.tensor_names[tensor], "'");
}

}  // namespace ballast
