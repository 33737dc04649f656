#include "server/run/run_activity.h"

#include <algorithm>
#include <utility>

namespace ballast {
namespace {

constexpr double kFirstStepS = 600;
constexpr double kLeastS = 30;
constexpr double kManySteps = 10;
constexpr double kPaceSteps = 16;  // so many, about, make the pace

}  // namespace

void RunActivity::OnClosed(double now_s) {
  const double before_s = std::exchange(closed_at_s_, now_s);
  if (before_s == 0) return;
  const double took_s = std::min(now_s - before_s, stall_after_s());
  pace_s_ = pace_s_ == 0 ? took_s : pace_s_ + (took_s - pace_s_) / kPaceSteps;
}

RunState RunActivity::At(double now_s, bool step_open, Ranks ranks) const {
  if (!trained_) return RunState::kWaiting;
  if (ranks.held == 0) return ranks.lost == 0 ? RunState::kFinished : RunState::kWaiting;
  return step_open || now_s - closed_at_s_ < stall_after_s() ? RunState::kTraining : RunState::kIdle;
}

double RunActivity::stall_after_s() const {
  return pace_s_ == 0 ? kFirstStepS : std::max(kLeastS, kManySteps * pace_s_);
}

}  // namespace ballast
