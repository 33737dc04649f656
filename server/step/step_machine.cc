#include "server/step/step_machine.h"

#include <algorithm>
#include <utility>

#include "absl/strings/str_cat.h"
#include "absl/strings/string_view.h"

namespace ballast {
namespace {

// How soon a process may ask again for a rank whose step is being finished without it.
constexpr double kFinishS = 0.1;
// The same for a rank that the open step is made without; the next step waits for it for so long, at most.
constexpr double kWithoutS = 0.25;
constexpr const char* kRankLost = "rank_lost";

}  // namespace

const char* OutcomeName(Outcome outcome) {
  constexpr const char* kNames[] = {"applied", "skipped", "aborted", "partial"};
  return kNames[static_cast<int>(outcome)];
}

StepMachine::StepMachine(StepMachineOptions options)
    : options_(std::move(options)),
      step_(options_.first_step),
      reduction_(options_.reduction),
      tensors_(options_.tensor_names.size()),
      applied_in_(tensors_.size()),
      updating_(tensors_.size()),
      abandoned_(tensors_.size()) {
  Reset();
}

StepEffects StepMachine::Handle(const StepEvent& event, double now_s) {
  return std::visit([&](const auto& e) { return On(e, now_s); }, event);
}

bool StepMachine::UpdatedAny() const {
  return std::any_of(tensors_.begin(), tensors_.end(), [](const Tensor& t) { return t.updated(); });
}

std::vector<bool> StepMachine::TensorsApplied() const {
  std::vector<bool> applied;
  for (const Tensor& t : tensors_) applied.push_back(t.updated() || discarded_);
  return applied;
}

std::optional<ChunkId> StepMachine::Offer(uint32_t rank, bool short_of_credit) {
  Rank& r = ranks_[rank];
  r.short_of_credit = short_of_credit;
  if (!short_of_credit || !connected(rank)) return std::nullopt;
  const auto wanted = Wanted(rank);
  if (!wanted || wanted == r.offered) return std::nullopt;
  return r.offered = wanted;
}

std::optional<uint32_t> StepMachine::RankOf(SessionId session) const {
  for (uint32_t r = 0; r < ranks_.size(); ++r) {
    if (ranks_[r].session == session) return r;
  }
  return std::nullopt;
}

bool StepMachine::Live(const Rank& rank, double now_s) const {
  return rank.session && (rank.connected || now_s < rank.gone_at_s + options_.lease_s);
}

StepEffects StepMachine::On(const event::Attach& e, double now_s) {
  if (e.resumes) {
    const auto rank = RankOf(*e.resumes);
    if (!rank) {
      HearOf(*e.resumes, now_s);
      return Refuse(CheckCurrent(*e.resumes));
    }
    return {effect::Attached{*rank, *e.resumes, /*resumed=*/true}};
  }
  if (auto s = CheckWorld(e, now_s); !s.ok()) return Refuse(s);
  if (auto s = CheckCovered(e); !s.ok()) return Refuse(s);
  StepEffects effects;
  const bool behind = options_.is_part && e.from_step == step_ + 1;
  const bool again = BeginsAgain(e);
  if ((e.world != world() || behind || again) && BeingRead()) {
    return Refuse(absl::UnavailableError(absl::StrCat("step ", step_, " is being judged; attach again")), kFinishS);
  }
  if (e.world != world()) ChangeWorld(e.world, now_s, &effects);
  Rank& rank = ranks_[e.rank];
  double retry_after_s = 0;
  if (auto s = CheckFree(rank, e.takeover, now_s, &retry_after_s); !s.ok()) return Refuse(s, retry_after_s);
  if (open_ && reduction_.left_out(e.rank)) {
    rank.left_out = false;  // the next step awaits it
    return Refuse(absl::UnavailableError(absl::StrCat("step ", step_, " is being made without rank ", e.rank,
                                                      ", which takes part in the next; attach again")),
                  kWithoutS);
  }
  if (again) BeginAgain(e.rank, now_s, &effects);
  if (rank.session) {
    Remember(e.rank, Ending::kTaken);
    EndSession(e.rank, absl::AbortedError("another process took this rank over"), "restarted", now_s, &effects);
  }
  if (behind) CloseBehind(e, now_s, &effects);
  if (InStep(e.rank)) {
    effects.insert(effects.begin(), effect::Reject{absl::UnavailableError(FinishDetail(e.rank)), kFinishS});
    return effects;
  }
  // When nobody is attached, the first to come awaits all ranks, in whatever order they come.
  const bool first = std::none_of(ranks_.begin(), ranks_.end(), [](const Rank& r) { return r.session.has_value(); });
  if (!open_ && first) Reset();
  if (first && e.again_step == step_) begun_again_ = step_;  // nobody has sent anything of it
  rank = {.session = e.session, .gone_at_s = now_s, .came = true, .awaited_s = rank.awaited_s};
  for (Over& over : over_) {
    if (over.rank == e.rank && over.how == Ending::kAway) over.how = Ending::kTaken;
  }
  reduction_.Cover(e.rank, e.coverage.contributes);
  if (!open_ && reduction_.left_out(e.rank)) Reset();
  effects.push_back(effect::Attached{e.rank, e.session, /*resumed=*/false});
  return effects;
}

void StepMachine::CloseBehind(const event::Attach& e, double now_s, StepEffects* effects) {
  if (e.from_step != step_ + 1) return;  // it has closed by now
  if (!open_) {
    open_ = true;
    opened_at_s_ = now_s;
    begin_rank_ = e.rank;
    effects->push_back(effect::Opened{step_, LeftOutRanks()});
  }
  CloseTorn("restarted",
            absl::StrCat("rank ", e.rank, " goes on with step ", e.from_step,
                         ", since another part of the run has closed this one"),
            effects);
}

absl::Status StepMachine::CheckWorld(const event::Attach& e, double now_s) const {
  if (e.world == world()) return absl::OkStatus();
  for (uint32_t r = 0; r < ranks_.size(); ++r) {
    if (!Live(ranks_[r], now_s)) continue;
    return absl::FailedPreconditionError(absl::StrCat("world is ", e.world, ", but the run trains with ", world(),
                                                      " ranks, and rank ", r,
                                                      " is attached; stop all ranks before changing their number"));
  }
  return absl::OkStatus();
}

// Checked when the last rank attaches, since only then is it known what all ranks contribute to.
absl::Status StepMachine::CheckCovered(const event::Attach& e) const {
  const bool same_world = e.world == world();
  if (!same_world && e.world > 1) return absl::OkStatus();
  for (uint32_t r = 0; r < e.world; ++r) {
    if (r != e.rank && !ranks_[r].session && !ranks_[r].left_out) return absl::OkStatus();
  }
  std::vector<const ChunkSet*> sets = {&e.coverage.contributes};
  for (uint32_t r = 0; r < e.world; ++r) {
    if (r != e.rank && ranks_[r].session) sets.push_back(&reduction_.covers(r));
  }
  const std::string gap = FindGap(sets);
  if (gap.empty()) return absl::OkStatus();
  return absl::FailedPreconditionError(
      absl::StrCat("no rank contributes to ", gap, "; the ranks' coverage must leave no gap"));
}

std::string StepMachine::FindGap(absl::Span<const ChunkSet* const> sets) const {
  if (std::any_of(sets.begin(), sets.end(), [](const ChunkSet* set) { return set->empty(); })) return "";
  for (uint32_t i = 0; i < tensors_.size(); ++i) {
    for (uint64_t c = 0; c < options_.reduction.chunks[i]; ++c) {
      const auto gap = GapOf(sets, i, c);
      if (!gap) continue;
      if (gap->of == 0) return absl::StrCat("chunk ", c, " of ", Name(i));
      const uint64_t first = c * options_.chunk_elements;
      return absl::StrCat("elements [", first + gap->begin, ", ", first + gap->end, ") of ", Name(i));
    }
  }
  return "";
}

void StepMachine::ChangeWorld(uint32_t world, double now_s, StepEffects* effects) {
  for (uint32_t r = 0; r < ranks_.size(); ++r) {
    if (!ranks_[r].session) continue;
    Remember(r, Ending::kWorld);
    EndSession(r, absl::AbortedError("the run was taken up by another number of ranks"), "restarted", now_s, effects);
  }
  if (open_) CloseTorn("restarted", "", effects);
  if (!ranks_.empty()) ++generation_;
  ranks_.assign(world, {.gone_at_s = now_s});
  Reset();
}

absl::Status StepMachine::CheckFree(const Rank& rank, bool takeover, double now_s, double* retry_after_s) const {
  if (takeover || !Live(rank, now_s)) return absl::OkStatus();
  if (rank.connected) {
    return absl::AlreadyExistsError("a live session holds the rank; attach with takeover to replace it");
  }
  *retry_after_s = rank.gone_at_s + options_.lease_s - now_s;
  return absl::AlreadyExistsError(absl::StrCat("a session whose connection was lost holds the rank for another ",
                                               *retry_after_s, " s; wait, or attach with takeover to replace it"));
}

StepEffects StepMachine::On(const event::StreamOpened& e, double) {
  const auto rank = RankOf(e.session);
  if (!rank) return Refuse(CheckCurrent(e.session));
  Rank& r = ranks_[*rank];
  r.connected = true;
  r.said_end = r.said_measure = r.told_norm = false;
  r.offered.reset();
  r.told = r.lacking == 0 ? closed_step_ : r.lacking - 1;
  StepEffects effects;
  PublishMissing(*rank, e, &effects);
  TellResults(&effects);
  return effects;
}

void StepMachine::PublishMissing(uint32_t rank, const event::StreamOpened& e, StepEffects* effects) const {
  const auto received = [&](uint64_t step, uint32_t tensor) {
    return e.weights_step == step && tensor < e.weights_received.size() && e.weights_received[tensor];
  };
  if (InStep(rank)) {
    for (uint32_t i = 0; i < tensors_.size(); ++i) {
      if (tensors_[i].state != TensorState::kApplied || received(step_, i)) continue;
      effects->push_back(effect::Publish{step_, i, rank});
    }
  } else if (const uint64_t lacking = ranks_[rank].lacking; lacking != 0) {
    for (uint32_t i = 0; i < applied_in_.size(); ++i) {
      if (applied_in_[i] < lacking || received(applied_in_[i], i)) continue;
      effects->push_back(effect::Publish{applied_in_[i], i, rank});
    }
  }
}

// Sends each rank what it lacks and what is ready, in order.
void StepMachine::TellResults(StepEffects* effects) {
  for (uint32_t r = 0; r < ranks_.size(); ++r) {
    Rank& rank = ranks_[r];
    if (!rank.session || rank.lacking == 0) continue;
    for (uint64_t s = std::max(rank.lacking, rank.told + 1); s <= closed_step_ && !closing_.contains(s); ++s) {
      effects->push_back(effect::Result{s, r});
      rank.told = s;
    }
  }
}

StepEffects StepMachine::On(const event::StreamClosed& e, double now_s) {
  const auto rank = RankOf(e.session);
  if (!rank) return {};
  ranks_[*rank].connected = false;
  ranks_[*rank].gone_at_s = now_s;
  if (!e.clean || InStep(*rank)) return {};
  Remember(*rank, Ending::kLeft);
  ranks_[*rank].session.reset();
  ranks_[*rank].left = true;
  return {};
}

StepEffects StepMachine::On(const event::Tick&, double now_s) {
  StepEffects effects;
  CountAwaited(now_s);
  const double patience_s = options_.lease_s + options_.rank_timeout_s;
  for (uint32_t r = 0; r < ranks_.size() && open_; ++r) {
    const Rank& rank = ranks_[r];
    // A rank that never came is awaited from the time when the step opened.
    const double since_s = rank.session ? rank.gone_at_s : std::max(rank.gone_at_s, opened_at_s_);
    if (connected(r) || reduction_.left_out(r) || (!rank.session && InStep(r)) || now_s < since_s + patience_s)
      continue;
    if (MayLeaveOut(r)) {
      LeaveOut(r, now_s, &effects);
      continue;
    }
    if (rank.session) {
      Remember(r, Ending::kAway);
      EndSession(r,
                 absl::AbortedError(absl::StrCat("the rank was away for longer than its lease and rank_timeout; step ",
                                                 step_, " was closed")),
                 kRankLost, now_s, &effects);
    }
    if (open_ && !InStep(r)) CloseTorn(kRankLost, AwayDetail(r), &effects);
  }
  CloseOverdue(&effects);
  return effects;
}

std::string StepMachine::AwayDetail(uint32_t rank) const {
  if (ranks_[rank].left_out) {
    return absl::StrCat("rank ", rank,
                        " was away for longer than its lease and rank_timeout; the steps after this one ",
                        "are made without it, until a process attaches to it again");
  }
  if (!ranks_[rank].came) {
    return absl::StrCat("no process has attached to rank ", rank, " yet; until one does, each step waits ",
                        options_.lease_s + options_.rank_timeout_s,
                        " s for it and comes to nothing: start one, or stop the run");
  }
  return absl::StrCat(
      "rank ", rank, " was away for longer than its lease and rank_timeout; until a process attaches to ",
      "it again, each step waits ", options_.lease_s + options_.rank_timeout_s,
      " s for it and comes to nothing: start one, or stop the run; a run created with a smaller "
      "rank_timeout_s waits less, and with on_lost_rank = LOST_RANK_POLICY_CONTINUE goes on without it");
}

void StepMachine::EndSession(uint32_t rank, const absl::Status& why, const char* reason, double now_s,
                             StepEffects* effects) {
  Rank& r = ranks_[rank];
  effects->push_back(effect::Fence{rank, *r.session, why});
  r.session.reset();
  r.connected = false;
  r.gone_at_s = now_s;
  r.lacking = 0;  // whoever comes next pulls
  if (InStep(rank)) LeaveStep(rank, reason, effects);
}

// The rank's process is gone. Its contributions are taken back; if that is impossible, the step ends.
void StepMachine::LeaveStep(uint32_t rank, const char* reason, StepEffects* effects) {
  if (reduction_.all_complete() && options_.commit == Commit::kRelease) {
    return Close(Outcome::kApplied, "", "", effects);  // nothing was missing but end marks
  }
  const bool all_in = reduction_.all_complete() || discarded_;
  if (judged_ || (all_in && ranks_[rank].ended)) return;  // nothing of it is missing
  if (all_in && OthersBringVerdict(rank)) return Proceed(effects);
  if (!reduction_.Forget(rank)) {
    const bool away = absl::string_view(reason) == kRankLost;
    std::string detail = away ? AwayDetail(rank) : absl::StrCat("rank ", rank, "'s process is gone");
    return CloseTorn(reason, world() > 1 ? std::move(detail) : "", effects);
  }
  ranks_[rank].begun = 0;
  const bool any_left = std::any_of(ranks_.begin(), ranks_.end(), [&](const Rank& r) { return r.begun == step_; });
  if (any_left) {
    effects->push_back(effect::Forget{rank});
  } else {
    effects->push_back(effect::Discard{step_});
    open_ = false;
    Reset();
  }
}

}  // namespace ballast
