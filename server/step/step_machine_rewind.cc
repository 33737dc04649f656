// How a run goes back to a closed step: the step machine's part. No session outlives a rewind, so a message from before
// cannot be taken for one from after. A tensor's updates are answered in the order in which they were made, so those
// from before the rewind are told by their number.
#include <algorithm>
#include <utility>

#include "absl/strings/str_cat.h"
#include "proto/rewound.h"

#include "server/step/step_machine.h"

namespace ballast {
namespace {

// How soon a rewind may be asked for again while a step is being judged.
constexpr double kJudgedS = 0.1;

// How often one step is begun again.
constexpr int kMostAgain = 3;

}  // namespace

StepEffects StepMachine::On(const event::Rewind& e, double now_s) {
  if (e.to_step > closed_step_) {
    return Refuse(absl::FailedPreconditionError(
        absl::StrCat("a rewind to step ", e.to_step, ", but the last that closed is step ", closed_step_)));
  }
  if (BeingRead()) {
    return Refuse(absl::UnavailableError(absl::StrCat("step ", step_, " is being judged; rewind after it")), kJudgedS);
  }
  StepEffects effects;
  if (open_) effects.push_back(effect::Discard{step_});
  open_ = false;
  ++generation_;
  rewound_to_ = e.to_step;
  for (uint32_t r = 0; r < ranks_.size(); ++r) {
    if (!ranks_[r].session) continue;
    EndByRewind(r, now_s, &effects);
  }
  for (Rank& r : ranks_) r = {.returning = r.returning, .gone_at_s = r.gone_at_s, .came = r.came, .left = r.left};
  abandoned_ = updating_;
  closing_.clear();
  closed_step_ = e.to_step;
  step_ = e.to_step + 1;
  // No rank can lack anything of later steps.
  for (uint64_t& step : applied_in_) step = std::min(step, closed_step_);
  Reset();
  return effects;
}

// A rank that was away for longer than its lease stays lost until its process is heard of.
void StepMachine::EndByRewind(uint32_t rank, double now_s, StepEffects* effects) {
  Rank& r = ranks_[rank];
  const SessionId session = *r.session;
  const double heard_at_s = Live(r, now_s) ? now_s : r.gone_at_s;
  Remember(rank, Ending::kRewound);
  EndSession(rank, RewoundError(rewound_to_, generation_), "", now_s, effects);
  r.returning = {.session = session, .since_s = now_s};
  r.gone_at_s = heard_at_s;
}

std::optional<double> StepMachine::returning_since_s(uint32_t rank, double now_s) const {
  const Rank& r = ranks_[rank];
  if (!r.returning || now_s >= r.gone_at_s + options_.lease_s) return std::nullopt;
  return r.returning->since_s;
}

bool StepMachine::HearOf(SessionId session, double now_s) {
  for (Rank& rank : ranks_) {
    if (!rank.returning || rank.returning->session != session) continue;
    rank.gone_at_s = now_s;
    return true;
  }
  return false;
}

StepEffects StepMachine::On(const event::KeepAlive& e, double now_s) {
  if (HearOf(e.session, now_s) || RankOf(e.session)) return {};
  return Refuse(CheckCurrent(e.session));
}

// Once: the sessions that are there since have sent nothing of the step that was lost. A rank that comes late may bring it
// about once more: those that have begun again before have to, then, and where each part hears of it at another time, the
// ranks would send each other back for ever. So a step is made anew a few times, and then closes, as one whose rank is
// another process.
bool StepMachine::BeginsAgain(const event::Attach& e) const {
  const bool is_lost = options_.is_part && e.again_step == step_ && e.world == world();
  const bool too_often = again_.step == step_ && again_.times >= kMostAgain;
  return is_lost && begun_again_ != step_ && !too_often && !UpdatedAny();
}

void StepMachine::BeginAgain(uint32_t rank, double now_s, StepEffects* effects) {
  begun_again_ = step_;
  again_ = {.step = step_, .times = again_.step == step_ ? again_.times + 1 : 1};
  const auto others = [&](uint32_t r) { return r != rank && ranks_[r].session.has_value(); };
  bool is_begun = open_;
  for (uint32_t r = 0; r < ranks_.size(); ++r) is_begun = is_begun || others(r);
  if (!is_begun) return;  // nor will it be, by what is on its way
  if (open_) effects->push_back(effect::Discard{step_});
  open_ = false;
  ++generation_;
  rewound_to_ = closed_step_;
  for (uint32_t r = 0; r < ranks_.size(); ++r) {
    if (ranks_[r].begun == step_) ranks_[r].begun = 0;
    if (!others(r)) continue;
    EndByRewind(r, now_s, effects);
  }
  Reset();
}

StepMachine::Past StepMachine::past() const {
  Past past;
  past.generation = generation_;
  past.rewound_to = rewound_to_;
  past.closed_step = closed_step_;
  past.over = over_;
  past.ranks = ranks_;
  return past;
}

void StepMachine::GoOnFrom(Past past) {
  generation_ = past.generation;
  rewound_to_ = past.rewound_to;
  closed_step_ = past.closed_step;
  step_ = closed_step_ + 1;
  over_ = std::move(past.over);
  ranks_ = std::move(past.ranks);
  Reset();
}

}  // namespace ballast
