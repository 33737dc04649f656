#include "client/cpp/parts/version_negotiation.h"

#include <algorithm>

#include "client/cpp/follow/incoming_version.h"

namespace ballast {
namespace {

using Standing = VersionNegotiation::Standing;

// So many versions without a miss shorten the stride.
constexpr int kCalmVersions = 8;
// A stride is at most so many times `every`; no run makes as many steps while a version is made.
constexpr uint64_t kMostStrides = uint64_t{1} << 32;

const std::optional<v1::VersionId>& Candidate(const Standing& part) { return part.offered ? part.offered : part.here; }

// Whether it has something that was not handed out.
bool IsNew(const Standing& part) {
  const auto& candidate = Candidate(part);
  return candidate && !(part.handed && IsSameVersion(*candidate, *part.handed));
}

// The highest step of those that were not handed out.
uint64_t Furthest(absl::Span<const Standing> standings) {
  uint64_t furthest = 0;
  for (const Standing& part : standings) {
    if (IsNew(part)) furthest = std::max(furthest, Candidate(part)->step());
  }
  return furthest;
}

bool AreOfOneStep(absl::Span<const Standing> standings) {
  return std::all_of(standings.begin(), standings.end(),
                     [&](const Standing& part) { return Candidate(part)->step() == Candidate(standings[0])->step(); });
}

// Whether it waits with one that comes too early to be the common one.
bool LagsBehind(const Standing& part, uint64_t furthest) { return part.offered && part.offered->step() < furthest; }

}  // namespace

VersionNegotiation::VersionNegotiation(size_t parts, uint64_t every)
    : every_(every == 0 ? 1 : every), stride_(every_), told_(parts) {
  for (size_t p = 0; p < parts; ++p) told_[p] = {.part = p, .every = every_};
}

bool VersionNegotiation::strict() const {
  return std::any_of(told_.begin(), told_.end(), [&](const Order& told) { return told.from || told.every != every_; });
}

VersionNegotiation::Order VersionNegotiation::Tell(const Order& order) { return told_[order.part] = order; }

bool VersionNegotiation::HasNew(absl::Span<const Standing> standings) {
  return std::any_of(standings.begin(), standings.end(), IsNew);
}

bool VersionNegotiation::WantsTimelines(absl::Span<const Standing> standings) const {
  const auto has = [](const Standing& part) { return Candidate(part).has_value(); };
  if (!std::all_of(standings.begin(), standings.end(), has)) return false;
  if (!HasNew(standings)) return false;
  if (AreOfOneStep(standings)) return true;
  const uint64_t furthest = Furthest(standings);
  return std::any_of(standings.begin(), standings.end(),
                     [&](const Standing& part) { return LagsBehind(part, furthest); });
}

VersionNegotiation::Decision VersionNegotiation::Decide(absl::Span<const Standing> standings,
                                                        absl::Span<const Timeline> now) {
  Decision decision;
  const auto is_undone = [&](size_t p) { return !now[p].Has(*Candidate(standings[p])); };
  if (!std::equal(now.begin(), now.end(), known_.begin(), known_.end())) {
    stride_ = every_;  // steps are counted anew
    missed_ = calm_ = 0;
    known_.assign(now.begin(), now.end());
  }
  for (size_t p = 0; p < standings.size(); ++p) {
    // What is here is followed by another version without being told.
    if (is_undone(p) && standings[p].offered) decision.orders.push_back(GoOn(p));
  }
  for (size_t p = 0; p < standings.size(); ++p) {
    if (is_undone(p)) return decision;
  }
  if (!AreOfOneStep(standings)) return OnDifferent(standings, Furthest(standings));
  decision.agreed = true;
  return decision;
}

VersionNegotiation::Decision VersionNegotiation::OnDifferent(absl::Span<const Standing> standings, uint64_t furthest) {
  Decision decision;
  const auto lags = [&](const Standing& part) { return LagsBehind(part, furthest); };
  if (std::none_of(standings.begin(), standings.end(), lags)) return decision;
  calm_ = 0;
  const bool again = ++missed_ > 1;
  if (again) stride_ = std::min(2 * stride_, every_ * kMostStrides);
  const uint64_t from = again ? ((furthest + stride_ / 2) / stride_ + 1) * stride_ : furthest;
  for (size_t p = 0; p < standings.size(); ++p) {
    if (again || lags(standings[p])) decision.orders.push_back(Tell({.part = p, .from = from, .every = stride_}));
  }
  return decision;
}

std::vector<VersionNegotiation::Order> VersionNegotiation::OnHandedOut() {
  if (missed_ == 0) ++calm_;
  missed_ = 0;
  if (calm_ >= kCalmVersions && stride_ > every_) {
    stride_ /= 2;
    calm_ = 0;
  }
  std::vector<Order> orders;
  for (const Order& told : told_) {
    if (told.from || told.every != stride_) orders.push_back(GoOn(told.part));
  }
  return orders;
}

std::vector<VersionNegotiation::Order> VersionNegotiation::Relax(absl::Span<const Standing> standings) {
  stride_ = every_;
  missed_ = calm_ = 0;
  std::vector<Order> orders;
  for (size_t p = 0; p < standings.size(); ++p) {
    if (standings[p].here || told_[p].from) orders.push_back(GoOn(p));
  }
  return orders;
}

}  // namespace ballast
