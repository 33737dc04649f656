// How the readers of a run's parts come to a version that all of them have.
#include <algorithm>
#include <utility>

#include "absl/status/status.h"
#include "absl/time/clock.h"

#include "client/cpp/follow/incoming_version.h"
#include "client/cpp/parts/for_all.h"
#include "client/cpp/parts/parts_subscriber.h"
#include "client/cpp/transport/connection.h"

namespace ballast {
namespace {

constexpr absl::Duration kAskAgain = absl::Seconds(1);  // where a daemon does not answer

// Whether each part still offers its version of these, writes it or has it.
bool Stands(absl::Span<const VersionNegotiation::Standing> standings, absl::Span<const v1::VersionId> common) {
  for (size_t p = 0; p < standings.size(); ++p) {
    const auto is = [&](const std::optional<v1::VersionId>& id) { return id && IsSameVersion(*id, common[p]); };
    const bool writes = !standings[p].offered && !standings[p].here;
    if (!writes && !is(standings[p].offered) && !is(standings[p].here)) return false;
  }
  return true;
}

}  // namespace

void PartsSubscriber::Watch() {
  while (!closed_) {
    const uint64_t seen = changes_->count();
    const absl::Time again = Settle();
    changes_->AwaitMore(seen, again);
  }
}

std::vector<VersionNegotiation::Standing> PartsSubscriber::StandingsOf(const Standings& seen,
                                                                       const std::optional<Ids>& last) {
  std::vector<VersionNegotiation::Standing> standings;
  for (size_t p = 0; p < seen.size(); ++p) {
    standings.push_back({.offered = seen[p].offered, .here = seen[p].here});
    if (last) standings.back().handed = (*last)[p];
  }
  return standings;
}

bool PartsSubscriber::is_tagged() const {
  absl::MutexLock lock(&mu_);
  return tagged_.has_value();
}

void PartsSubscriber::Tell(const std::vector<VersionNegotiation::Order>& orders) {
  absl::MutexLock turning(&turning_);
  if (is_tagged()) return;
  for (const auto& order : orders) parts_[order.part]->Seek(order.from, order.every);
  if (!orders.empty()) patience_.OnTold(absl::Now());
}

absl::Time PartsSubscriber::Settle() {
  std::optional<Ids> common, last;
  bool resumed = false, tagged = false;
  {
    absl::MutexLock lock(&mu_);  // one moment's: what is handed out in between would be agreed on again
    tagged = tagged_.has_value();
    common = agreed_;
    last = handed_;
    if (!tagged) resumed = std::exchange(resumed_, false);
  }
  if (tagged) return common ? SettleTagged(*common) : absl::InfiniteFuture();
  if (resumed) {
    for (size_t p = 0; p < parts_.size(); ++p) Tell({negotiation_.GoOn(p)});
  }
  if (last && !(seen_handed_ && std::equal(last->begin(), last->end(), seen_handed_->begin(), IsSameVersion))) {
    seen_handed_ = last;
    Tell(negotiation_.OnHandedOut());
  }
  const auto standings = StandingsOf(Look(), last);
  if (common) {
    if (Stands(standings, *common)) return absl::InfiniteFuture();
    absl::MutexLock lock(&mu_);
    if (!agreed_ || tagged_) return absl::Now();  // it was handed out just now, or is another one
    agreed_.reset();
  }
  if (VersionNegotiation::HasNew(standings)) patience_.OnNew(absl::Now());
  if (negotiation_.WantsTimelines(standings)) return Ask(standings);
  const bool waits = std::any_of(standings.begin(), standings.end(), [](const auto& part) { return part.offered; });
  return waits || negotiation_.strict() ? RelaxLater(standings) : absl::InfiniteFuture();
}

absl::Time PartsSubscriber::SettleTagged(const Ids& common) {
  if (Stands(StandingsOf(Look(), std::nullopt), common)) return absl::InfiniteFuture();
  if (const absl::Time next = listed_at_ + kAskAgain; absl::Now() < next) return next;
  listed_at_ = absl::Now();
  std::string tag;
  {
    absl::MutexLock lock(&mu_);
    tag = tagged_.value_or("");
  }
  if (auto ids = AskFor(tag); ids.ok()) {
    absl::MutexLock lock(&mu_);
    if (tagged_ == tag && agreed_) agreed_ = *std::move(ids);
  }
  changes_->Notify();
  return listed_at_ + kAskAgain;
}

absl::Time PartsSubscriber::RelaxLater(const std::vector<VersionNegotiation::Standing>& standings) {
  if (absl::Now() < patience_.until()) return patience_.until();
  patience_.OnOver(absl::Now());
  Tell(negotiation_.Relax(standings));
  return patience_.until();
}

absl::Time PartsSubscriber::Ask(const std::vector<VersionNegotiation::Standing>& standings) {
  const auto asked = ForAll(static_cast<uint32_t>(parts_.size()), [&](uint32_t p) { return parts_[p]->Now(); });
  std::vector<HeldSubscriber::Timeline> now;
  for (size_t p = 0; p < parts_.size(); ++p) {
    if (asked[p].ok()) {
      now.push_back(*asked[p]);
      continue;
    }
    if (closed_) return absl::InfiniteFuture();
    if (const auto delay = RetryAfter(asked[p].status())) return absl::Now() + *delay;
    // Its reader finds out what that means; one that waits to write does not read.
    if (standings[p].offered) Tell({negotiation_.GoOn(p)});
    return absl::Now() + kAskAgain;
  }
  const auto decision = negotiation_.Decide(standings, now);
  Tell(decision.orders);
  if (!decision.agreed) return RelaxLater(standings);
  patience_.OnAgreed(absl::Now());
  Ids common;
  for (const auto& part : standings) common.push_back(part.offered ? *part.offered : *part.here);
  {
    absl::MutexLock lock(&mu_);
    if (tagged_) return absl::InfiniteFuture();
    agreed_ = std::move(common);
  }
  changes_->Notify();
  return absl::InfiniteFuture();
}

}  // namespace ballast
