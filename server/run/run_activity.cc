#include "server/run/run_activity.h"

#include <algorithm>
#include <utility>

namespace ballast {
namespace {

constexpr double kFirstStepS = 600;
constexpr double kLeastS = 30;
constexpr double kManySteps = 10;

}  // namespace

void RunActivity::OnOpened(double now_s) {
  trained_ = true;
  opened_at_s_ = now_s;
}

void RunActivity::OnClosed(double now_s, bool updated) {
  const double before_s = std::exchange(closed_at_s_, now_s);
  if (before_s > 0) Remember(std::min(now_s - before_s, stall_after_s()));
  if (!updated) return;
  training_s_ += now_s - opened_at_s_;
  if (before_s > 0) training_s_ += std::clamp(opened_at_s_ - before_s, 0.0, pace_s_);
}

void RunActivity::Remember(double took_s) {
  took_s_[took_++ % kPaceSteps] = took_s;
  const size_t known = std::min(took_, kPaceSteps);
  std::array<double, kPaceSteps> sorted = took_s_;
  const auto middle = sorted.begin() + static_cast<ptrdiff_t>(known / 2);
  std::nth_element(sorted.begin(), middle, sorted.begin() + static_cast<ptrdiff_t>(known));
  pace_s_ = *middle;
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
