// How a rank of several daemons attaches to them, and brings those together that are at different steps.
#include <algorithm>
#include <utility>

#include "absl/strings/str_cat.h"
#include "proto/rewound.h"

#include "client/cpp/parts/step_of_all.h"
#include "tests/server/step/parts_simulator_rank.h"

namespace ballast::sim {
namespace {

constexpr int kMostRounds = 20;  // as PartsClient has
constexpr double kLookS = 0.2;

}  // namespace

std::optional<uint64_t> PartsRank::RewoundStep() const {
  for (const auto& step : rewound_to_) {
    if (step) return step;
  }
  return std::nullopt;
}

void PartsRank::AttachAfter(uint64_t rewound_to) {
  rewound_to_.back() = rewound_to;
  After(Delay(0.1), [this] { Attach(); });
}

void PartsRank::Attach() {
  round_ = 0;
  const auto rewound_to = RewoundStep();
  again_step_ = rewound_to ? *rewound_to + 1 : 0;
  AttachAll();
}

void PartsRank::AttachAll() {
  life_ = world_.timeline->NewNumber();
  phase_ = Phase::kAttaching;
  apart_ = false;
  rewound_to_.assign(parts() + 1, std::nullopt);
  answers_.assign(parts(), std::nullopt);
  open_.assign(parts(), false);
  returns_.clear();
  for (uint32_t part = 0; part < parts(); ++part) {
    daemon(part).Leave(rank_);
    returns_.push_back(daemon(part).returns());
    AskPart(part, /*from_step=*/0);
  }
}

void PartsRank::NextRound() {
  if (++round_ >= kMostRounds) return Crash();
  again_step_ = 0;
  AttachAll();
}

void PartsRank::AskPart(uint32_t part, uint64_t from_step) {
  After(Delay(0.05), [this, part, from_step] {
    if (!daemon(part).up()) return After(0.3 + Delay(0.3), [this, part, from_step] { AskPart(part, from_step); });
    const auto answer = daemon(part).Attach(rank_, takeover_ || held_[part], from_step, again_step_);
    if (!answer.status.ok()) return OnRefused(part, from_step, answer);
    if (Chance(random(), 40)) {  // the answer is lost, and the client asks again
      daemon(part).Abandon(rank_, /*flying=*/false);
      return After(1, [this, part, from_step] { AskPart(part, from_step); });
    }
    OnAnswer(part, answer);
  });
}

void PartsRank::OnRefused(uint32_t part, uint64_t from_step, const PartDaemon::Answer& answer) {
  if (answer.retry_after_s == 0) return Crash();
  if (absl::IsUnavailable(answer.status)) CloseBesides(daemon(part).closed_step() + 1);
  After(answer.retry_after_s + Delay(0.1), [this, part, from_step] { AskPart(part, from_step); });
}

// A part finishes this step with what the rank's last process sent: this one cannot make it on the others.
void PartsRank::CloseBesides(uint64_t step) {
  if (world_.planted == Planted::kWaitsForAPart) return;
  for (uint32_t part = 0; part < parts(); ++part) {
    if (!answers_[part] || !open_[part] || daemon(part).closed_step() + 1 != step) continue;
    world_.listener->Count(PartsKind::kClosedBesides);
    AskAgain(part, step + 1);
  }
}

void PartsRank::AskAgain(uint32_t part, uint64_t from_step) {
  daemon(part).Leave(rank_);
  answers_[part].reset();
  open_[part] = false;
  AskPart(part, from_step);
}

void PartsRank::OnAnswer(uint32_t part, const PartDaemon::Answer& answer) {
  held_[part] = true;
  answers_[part] = answer;
  returns_[part] = daemon(part).returns();
  AlignIfAllOpen();
}

void PartsRank::OnOpened(uint32_t part) {
  if (phase_ != Phase::kAttaching && phase_ != Phase::kAligning) return;
  open_[part] = true;
  AlignIfAllOpen();
}

void PartsRank::OnEnded(uint32_t part, const absl::Status& status) {
  daemon(part).Abandon(rank_, /*flying=*/false);
  if (phase_ == Phase::kDown) return;
  if (!RewoundTo(status)) return Crash();
  rewound_to_[part] = RewoundTo(status);
  const bool attaching = phase_ == Phase::kAttaching || phase_ == Phase::kAligning;
  if (attaching && !open_[part]) return After(Delay(0.1), [this] { NextRound(); });
  if (phase_ == Phase::kStepping) After(Delay(0.1), [this] { Attach(); });
}

void PartsRank::AlignIfAllOpen() {
  for (uint32_t part = 0; part < parts(); ++part) {
    if (!answers_[part] || !open_[part]) return;
  }
  uint64_t first = answers_[0]->resume_step, last = first;
  for (const auto& answer : answers_) {
    first = std::min(first, answer->resume_step);
    last = std::max(last, answer->resume_step);
  }
  Align(first, last);
}

void PartsRank::Align(uint64_t first, uint64_t last) {
  if (first == last) return phase_ == Phase::kAligning ? GoBackIfTorn(last - 1) : OnAttached();
  const bool closing = phase_ == Phase::kAligning;  // those behind were told to
  phase_ = Phase::kAligning;
  if (closing) return NextRound();
  if (last - first == 1) return CloseBehind(last);
  apart_ = true;
  if (rank_ == 0) return GoBack(first - 1, [this](bool done) { done ? NextRound() : Crash(); });
  for (uint32_t part = 0; part < parts(); ++part) daemon(part).Leave(rank_);
  world_.listener->Count(PartsKind::kAwaitAligned);
  AwaitAligned();
}

void PartsRank::CloseBehind(uint64_t last) {
  again_step_ = 0;
  std::vector<uint32_t> behind;
  for (uint32_t part = 0; part < parts(); ++part) {
    if (answers_[part]->resume_step != last) behind.push_back(part);
  }
  for (const uint32_t part : behind) {
    world_.listener->Count(PartsKind::kFromStep);
    AskAgain(part, world_.planted == Planted::kForgetsFromStep ? 0 : last);
  }
}

void PartsRank::AwaitAligned() {
  After(kLookS, [this] {
    uint64_t first = daemon(0).closed_step(), last = first;
    for (const auto& one : world_.daemons) {
      if (!one->up()) return Crash();
      first = std::min(first, one->closed_step());
      last = std::max(last, one->closed_step());
    }
    last - first <= 1 ? NextRound() : AwaitAligned();
  });
}

// All have closed this step, some of them behind the others.
void PartsRank::GoBackIfTorn(uint64_t step) {
  std::vector<ClosedPart> closed;
  for (const auto& answer : answers_) {
    if (answer->last && answer->last->step == step) closed.push_back(*answer->last);
  }
  const bool torn = closed.size() == parts() && MergedResult(closed).outcome() == v1::STEP_OUTCOME_PARTIAL;
  if (!torn || !world_.rewinds_torn || rank_ != 0) return OnAttached();
  GoBack(step - 1, [this](bool done) { done ? NextRound() : OnAttached(); });
}

void PartsRank::OnAttached() {
  phase_ = Phase::kBetween;
  std::vector<ClosedPart> closed;
  for (const auto& answer : answers_) {
    if (answer->last) closed.push_back(*answer->last);
  }
  const auto differs = [&](const ClosedPart& c) { return c.step != closed[0].step; };
  if (closed.size() == parts() && std::none_of(closed.begin(), closed.end(), differs)) {
    const v1::StepResult whole = MergedResult(closed);
    if (auto wrong = world_.ledger->Told(closed, whole, /*live=*/false); !wrong.empty()) {
      return daemon(0).FailBy(absl::StrCat("rank ", rank_, " attaches: ", wrong));
    }
    if (world_.staged && whole.outcome() == v1::STEP_OUTCOME_PARTIAL) world_.listener->Count(PartsKind::kStagedTorn);
  }
  takeover_ = false;
  After(Delay(0.1), [this] { BeginStep(); });
}

// --- going back ---

void PartsRank::GoBack(uint64_t at_most, std::function<void(bool)> then) {
  After(Delay(0.1), [this, at_most, then = std::move(then)] {
    std::vector<std::set<uint64_t>> kept;
    std::set<uint64_t> any;
    for (const auto& one : world_.daemons) {
      if (!one->up()) return then(false);
      kept.push_back(one->kept());
      any.insert(kept.back().begin(), kept.back().end());
    }
    auto target = LastCommonStep(kept, at_most);
    if (world_.planted == Planted::kGoesBackToAny) {
      while (!any.empty() && *any.rbegin() > at_most) any.erase(std::prev(any.end()));
      if (!any.empty()) target = *any.rbegin();
    }
    if (!target) {
      world_.listener->Count(PartsKind::kNoCommonStep);
      world_.over = world_.over || apart_;
      return then(false);
    }
    world_.listener->Count(PartsKind::kGoBack);
    GoBackPart(0, *target, then);
  });
}

void PartsRank::GoBackPart(uint32_t part, uint64_t step, std::function<void(bool)> then) {
  if (part == parts()) return then(true);
  After(Delay(0.1), [this, part, step, then] {
    if (!daemon(part).up()) return then(false);
    if (daemon(part).closed_step() == step) return GoBackPart(part + 1, step, then);
    if (daemon(part).kept().count(step) == 0 && world_.planted != Planted::kGoesBackToAny) return then(false);
    if (daemon(part).closed_step() < step) return then(false);
    if (!daemon(part).GoBack(step)) return GoBackPart(part, step, then);
    GoBackPart(part + 1, step, then);
  });
}

}  // namespace ballast::sim
