#include "server/stability/loss_watch.h"

#include <algorithm>
#include <cmath>
#include <limits>
#include <span>

namespace ballast {
namespace {

constexpr double kHigh = 2, kHuge = 16;  // spreads
constexpr double kOfLargest = 4;         // times as far above the median
constexpr double kLeastSpread = 1e-3;    // of the median
constexpr double kByChance = 1e-4;

bool Above(double loss, const LossWatch::Usual& usual, double spreads) {
  if (!std::isfinite(loss)) return true;
  return usual.spread > 0 && loss > usual.median + spreads * usual.spread;
}

// The chance that at least so many of `n` losses are high, where each is with the chance p.
double AtLeast(uint64_t wanted, uint64_t n, double p) {
  double of_k = std::pow(1 - p, static_cast<double>(n)), at_least = wanted == 0 ? of_k : 0;
  for (uint64_t k = 1; k <= n && p < 1; ++k) {
    of_k *= static_cast<double>(n - k + 1) / static_cast<double>(k) * p / (1 - p);
    if (k >= wanted) at_least += of_k;
  }
  return p < 1 ? at_least : 1;
}

// After the first loss, which is high. More than there are: no number is enough.
uint32_t Wanted(double share_high) {
  uint32_t wanted = LossWatch::kHighLosses;
  while (wanted <= LossWatch::kLooks && AtLeast(wanted - 1, LossWatch::kLooks - 1, share_high) > kByChance) ++wanted;
  return wanted;
}

}  // namespace

LossWatch::Usual LossWatch::Now() const {
  if (!state_.losses.half_full()) return {};
  const std::span<const double> losses = state_.losses.values();
  const double median = state_.losses.median();
  // Where all are 0, whatever is above is.
  const double least = std::max(kLeastSpread * std::abs(median), std::numeric_limits<double>::min());
  const double spread = std::max(state_.losses.spread(), least);
  const double largest = *std::max_element(losses.begin(), losses.end());
  const auto high = std::count_if(losses.begin(), losses.end(), [&](double l) { return l > median + kHigh * spread; });
  return {.median = median,
          .spread = spread,
          .huge = median + std::max(kHuge * spread, kOfLargest * (largest - median)),
          .wanted = Wanted(static_cast<double>(high) / static_cast<double>(losses.size()))};
}

double LossWatch::LimitOf(double loss, const Usual& before) const {
  return std::isfinite(loss) ? before.median + sigmas_ * before.spread : 0;
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
  const bool huge = !std::isfinite(loss) || (s.before.spread > 0 && loss > s.before.huge);
  s.spike |= huge || (s.looks <= kLooks && s.high >= s.before.wanted);
  const Spike found{.since = s.since, .loss = s.first_loss, .limit = LimitOf(s.first_loss, s.before)};
  const bool is_new = s.spike && !was;
  const bool none = !s.spike && s.high + (kLooks - s.looks) < s.before.wanted;  // nor can it be one any more
  if (none || s.calm >= kLooks) s = {.losses = s.losses};
  return is_new ? std::optional(found) : std::nullopt;
}

std::optional<LossWatch::Spike> LossWatch::Foresee(uint64_t step, double loss, bool warm) const {
  LossWatch after = *this;
  if (const std::optional<Spike> begun = after.Observe(step, loss, warm)) return begun;
  const State& s = after.state_;
  if (!s.spike || s.calm > 0) return std::nullopt;
  return Spike{.since = s.since, .loss = s.first_loss, .limit = LimitOf(s.first_loss, s.before)};
}

}  // namespace ballast
