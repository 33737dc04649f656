// The readers of a run's versions, whoever makes these: each is sent them at its own pace (follow_job.h), and none waits
// for another. What is kept of versions lies in the plan's memory; where it does not suffice for another version, what is
// known of older changes goes first; then a reader that is in the middle of an older version loses its call, if it is slow
// (FollowJob::kLeastBytesPerS).
//
// Strand-confined.
#pragma once

#include <cstdint>
#include <functional>
#include <memory>
#include <optional>
#include <string>
#include <vector>

#include "absl/status/status.h"

#include "server/follow/follow_job.h"
#include "server/metrics/metrics.h"
#include "server/plan/plan.h"

namespace ballast {

// What readers get of a run, as it is now.
struct FollowFigures {
  std::optional<VersionFigures> newest = {};  // none: none was made
  FollowerFigures readers = {};
};

class VersionReaders {
 public:
  struct Environment {
    const RunSpec* spec;  // outlives all, like the rest
    const Plan* plan;
    ChunkSet::Starts chunk_starts;
    uint32_t most;         // readers at a time
    std::string most_key;  // what says so, for people: "its spec allows (follow.readers)"
    // Versions are made for readers alone: the first waits for a new one, or for Release, and a while after the last the
    // versions go.
    bool on_demand = false;
    uint64_t tag_bytes = 0;                // of memory for versions that have names, beside
    std::function<size_t()> readers = {};  // that count beside `most`; empty: these
    FollowMetrics* metrics;
    bool shows_versions = true;  // in the metrics
    std::function<void(const FollowFigures& figures)> show;
  };
  explicit VersionReaders(Environment environment);

  void Begin(FollowOrder order, std::shared_ptr<VersionSink> sink);
  // A reader of one version alone, which its job is to be given, for as long as Find finds it. nullptr: there are too many,
  // and it was told.
  FollowJob* BeginAlone(FollowOrder order, std::shared_ptr<VersionSink> sink);
  // nullptr: it is none of them.
  FollowJob* Find(const VersionSink* sink) const;
  void OnSent(const VersionSink* sink);
  // Whether it was one of them.
  bool OnGone(const VersionSink* sink);
  void Tick(double now_s);
  // All end with this status; or those who follow.
  void End(const absl::Status& why);
  void EndFollowing(const absl::Status& why);
  // There is no version any more.
  void Forget();

  size_t size() const { return readers_.size(); }  // until they are gone
  size_t reading() const;                          // who follow, and whose calls were not ended
  bool AnyWants(VersionId id) const;               // of these: this version, once there is one
  // The newest is one that readers who wait for a new one may have.
  void Release();
  bool waiting() const { return waiting_; }
  const VersionHistory& history() const { return history_; }
  const std::shared_ptr<FollowMemory>& memory() const { return memory_; }
  // Makes room for a version, and for what it may have changed. False: readers are in the way.
  bool HasMemory();
  // change: from the newest until now; nullptr: what leads here is not known. for_waiting: who waits for a new one, has it.
  void Add(std::shared_ptr<const WeightVersion> version, std::shared_ptr<const VersionChange> change,
           double make_seconds, bool for_waiting = true);
  void ShowTags(uint64_t count, uint64_t bytes);

 private:
  struct Reader {
    std::unique_ptr<FollowJob> job;
    double ended_s = 0;  // when its job was seen to be stopped; 0: it is not
  };

  bool IsFull(VersionSink* sink) const;
  FollowJob* Enter(FollowOrder order, std::shared_ptr<VersionSink> sink);
  void OfferAll();
  void EndSlowest(double now_s, double patience_s);
  // Readers of one version that take it too slowly, and a place of those who follow.
  void EndStuck(double now_s, double patience_s);
  void Show();

  const Environment environment_;
  const uint64_t needed_bytes_;  // for a version, and for what it may have changed
  const std::shared_ptr<FollowMemory> memory_;
  VersionHistory history_;
  std::vector<Reader> readers_;  // until they are gone
  FollowFigures figures_;
  bool short_of_memory_ = false;
  bool waiting_ = false;                      // the first reader has come: what there is may be old
  std::optional<double> unread_since_s_ = 0;  // MonotonicSeconds; none: there are readers
};

}  // namespace ballast
