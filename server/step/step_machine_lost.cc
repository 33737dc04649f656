// Steps without ranks that are lost: who is left out of them, and comes back in.
#include <algorithm>
#include <string>
#include <vector>

#include "absl/strings/str_cat.h"

#include "server/step/step_machine.h"

namespace ballast {

bool StepMachine::MayLeaveOut(uint32_t rank) const {
  if (!options_.leaves_out_lost || !ranks_[rank].came) return false;
  const auto stays = [&](uint32_t r) { return r != rank && !reduction_.left_out(r) && ranks_[r].session; };
  std::vector<const ChunkSet*> others;
  for (uint32_t r = 0; r < ranks_.size(); ++r) {
    if (stays(r)) others.push_back(&reduction_.covers(r));
  }
  return FindGap(others).empty();
}

void StepMachine::LeaveOut(uint32_t rank, double now_s, StepEffects* effects) {
  ranks_[rank].left_out = ranks_[rank].left = true;
  const uint64_t step = step_;
  if (ranks_[rank].session) {
    Remember(rank, Ending::kAway);
    EndSession(rank,
               absl::AbortedError(absl::StrCat("the rank was away for longer than its lease and rank_timeout; step ",
                                               step, " and those after it go on without it")),
               "rank_lost", now_s, effects);
  }
  if (!open_ || step_ != step || InStep(rank)) return;  // closed; or all of it is in
  reduction_.LeaveOut(rank);
  effects->push_back(effect::LeftOut{rank});
  Proceed(effects);
}

void StepMachine::TakeBackIn() {
  const bool anybody = std::any_of(ranks_.begin(), ranks_.end(), [](const Rank& r) { return r.session.has_value(); });
  for (Rank& rank : ranks_) rank.left_out = rank.left_out && anybody && !rank.session;
}

std::vector<uint32_t> StepMachine::LeftOutRanks() const {
  std::vector<uint32_t> left_out;
  for (uint32_t r = 0; r < ranks_.size(); ++r) {
    if (reduction_.left_out(r)) left_out.push_back(r);
  }
  return left_out;
}

}  // namespace ballast
