// A run whose versions are another daemon's, as readers here get them. It has one spec, from its beginning to its end: of
// a run that is amended there is another one.
//
// Thread-safe, but for what is the relay's.
#pragma once

#include <functional>
#include <memory>
#include <string>

#include "absl/base/thread_annotations.h"
#include "absl/status/status.h"
#include "absl/synchronization/mutex.h"

#include "server/base/strand.h"
#include "server/follow/version_readers.h"
#include "server/follow/version_source.h"
#include "server/metrics/metrics.h"
#include "server/plan/plan.h"

namespace ballast {

class RelayedRun final : public VersionSource {
 public:
  struct Options {
    RunSpec spec;
    Plan plan;  // of the spec
    uint32_t readers;
    FollowMetrics* metrics;  // outlives it
  };
  explicit RelayedRun(Options options);
  ~RelayedRun() override;

  const RunSpec& spec() const override { return spec_; }
  const Plan& plan() const { return plan_; }
  const ChunkSet::Starts& chunk_starts() const { return chunk_starts_; }
  void Follow(std::shared_ptr<VersionSink> sink, FollowOrder order) override;
  void OnVersionSent(std::shared_ptr<VersionSink> sink) override;
  void OnFollowerGone(std::shared_ptr<VersionSink> sink) override;
  FollowFigures figures() const;
  double busy_s() const { return strand_.busy_s(); }

  // --- of the relay, from one thread, which is not the strand ---
  const std::shared_ptr<FollowMemory>& memory() const { return readers_->memory(); }
  // Whether there is memory for another version now; where there is not, readers that are in the way have been told.
  bool HasRoom();
  // As VersionReaders::Add.
  void Publish(std::shared_ptr<const WeightVersion> version, std::shared_ptr<const VersionChange> change,
               double seconds);
  // While there is no version: what readers that come are told. OK: they wait.
  void SayWhyNone(absl::Status why);
  // Readers end with this status, and who comes later is told the same. Once; nothing else of these follows.
  void End(const absl::Status& status);

 private:
  void Tick();

  const RunSpec spec_;
  const Plan plan_;
  const ChunkSet::Starts chunk_starts_;
  mutable absl::Mutex mu_;
  FollowFigures figures_ ABSL_GUARDED_BY(mu_);

  // The strand's.
  std::unique_ptr<VersionReaders> readers_;  // until the end
  absl::Status none_;                        // why there is no version
  absl::Status ended_;                       // OK: it has not
  Strand strand_;                            // last: nothing above is gone while its thread runs
};

}  // namespace ballast
