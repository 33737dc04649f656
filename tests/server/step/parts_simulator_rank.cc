#include "tests/server/step/parts_simulator_rank.h"

#include <algorithm>
#include <cmath>
#include <limits>
#include <utility>

#include "absl/strings/str_cat.h"

#include "client/cpp/parts/merge.h"
#include "tests/server/step/parts_simulator_whole.h"

namespace ballast::sim {
namespace {

v1::StepOutcome ToProto(Outcome outcome) {
  constexpr v1::StepOutcome kOutcomes[] = {v1::STEP_OUTCOME_APPLIED, v1::STEP_OUTCOME_SKIPPED, v1::STEP_OUTCOME_ABORTED,
                                           v1::STEP_OUTCOME_PARTIAL};
  return kOutcomes[static_cast<size_t>(outcome)];
}

v1::StepResult ToProto(const ClosedPart& closed) {
  v1::StepResult result;
  result.set_step(closed.step);
  result.set_outcome(ToProto(closed.outcome));
  result.set_reason(closed.reason);
  result.mutable_tensors_not_applied()->Assign(closed.not_applied.begin(), closed.not_applied.end());
  return result;
}

}  // namespace

void PartsRank::After(double delay_s, std::function<void()> run) {
  world_.timeline->After(delay_s, [this, life = life_, run = std::move(run)] {
    if (life == life_) run();
  });
}

void PartsRank::Start(double delay_s, bool takeover, bool flying) {
  for (uint32_t part = 0; part < parts(); ++part) daemon(part).Abandon(rank_, flying);
  life_ = world_.timeline->NewNumber();
  phase_ = Phase::kDown;
  held_.assign(parts(), false);
  rewound_to_.clear();
  takeover_ = takeover;
  After(delay_s, [this] { Attach(); });
}

// --- steps ---

void PartsRank::BeginStep() {
  if (RewoundStep()) return Attach();
  phase_ = Phase::kStepping;
  step_ = {};
  step_.measures.resize(parts());
  step_.results.resize(parts());
  uint64_t least = daemon(0).client(rank_)->next_step(), most = least;
  for (uint32_t part = 1; part < parts(); ++part) {
    least = std::min(least, daemon(part).client(rank_)->next_step());
    most = std::max(most, daemon(part).client(rank_)->next_step());
  }
  if (least != most) return AttachAfter(least - 1);
  const bool as_others_do = !std::exchange(disagrees_, false);
  for (uint32_t part = 0; part < parts(); ++part) {
    SimulatedRank* client = daemon(part).client(rank_);
    if (!client->in_step()) client->BeginStep(as_others_do);  // planted: it was begun early
  }
  if (world_.staged && Chance(random(), 20)) After(Delay(0.4), [this] { Discard(); });
  for (uint32_t part = 0; part < parts(); ++part) daemon(part).Send(rank_);
}

// As the trainer likes, as long as it has not asked what the step measures.
void PartsRank::Discard() {
  if (phase_ != Phase::kStepping || step_.ended) return;
  for (uint32_t part = 0; part < parts(); ++part) {
    if (daemon(part).client(rank_) == nullptr || daemon(part).client(rank_)->asked()) return;
  }
  world_.listener->Count(PartsKind::kDiscard);
  SendEnds("", /*discard=*/true);
}

void PartsRank::OnMeasured(uint32_t part, const MeasuredStep& measured) {
  if (phase_ != Phase::kStepping || step_.measures[part]) return;
  step_.measures[part] = measured;
  EndIfMeasured();
}

void PartsRank::EndIfMeasured() {
  if (!world_.staged || step_.ended) return;
  const auto over = [](const auto& measure) { return measure && !measure->measured; };
  const bool any_over = std::any_of(step_.measures.begin(), step_.measures.end(), over);
  if (any_over && world_.planted != Planted::kCommitsWhatIsOver) return SendEnds("", /*discard=*/true);
  const auto in = [](const auto& measure) { return measure.has_value(); };
  if (!std::all_of(step_.measures.begin(), step_.measures.end(), in)) return;
  const std::string whole = TextOf(Merge());
  const bool discard = DiscardsBy(whole);  // as all ranks do
  SendEnds(discard ? "" : whole, discard);
}

v1::WholeMeasure PartsRank::Merge() {
  std::vector<MeasuredStep> measures;
  for (const auto& measure : step_.measures) measures.push_back(*measure);
  v1::WholeMeasure whole = MergeMeasures(measures, world_.placement, world_.tensor_names);
  std::vector<double> squares(world_.placement.tensors(), std::nan(""));
  double by_part = 0;
  for (uint32_t part = 0; part < parts(); ++part) {
    const std::vector<double>& of_part = measures[part].squares;
    for (size_t i = 0; i < of_part.size(); ++i) {
      squares[world_.placement.numbers(part)[i]] = of_part[i];
      by_part += std::isnan(of_part[i]) ? 0 : of_part[i];
    }
  }
  if (world_.planted == Planted::kAddsUpByPart) whole.set_grad_norm(std::sqrt(by_part));
  const bool all = std::all_of(measures.begin(), measures.end(), [](const MeasuredStep& m) { return m.measured; });
  const std::string wrong = all ? world_.ledger->Measured(squares, whole.grad_norm()) : "";
  if (!wrong.empty()) daemon(0).FailBy(absl::StrCat("rank ", rank_, ": ", wrong));
  return whole;
}

void PartsRank::SendEnds(const std::string& content, bool discard) {
  step_.ended = true;
  for (uint32_t part = 0; part < parts(); ++part) {
    if (daemon(part).client(rank_) == nullptr) continue;
    daemon(part).client(rank_)->EndStep(content, discard);
    daemon(part).Send(rank_);
  }
}

void PartsRank::OnResult(uint32_t part, const ClosedPart& closed) {
  if (phase_ != Phase::kStepping || step_.results[part]) return;
  step_.results[part] = closed;
  const bool applied = closed.outcome == Outcome::kApplied;
  if (world_.staged && !step_.measures[part] && !step_.ended && applied) {  // the others bring the verdict everywhere
    return AttachAfter(closed.step);
  }
  if (!step_.measures[part]) OnMeasured(part, {.measured = false});  // who still waits for it, waits for nothing
  if (world_.planted == Planted::kBeginsEarly && daemon(part).client(rank_) != nullptr) {
    daemon(part).client(rank_)->BeginStep(true);
    daemon(part).Send(rank_);
  }
  EndIfClosed();
}

void PartsRank::EndIfClosed() {
  const auto in = [](const auto& result) { return result.has_value(); };
  if (!std::all_of(step_.results.begin(), step_.results.end(), in)) return;
  std::vector<ClosedPart> closed;
  for (const auto& result : step_.results) closed.push_back(*result);
  phase_ = Phase::kBetween;
  const v1::StepResult whole = MergedResult(closed);
  if (auto wrong = world_.ledger->Told(closed, whole, /*live=*/true); !wrong.empty()) {
    return daemon(0).FailBy(absl::StrCat("rank ", rank_, ": ", wrong));
  }
  OnWhole(whole);
}

v1::StepResult PartsRank::MergedResult(const std::vector<ClosedPart>& closed) {
  std::vector<v1::StepResult> told;
  for (const ClosedPart& c : closed) told.push_back(ToProto(c));
  const std::vector<std::string> names(parts());
  v1::StepResult whole = MergeResults(told, world_.placement, names, world_.staged);
  if (world_.planted == Planted::kTakesPartialForOthers && whole.outcome() == v1::STEP_OUTCOME_PARTIAL) {
    whole.set_outcome(told[0].outcome());
  }
  return whole;
}

void PartsRank::OnWhole(const v1::StepResult& whole) {
  constexpr PartsKind kStaged[] = {PartsKind::kStagedApplied, PartsKind::kStagedSkipped};
  made_ = whole.step();
  world_.listener->Count(PartsKind::kResult);
  const bool applied = whole.outcome() == v1::STEP_OUTCOME_APPLIED;
  const bool skipped = whole.outcome() == v1::STEP_OUTCOME_SKIPPED;
  const bool partial = whole.outcome() == v1::STEP_OUTCOME_PARTIAL;
  if (world_.staged && (applied || skipped)) world_.listener->Count(kStaged[skipped]);
  if (partial) world_.listener->Count(world_.staged ? PartsKind::kStagedTorn : PartsKind::kReleasePartial);
  if (whole.outcome() == v1::STEP_OUTCOME_ABORTED) world_.listener->Count(PartsKind::kAborted);
  const auto torn = [](const auto& c) { return c->outcome == Outcome::kPartial; };
  const bool by_itself = std::any_of(step_.results.begin(), step_.results.end(), torn);
  const auto next = [this] { After(Delay(0.1), [this] { BeginStep(); }); };
  if (rank_ != 0 || !world_.rewinds_torn || !partial || by_itself) return next();
  GoBack(whole.step() - 1, [next](bool) { next(); });
}

}  // namespace ballast::sim
