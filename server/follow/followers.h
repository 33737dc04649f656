// The readers that follow a run's weights (version_readers.h), and the versions that are made for them: while there is a
// reader, of the steps that the spec says. No step and no reader waits for another. A version is not made while the plan's
// memory does not suffice for it.
//
// Readers of a run on several daemons want a version of the same step of all of these (proto/PROTOCOL.md, "Following a run").
// So of a part of a run no version is made which none of its readers wants yet: where it has told the daemons the same step
// ahead, none is making another one when that comes.
//
// A version that has a name stays, and can be read, whoever follows (tag_keeper.h). To name the weights of the last closed
// step a version is made of it, where there is none.
//
// Strand-confined.
#pragma once

#include <cstdint>
#include <functional>
#include <memory>
#include <optional>
#include <string>
#include <utility>
#include <vector>

#include "absl/functional/any_invocable.h"
#include "absl/status/status.h"
#include "absl/status/statusor.h"

#include "server/follow/tag_keeper.h"
#include "server/follow/version_maker.h"
#include "server/follow/version_readers.h"
#include "server/metrics/metrics.h"
#include "server/plan/plan.h"

namespace ballast {

class Followers {
 public:
  struct Environment {
    const RunSpec* spec;  // whose `follow` is there; outlives all, like the rest
    const Plan* plan;
    ChunkSet::Starts chunk_starts;
    ParameterStore* store;
    Strand* strand;
    RunMetrics* metrics;
    std::function<void(const FollowFigures& figures)> show;
    std::function<void()> made;  // a version: the next may be wanted already
    TagStorage tags = {};        // of the weights' versions
    WeightSeries series = {};    // whose versions they are; in a format `spec` is of it (ServedIn), and `plan`
    std::function<size_t()> readers = {};  // of the run, also of another series of it; empty: these alone
  };
  explicit Followers(Environment environment);

  // A reader; of one version alone, where the order names one.
  void Begin(FollowOrder order, std::shared_ptr<VersionSink> sink);
  void OnSent(const VersionSink* sink) { readers_.OnSent(sink); }
  void OnGone(const VersionSink* sink);
  void Tick(double now_s) {
    readers_.Tick(now_s);
    ExpireTags(now_s);
  }
  // The weights are about to be others, without a step or a rewind: no version there is of any use. Readers end with this
  // status, and may come again.
  // Those that have names stay.
  void Reset(const absl::Status& why);
  void End(const absl::Status& why);

  // Whether a version of the last closed step is wanted, and may be made now. Readers that came when there was none wait
  // for the newest: where it is of this step, they are sent it.
  bool Wants(uint64_t generation, uint64_t step);
  // Then, at a time when the weights are those of that step: begins it.
  // `since_unix_s`: since when the run has had them.
  void Make(uint64_t generation, uint64_t step, double since_unix_s);
  // As ballast.v1.FollowService has these. No version: that of the last closed step.
  struct TagOrder {
    TagKeeper::Order order;
    std::optional<VersionChoice> version = {};
  };
  void Tag(TagOrder order, TagKeeper::Done done);
  void Untag(const std::string& name, absl::AnyInvocable<void(absl::Status)> done) {
    tags_->Remove(name, std::move(done));
  }
  struct VersionList {
    std::shared_ptr<const WeightVersion> newest;  // nullptr: there is none
    std::vector<VersionTag> tags;
    uint32_t most_tags = 0;
    VersionId current = {};  // of a version of the weights as they are, but for what is the run's to say
  };
  VersionList List() const;
  const std::shared_ptr<const WeightVersion>& newest() const {
    return readers_.history().newest;
  }  // nullptr: there is none
  // Before anything else, once nobody else writes to the run's folder: what it has on the disk.
  void LoadTags() { tags_->Load(); }
  // How many versions have names in memory alone, and would go with it.
  size_t tags_in_memory() const { return tags_->on_disk() ? 0 : tags_->entries().size(); }
  // At most FollowMemoryBytes and TagMemoryBytes (plan.h).
  uint64_t memory_bytes() const { return readers_.memory()->used(); }
  // As in VersionMaker.
  void BeforeChange(uint32_t tensor) { maker_->BeforeChange(tensor); }
  bool EncodeNext(std::function<void()> done) { return maker_->EncodeNext(std::move(done)); }
  size_t readers() const { return readers_.size(); }  // with those that were ended, and are not gone yet
  // Whether a version was begun so long ago that it is not to wait for devices with nothing else to do.
  bool version_is_late() const;

 private:
  // A name for the weights of the last closed step, of which there is no version yet.
  struct AwaitedTag {
    TagKeeper::Order order;
    TagKeeper::Done done;
    double since_s = 0;
    bool being_made = false;  // its version
  };

  // Names are of the weights as they are served, and figures of their versions.
  bool names_versions() const { return environment_.series == WeightSeries(); }
  bool awaited() const { return readers_.reading() > 0 || !awaited_tags_.empty(); }
  void BeginAlone(FollowOrder order, std::shared_ptr<VersionSink> sink);
  // To the reader with this sink, what the choice names on the disk.
  void SendStored(const VersionSink* sink, const VersionChoice& choice, const TagKeeper::Entry& entry);
  absl::Status GoneError(const VersionChoice& choice) const;
  // The version that is being made, and the names that wait for it, come to nothing.
  void EndMaking(const absl::Status& why);
  void TagCurrent(TagKeeper::Order order, TagKeeper::Done done);
  // Whoever asked for a step that has not come for so long may be gone, and is answered.
  void ExpireTags(double now_s);
  // Whether some name waits for this version, or for one that it comes after.
  bool IsNamed(const VersionId& id) const;
  // Those whose version is there: all, or those that it was made for.
  void GiveTags(bool all);
  void OnMade(std::shared_ptr<const WeightVersion> version, std::shared_ptr<const VersionChange> change);

  const Environment environment_;
  VersionReaders readers_;
  uint64_t epoch_;
  double began_s_ = 0;             // to make it
  bool made_for_waiting_ = false;  // readers that wait for a new version, when this one was begun
  std::vector<AwaitedTag> awaited_tags_;
  const std::shared_ptr<TagKeeper> tags_;
  const std::shared_ptr<VersionMaker> maker_;
};

}  // namespace ballast
