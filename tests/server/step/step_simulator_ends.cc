// The checker's account of how a step ends: it is measured, discarded, judged, closed.
#include <algorithm>

#include "absl/strings/str_cat.h"

#include "tests/server/step/step_simulator_checker.h"

namespace ballast::sim {

// A micro-batch that was not announced as the last is made so.
void StepChecker::NameLast(Rank* rank) {
  if (!discarded_ && !rank->last && !rank->micros.empty()) rank->last = static_cast<uint32_t>(rank->micros.size()) - 1;
}

void StepChecker::Note(const event::StepMeasure& e) {
  Rank* rank = Speaker(e.session);
  if (rank == nullptr) return;
  NameLast(rank);
  rank->asked = rank->said_measure = true;
}

void StepChecker::Note(const event::StepEnd& e) {
  Rank* rank = Speaker(e.session);
  if (rank == nullptr || (judged_ && rank->late)) return;
  if (!e.discard) NameLast(rank);
  rank->ended = true;
  rank->discards = e.discard;
  rank->end_content = e.content;
}

void StepChecker::Note(const event::Measured& e) {
  if (!measuring_) Fail("the device was not asked");
  measuring_ = false;
  measured_ = measured_ || (open_ && e.step == step_);
  std::erase_if(slabs_, [](const LiveSlab& live) { return live.over; });
  for (LiveSlab& live : slabs_) live.reading = false;
}

// In a part, a rank that has asked and is gone, or too late, is not missed: those who have ended it bring the verdict of
// all parts.
bool StepChecker::AllEnded() const {
  const auto ended = [](const Rank& r) { return r.ended; };
  const bool part = shape_.machine.is_part && std::any_of(ranks_.begin(), ranks_.end(), ended);
  return AllTakingPart(
      [&](const Rank& r) { return r.ended || (part && r.in_step && r.asked && (!r.session || r.late)); });
}

std::string StepChecker::end_content() const {
  const auto ended = std::find_if(ranks_.begin(), ranks_.end(), [](const Rank& r) { return r.ended; });
  return ended == ranks_.end() ? "" : ended->end_content;
}

bool StepChecker::AllSentAll() const {
  return AllTakingPart([](const Rank& r) { return r.in_step && (r.asked || r.ended); });
}

bool StepChecker::AnyAsked() const {
  return std::any_of(ranks_.begin(), ranks_.end(), [](const Rank& r) { return r.in_step && r.asked; });
}

// A step without any gradient is measured without the device.
void StepChecker::NoteIfNothingToMeasure() {
  if (!open_ || discarded_ || measured_ || measuring_ || !AnyAsked() || !AllSentAll()) return;
  for (uint32_t i = 0; i < tensors_.size(); ++i) {
    if (!AbsentEverywhere(i)) return;
  }
  measured_ = true;
}

void StepChecker::On(const effect::Measure& e) {
  if (!open_ || e.step != step_ || shape_.machine.commit != Commit::kStaged) Fail("a measure of what is not open");
  if (measured_ || measuring_ || judged_ || discarded_) Fail("a measure not due");
  if (!AnyAsked() || !AllSentAll()) Fail("measured before all had asked or ended");
  bool any = false;
  for (uint32_t i = 0; i < tensors_.size(); ++i) {
    if (e.slabs[i].has_value() == AbsentEverywhere(i)) Fail("measured other tensors than those with a gradient");
    LiveSlab* live = Live(e.step, i);
    if (!e.slabs[i]) continue;
    any = true;
    if (live == nullptr || live->slab.offset != e.slabs[i]->offset) return Fail("measured another slab than the sum's");
    live->reading = true;
  }
  if (!any) Fail("the device was asked to measure nothing");
  measuring_ = true;
}

void StepChecker::On(const effect::Measured& e) {
  NoteIfNothingToMeasure();
  if (!open_ || e.step != step_) return Fail("told what a step measures that is not open");
  Rank& rank = ranks_[e.rank];
  if (!rank.in_step || !rank.connected || !rank.said_measure) Fail("told a rank the norm that did not ask");
  if (rank.told_norm) Fail("told a rank the norm twice on a stream");
  if (e.discarded ? measured_ || measuring_ || !discarded_ : !measured_) Fail("told a norm that is not the step's");
  rank.told_norm = true;
}

void StepChecker::On(const effect::Abandon& e) {
  const auto* end = std::get_if<event::StepEnd>(event_);
  if (!open_ || e.step != step_ || discarded_ || end == nullptr || !end->discard) Fail("abandoned what none discards");
  discarded_ = true;
  for (Rank& rank : ranks_) {
    rank.micros.clear();
    rank.last.reset();
    rank.held.clear();
    rank.held_bytes = 0;
  }
  ResetSums();
}

// What is due has come.
void StepChecker::CheckEnds() {
  if (!open_) return;
  NoteIfNothingToMeasure();
  const auto discards = [](const Rank& r) { return r.in_step && r.discards; };
  if (!discarded_ && std::any_of(ranks_.begin(), ranks_.end(), discards)) Fail("a rank discards, and nobody heeds it");
  if (discarded_ && AllTakingPart([](const Rank& r) { return r.in_step && r.ended; })) {
    Fail("a step that is discarded and ended is open");
  }
  if (!measured_ && (!discarded_ || measuring_)) return;
  for (uint32_t r = 0; r < ranks_.size(); ++r) {
    const Rank& rank = ranks_[r];
    if (rank.in_step && rank.connected && rank.said_measure && !rank.told_norm) {
      Fail(absl::StrCat("rank ", r, " is not told the norm that it asked for"));
    }
  }
}

void StepChecker::On(const effect::Judge& e) {
  if (!open_ || e.step != step_ || judged_ || shape_.machine.commit != Commit::kStaged) Fail("a judgement not due");
  if (discarded_ || measuring_ || (AnyAsked() && !measured_))
    Fail("judged before it was measured, or though discarded");
  judged_ = true;
  if (!AllEnded()) Fail("judged before the end");
  for (uint32_t i = 0; i < tensors_.size(); ++i) {
    if (e.slabs[i].has_value() == AbsentEverywhere(i)) Fail("judged other tensors than those with a gradient");
  }
}

void StepChecker::CheckOutcome(const effect::Close& e) {
  size_t updated = 0;
  std::vector<uint32_t> missing;
  for (uint32_t i = 0; i < tensors_.size(); ++i) {
    updated += tensors_[i].updated;
    if (!tensors_[i].updated && !AbsentEverywhere(i)) missing.push_back(i);
  }
  const bool staged = shape_.machine.commit == Commit::kStaged;
  const bool all_ended = AllEnded();
  const bool wished = discarded_ && all_ended && e.reason == kDiscarded;
  const bool allowed = e.outcome == Outcome::kApplied   ? missing.empty() && !discarded_
                       : e.outcome == Outcome::kPartial ? updated > 0 && !missing.empty() && !staged
                       : e.outcome == Outcome::kSkipped
                           ? staged && (wished || verdict_ == Outcome::kSkipped) && updated == 0
                           : updated == 0;
  const bool alone =
      shape_.machine.is_part && staged && e.outcome == Outcome::kApplied && AnyAsked() && verdict_ != Outcome::kApplied;
  if (alone) Fail("applied by a part without the verdict of all");
  if (!allowed) {
    Fail(absl::StrCat("closed ", OutcomeName(e.outcome), " with ", updated, " tensors updated, ", missing.size(),
                      " missing"));
  }
  const Rank& first = FirstTakingPart();
  const auto same_end = [&](const Rank& r) { return !r.ended || r.end_content == first.end_content; };
  if (e.outcome == Outcome::kApplied && first.ended && !AllTakingPart(same_end)) {
    Fail("applied although the ranks ended it with different values");
  }
  // Where the ranks disagree about their number of micro-batches, so may views of what is absent.
  const bool told = e.not_applied == missing || (staged && e.reason == "disagreement");
  if (!told) Fail("other tensors are named as not applied than were not");
  const bool torn = std::holds_alternative<event::Attach>(*event_) || std::holds_alternative<event::Tick>(*event_) ||
                    std::holds_alternative<event::Chunk>(*event_) || std::holds_alternative<event::Stop>(*event_);
  if (e.outcome == Outcome::kApplied && !torn && (!all_ended || updating(step_))) Fail("applied before the end");
}

}  // namespace ballast::sim
