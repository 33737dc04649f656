// What readers may follow of a run: its weights, and where the spec's `follow` says so, each average of them, and the
// weights in other formats than they are served in. Each is followed by readers of its own (followers.h), in versions and
// memory of its own; all together are as many as the spec has readers.
//
// Strand-confined.
#pragma once

#include <cstddef>
#include <cstdint>
#include <functional>
#include <memory>
#include <vector>

#include "server/follow/followers.h"

namespace ballast {

class FollowedSeries {
 public:
  explicit FollowedSeries(const Followers::Environment& environment);

  Followers& weights() { return *all_[0]; }

  // The newest version of this series, and what has a name of the weights.
  Followers::VersionList List(const WeightSeries& series) const;

  // As those of Followers, of the series that the order names, the sink's, or all.
  void Begin(FollowOrder order, std::shared_ptr<VersionSink> sink);
  void OnSent(const VersionSink* sink);
  void OnGone(const VersionSink* sink);
  void Tick(double now_s);
  void Reset(const absl::Status& why);
  void End(const absl::Status& why);
  void BeforeChange(uint32_t tensor);
  // Whether a version of some series is. Make begins those that were wanted when it was asked last.
  bool Wants(uint64_t generation, uint64_t step);
  void Make(uint64_t generation, uint64_t step, double since_unix_s);
  uint64_t memory_bytes() const;
  // Of the first version under way that has something left.
  void EncodeNext(const std::function<void()>& done);
  bool version_is_late() const;

 private:
  // The run as it is followed in another format.
  struct Served {
    RunSpec spec;
    Plan plan;
  };

  void Add(Followers::Environment environment);
  Followers& Of(const WeightSeries& series) const;
  size_t readers() const;
  void Show();

  const Followers::Environment environment_;
  std::vector<std::unique_ptr<const Served>> served_;  // by format of the spec's `follow`
  std::vector<WeightSeries> series_;                   // the weights first; likewise the next
  std::vector<FollowFigures> figures_;
  std::vector<bool> wanted_;
  std::vector<std::unique_ptr<Followers>> all_;
};

}  // namespace ballast
