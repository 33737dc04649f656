#include "server/follow/followed_series.h"

#include <algorithm>
#include <utility>

namespace ballast {

FollowedSeries::FollowedSeries(const Followers::Environment& environment) : environment_(environment) {
  for (size_t s = 0; s < ServedSeriesCount(*environment_.spec); ++s) {
    Followers::Environment own = environment_;
    if (s > 0) own.series.average = static_cast<uint32_t>(s - 1);
    Add(std::move(own));
  }
  for (const kernels::WireIndex format : FollowedFormats(*environment_.spec)) {
    auto served = std::make_unique<Served>(Served{.spec = ServedIn(*environment_.spec, format), .plan = {}});
    served->plan = PlanOfServing(served->spec);
    Followers::Environment own = environment_;
    own.spec = &served->spec;
    own.plan = &served->plan;
    own.series.format = format;
    served_.push_back(std::move(served));
    Add(std::move(own));
  }
}

void FollowedSeries::Add(Followers::Environment environment) {
  series_.push_back(environment.series);
  figures_.emplace_back();
  wanted_.push_back(false);
  environment.readers = [this] { return readers(); };
  environment.show = [this, s = figures_.size() - 1](const FollowFigures& figures) {
    figures_[s] = figures;
    Show();
  };
  all_.push_back(std::make_unique<Followers>(std::move(environment)));
}

size_t FollowedSeries::readers() const {
  size_t count = 0;
  for (const auto& one : all_) count += one->readers();
  return count;
}

Followers& FollowedSeries::Of(const WeightSeries& series) const {
  const auto place = std::find(series_.begin(), series_.end(), series) - series_.begin();
  return *all_[static_cast<size_t>(place)];
}

Followers::VersionList FollowedSeries::List(const WeightSeries& series) const {
  Followers::VersionList list = all_[0]->List();
  list.newest = Of(series).newest();
  return list;
}

void FollowedSeries::Begin(FollowOrder order, std::shared_ptr<VersionSink> sink) {
  Followers& followers = Of(order.series);
  followers.Begin(std::move(order), std::move(sink));
}

void FollowedSeries::OnSent(const VersionSink* sink) {
  for (const auto& one : all_) one->OnSent(sink);
}

void FollowedSeries::OnGone(const VersionSink* sink) {
  for (const auto& one : all_) one->OnGone(sink);
}

void FollowedSeries::Tick(double now_s) {
  for (const auto& one : all_) one->Tick(now_s);
}

void FollowedSeries::Reset(const absl::Status& why) {
  for (const auto& one : all_) one->Reset(why);
}

void FollowedSeries::End(const absl::Status& why) {
  for (const auto& one : all_) one->End(why);
}

void FollowedSeries::BeforeChange(uint32_t tensor) {
  for (const auto& one : all_) one->BeforeChange(tensor);
}

bool FollowedSeries::Wants(uint64_t generation, uint64_t step) {
  for (size_t s = 0; s < all_.size(); ++s) wanted_[s] = all_[s]->Wants(generation, step);
  return std::find(wanted_.begin(), wanted_.end(), true) != wanted_.end();
}

void FollowedSeries::Make(uint64_t generation, uint64_t step, double since_unix_s) {
  for (size_t s = 0; s < all_.size(); ++s) {
    if (wanted_[s]) all_[s]->Make(generation, step, since_unix_s);
  }
  wanted_.assign(wanted_.size(), false);
}

uint64_t FollowedSeries::memory_bytes() const {
  uint64_t bytes = 0;
  for (const auto& one : all_) bytes += one->memory_bytes();
  return bytes;
}

void FollowedSeries::EncodeNext(const std::function<void()>& done) {
  for (const auto& one : all_) {
    if (one->EncodeNext(done)) return;
  }
}

bool FollowedSeries::version_is_late() const {
  return std::any_of(all_.begin(), all_.end(), [](const auto& one) { return one->version_is_late(); });
}

// The version that is shown is the weights', as they are served.
void FollowedSeries::Show() {
  FollowFigures shown = figures_[0];
  for (size_t s = 1; s < figures_.size(); ++s) {
    shown.readers.count += figures_[s].readers.count;
    shown.readers.behind_seconds = std::max(shown.readers.behind_seconds, figures_[s].readers.behind_seconds);
  }
  environment_.metrics->OnFollowers(shown.readers);
  environment_.show(shown);
}

}  // namespace ballast
