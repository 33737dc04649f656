// How the ranks end the open step: they may ask for its norm first, or discard it; when all have ended it, it is judged.
#include <algorithm>
#include <utility>
#include <vector>

#include "absl/strings/str_cat.h"
#include "absl/strings/str_join.h"

#include "server/step/step_machine.h"

namespace ballast {

StepEffects StepMachine::On(const event::StepMeasure& e, double) {
  const auto speaker = CheckSpeaker(e.session);
  if (!speaker.ok()) return Refuse(speaker.status());
  if (speaker->stale) return {};
  const uint32_t rank = speaker->rank;
  if (auto s = CheckMeasure(rank); !s.ok()) return Refuse(s);
  StepEffects effects;
  if (!NameLast(rank, &effects)) return effects;
  ranks_[rank].asked = ranks_[rank].said_measure = true;
  Proceed(&effects);
  return effects;
}

StepEffects StepMachine::On(const event::StepEnd& e, double) {
  const auto speaker = CheckSpeaker(e.session);
  if (!speaker.ok()) return Refuse(speaker.status());
  const uint32_t rank = speaker->rank;
  Rank& r = ranks_[rank];
  if (speaker->stale) {
    r.said_end = true;
    return {};
  }
  if (judged_ && !r.ended) {  // without this rank, which was too late
    r.said_end = true;
    return {};
  }
  if (auto s = CheckEnd(rank, e); !s.ok()) return Refuse(s);
  StepEffects effects;
  r.ended = r.said_end = true;
  r.discards = e.discard;
  r.end_content = e.content;
  if (e.discard) Abandon(&effects);
  if (!NameLast(rank, &effects) || EndsConflict(rank, &effects)) return effects;
  Proceed(&effects);
  return effects;
}

StepEffects StepMachine::On(const event::Measured& e, double) {
  measuring_ = false;
  for (const auto& [tensor, slab] : std::exchange(lent_, {})) reduction_.Release(tensor, slab);
  measured_ = measured_ || (open_ && e.step == step_);
  StepEffects effects;
  Proceed(&effects);
  return effects;
}

absl::Status StepMachine::CheckMeasure(uint32_t rank) const {
  if (options_.commit == Commit::kRelease) {
    return absl::FailedPreconditionError(
        absl::StrCat("StepMeasure in step ", step_,
                     ", but the run's commit is release, and tensors are updated before the norm of all is known: "
                     "create the run with commit = staged, or read StepResult.grad_norm"));
  }
  const Rank& r = ranks_[rank];
  if (r.said_end || (r.ended && !r.asked)) {  // as its last stream did, or the step may be judged already
    return absl::FailedPreconditionError(absl::StrCat("StepMeasure after StepEnd of step ", step_, "; ask before it"));
  }
  return CheckSent(rank, "StepMeasure");
}

absl::Status StepMachine::CheckSent(uint32_t rank, absl::string_view message) const {
  if (discarded_) return absl::OkStatus();
  const uint32_t begun = reduction_.micros_begun(rank);
  const auto last = reduction_.last_micro(rank);
  const bool may_name = options_.commit == Commit::kStaged && begun > 0;
  if (!last && !may_name) {
    return absl::FailedPreconditionError(absl::StrCat(
        message, " of step ", step_, " before its last MicroEnd",
        begun > 0 ? "; where the run's commit is release, MicroBegin.last announces the last micro-batch" : ""));
  }
  if (!reduction_.ended(rank, begun - 1)) {
    return absl::FailedPreconditionError(absl::StrCat(message, " of step ", step_, " before its MicroEnd"));
  }
  return CheckWhole(rank, begun - 1);
}

bool StepMachine::NameLast(uint32_t rank, StepEffects* effects) {
  if (discarded_ || reduction_.last_micro(rank)) return true;
  if (std::string conflict = MicroConflict(rank, reduction_.micros_begun(rank) - 1, /*last=*/true); !conflict.empty()) {
    Close(Outcome::kAborted, "disagreement", std::move(conflict), effects);
    return false;
  }
  reduction_.NameLast(rank);
  ranks_[rank].named_last = true;
  return true;
}

// --- measuring ------------------------------------------------------------------------------------------------------

bool StepMachine::AnyAsked() const {
  for (uint32_t r = 0; r < ranks_.size(); ++r) {
    if (InStep(r) && ranks_[r].asked) return true;
  }
  return false;
}

void StepMachine::MeasureIfDue(StepEffects* effects) {
  if (!open_ || measured_ || measuring_ || !AnyAsked() || !reduction_.all_complete()) return;
  for (uint32_t r = 0; r < ranks_.size(); ++r) {
    if (!reduction_.left_out(r) && !(InStep(r) && SentAll(r))) return;
  }
  measured_ = unsettled_ == 0;  // nothing has a gradient
  if (measured_) return;
  measuring_ = true;
  effect::Measure measure{.step = step_, .slabs = {}};
  for (const Tensor& t : tensors_) measure.slabs.push_back(t.slab);
  effects->push_back(std::move(measure));
}

// A rank that asked before the step was discarded, and a measure that is under way, get what that measures.
void StepMachine::TellMeasured(StepEffects* effects) {
  if (!measured_ && (!discarded_ || measuring_)) return;
  for (uint32_t r = 0; r < ranks_.size(); ++r) {
    Rank& rank = ranks_[r];
    if (!InStep(r) || !connected(r) || !rank.said_measure || std::exchange(rank.told_norm, true)) continue;
    effects->push_back(effect::Measured{step_, r, /*discarded=*/!measured_});
  }
}

// --- discarding -----------------------------------------------------------------------------------------------------

void StepMachine::Abandon(StepEffects* effects) {
  if (discarded_) return;
  discarded_ = true;
  effects->push_back(effect::Abandon{step_});
  std::vector<bool> left_out;
  for (uint32_t r = 0; r < ranks_.size(); ++r) left_out.push_back(reduction_.left_out(r));
  DropSums(left_out);
}

std::string StepMachine::WhoDiscards() const {
  std::vector<uint32_t> ranks;
  for (uint32_t r = 0; r < ranks_.size(); ++r) {
    if (InStep(r) && ranks_[r].discards) ranks.push_back(r);
  }
  return absl::StrCat(ranks.size() > 1 ? "ranks " : "rank ", absl::StrJoin(ranks, ", "),
                      " discarded it (StepEnd.discard)");
}

// --- judging --------------------------------------------------------------------------------------------------------

bool StepMachine::BeingRead() const { return measuring_ || AwaitsVerdict(); }

bool StepMachine::AllEnded() const {
  for (uint32_t r = 0; r < ranks_.size(); ++r) {
    if (reduction_.left_out(r) || (ranks_[r].begun == step_ && ranks_[r].ended)) continue;
    const bool away = InStep(r) && (!ranks_[r].session || Overdue(r));
    if (!away || !OthersBringVerdict(r) || !AnyEnded()) return false;
  }
  return true;
}

bool StepMachine::AnyEnded() const {
  for (uint32_t r = 0; r < ranks_.size(); ++r) {
    if (InStep(r) && ranks_[r].ended) return true;
  }
  return false;
}

bool StepMachine::OthersBringVerdict(uint32_t rank) const {
  if (!options_.is_part || !ranks_[rank].asked) return false;
  if (AnyEnded()) return true;
  for (uint32_t r = 0; r < ranks_.size(); ++r) {
    if (r != rank && InStep(r) && ranks_[r].session) return true;
  }
  return false;
}

bool StepMachine::GoesWithOthers() const {
  return options_.is_part && options_.commit == Commit::kStaged && AnyAsked();
}

void StepMachine::JudgeIfDue(StepEffects* effects) {
  const bool due = open_ && options_.commit == Commit::kStaged && !judged_ && AllEnded() && reduction_.all_complete();
  if (!due || (unsettled_ == 0 && !GoesWithOthers()) || measuring_ || (AnyAsked() && !measured_)) return;
  judged_ = true;
  effect::Judge judge{.step = step_, .slabs = {}};
  for (const Tensor& t : tensors_) judge.slabs.push_back(t.slab);
  effects->push_back(std::move(judge));
}

}  // namespace ballast
