#include "tests/server/step/parts_simulator_ledger.h"

#include <algorithm>
#include <cmath>

#include "absl/strings/str_cat.h"

namespace ballast::sim {

std::string PartsLedger::Told(const std::vector<ClosedPart>& closed, const v1::StepResult& whole, bool live) {
  const bool same =
      std::all_of(closed.begin(), closed.end(), [&](const ClosedPart& c) { return c.step == whole.step(); });
  if (!same) return absl::StrCat("a result of step ", whole.step(), " is made of other steps' too");
  if (auto wrong = CheckVerdicts(closed); !wrong.empty()) return wrong;
  if (auto wrong = CheckTorn(closed, whole); !wrong.empty()) return wrong;
  if (!live) return "";
  const Saying saying{.closed = closed, .whole = absl::StrCat(whole.outcome(), " ", whole.reason())};
  for (const ClosedPart& c : closed) {
    const Saying& first = said_.emplace(c.number, saying).first->second;
    bool again = false;  // some part was taken back, and has made the step again
    for (size_t part = 0; part < closed.size(); ++part) {
      const ClosedPart& a = first.closed[part];
      const ClosedPart& b = closed[part];
      const bool undone = a.number < b.number ? b.taken_back > a.number : a.taken_back > b.number;
      if (a.number != b.number && !undone) {
        return absl::StrCat("ranks have step ", whole.step(), " of different closings");
      }
      again = again || a.number != b.number;
    }
    if (!again && first.whole != saying.whole) {
      return absl::StrCat("ranks are told different results of step ", whole.step(), ": ", first.whole, ", ",
                          saying.whole);
    }
  }
  return "";
}

std::string PartsLedger::CheckVerdicts(const std::vector<ClosedPart>& closed) {
  for (const ClosedPart& a : closed) {
    for (const ClosedPart& b : closed) {
      if (a.judged && b.judged && a.judged != b.judged) {
        return absl::StrCat("parts judge step ", a.step, " differently: ", OutcomeName(*a.judged), ", ",
                            OutcomeName(*b.judged));
      }
    }
  }
  return "";
}

std::string PartsLedger::CheckTorn(const std::vector<ClosedPart>& closed, const v1::StepResult& whole) {
  const auto updated = [](const ClosedPart& c) { return c.updated; };
  const auto missed = [](const ClosedPart& c) { return c.outcome != Outcome::kApplied; };
  const bool torn =
      std::any_of(closed.begin(), closed.end(), updated) && std::any_of(closed.begin(), closed.end(), missed);
  const bool partial = whole.outcome() == v1::STEP_OUTCOME_PARTIAL;
  // A part without gradients counts as applied, also where others lost the step.
  const bool lost = std::any_of(closed.begin(), closed.end(), [](const ClosedPart& c) { return IsTorn(c.reason); });
  if (torn ? !partial : partial && staged_ && !lost) {
    return absl::StrCat(
        "step ", whole.step(),
        torn ? " is torn, and a rank is told that it is not" : " is not torn, and a rank is told that it is");
  }
  if (!torn || !staged_) return "";
  ++torn_;
  uint64_t applied = 0;  // when the last part did
  for (const ClosedPart& c : closed) applied = std::max(applied, c.updated ? c.number : 0);
  for (const ClosedPart& c : closed) {
    if (c.outcome == Outcome::kApplied || !c.torn_before_ranks || c.taken_back > applied) continue;
    return absl::StrCat("staged step ", whole.step(), " is torn, though a rank was there to bring the verdict");
  }
  for (const ClosedPart& c : closed) {
    if (c.outcome == Outcome::kApplied || IsTorn(c.reason)) continue;
    return absl::StrCat("staged step ", whole.step(), " is applied, and by another part ", OutcomeName(c.outcome), ": ",
                        c.reason);
  }
  return "";
}

std::string PartsLedger::Measured(const std::vector<double>& squares, double norm) {
  double sum = 0;
  for (const double square : squares) sum += std::isnan(square) ? 0 : square;
  if (std::sqrt(sum) == norm) return "";
  return absl::StrCat("a rank adds up to a norm of ", norm, ", which on one daemon is ", std::sqrt(sum));
}

}  // namespace ballast::sim
