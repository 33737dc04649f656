#include "server/stability/loss_watch.h"

#include <algorithm>
#include <cmath>

namespace ballast {
namespace {

constexpr uint32_t kHighLosses = 5;
constexpr double kHigh = 2, kHuge = 16;  // spreads
constexpr double kLeastSpread = 1e-3;    // of the median

bool Above(double loss, const LossWatch::Usual& usual, double spreads) {
  if (!std::isfinite(loss)) return true;
  return usual.spread > 0 && loss > usual.median + spreads * usual.spread;
}

}  // namespace

LossWatch::Usual LossWatch::Now() const {
  if (!state_.losses.half_full()) return {};
  const double median = state_.losses.median();
  return {.median = median, .spread = std::max(state_.losses.spread(), kLeastSpread * std::abs(median))};
}

std::optional<LossWatch::Spike> LossWatch::Observe(uint64_t step, double loss, bool warm) {
  State& s = state_;
  const Usual now = Now();
  if (s.since == 0 && (warm ? Above(loss, now, sigmas_) : !std::isfinite(loss))) {
    s = {.losses = s.losses, .since = step, .first_loss = loss, .before = warm ? now : Usual{}};
  }
  if (std::isfinite(loss)) s.losses.Add(loss);
  if (s.since == 0) return std::nullopt;
  // Of a spike that goes on, by what has become usual since: a training that stays worse is not one for ever.
  const bool high = Above(loss, s.spike ? now : s.before, kHigh);
  ++s.looks;
  s.high += high ? 1 : 0;
  s.calm = high ? 0 : s.calm + 1;
  const bool was = s.spike;
  s.spike |= Above(loss, s.before, kHuge) || (s.looks <= kLooks && s.high >= kHighLosses);
  const Spike found{.since = s.since,
                    .loss = s.first_loss,
                    .limit = std::isfinite(s.first_loss) ? s.before.median + sigmas_ * s.before.spread : 0};
  const bool is_new = s.spike && !was;
  if (s.spike ? s.calm >= kLooks : s.looks >= kLooks) s = {.losses = s.losses};
  return is_new ? std::optional(found) : std::nullopt;
}

std::optional<LossWatch::Spike> LossWatch::Foresee(uint64_t step, double loss, bool warm) const {
  LossWatch after = *this;
  if (const std::optional<Spike> begun = after.Observe(step, loss, warm)) return begun;
  const State& s = after.state_;
  if (!s.spike || s.calm > 0) return std::nullopt;
  return Spike{.since = s.since, .loss = loss, .limit = s.before.median + kHigh * s.before.spread};
}

}  // namespace ballast
