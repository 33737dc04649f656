// What one reader that follows a run is sent: from the version that it has to the newest, as changes where they are known
// and take fewer bytes, or else whole; then it waits for the next. One message is under way at a time, so a reader gets
// versions at its own pace, and holds those in memory that it is in the middle of. Or it is sent one version alone, which
// may lie on the disk, and its stream ends.
//
// Strand-confined.
#pragma once

#include <cstdint>
#include <deque>
#include <memory>
#include <optional>
#include <utility>
#include <variant>
#include <vector>

#include "absl/functional/function_ref.h"

#include "server/follow/tag_keeper.h"
#include "server/follow/version.h"
#include "server/follow/version_sink.h"
#include "server/plan/plan.h"
#include "server/step/coverage.h"
#include "server/store/weight_series.h"

namespace ballast {

// As v1::SubscribeRequest, or v1::PullRequest, checked: as many digests as the run has tensors, or none.
struct FollowOrder {
  uint64_t every = 0;
  std::optional<VersionId> have = {};
  std::vector<uint64_t> digests = {};
  std::optional<VersionChoice> version = {};  // this one alone
  std::vector<bool> tensors = {};             // which are wanted, by tensor; empty: all
  WeightSeries series = {};
};

// The newest version, and the changes that lead to it, oldest first, each from where the one before has come to.
struct VersionHistory {
  std::shared_ptr<const WeightVersion> newest;
  std::deque<std::shared_ptr<const VersionChange>> changes;
};

class FollowJob {
 public:
  static constexpr double kLeastBytesPerS = 1024.0 * 1024.0;  // of a reader that is in the way

  // spec and plan outlive the job.
  FollowJob(const RunSpec* spec, const Plan* plan, ChunkSet::Starts chunk_starts, FollowOrder order,
            std::shared_ptr<VersionSink> sink);

  // Since when (MonotonicSeconds) there has been a version that it wants, or since it last has sent one whole and there is
  // another; none: there is none.
  std::optional<double> wanted_since_s() const { return wanted_since_s_; }
  // Whether its reader wants this version, once there is one.
  bool WantsAfter(VersionId id) const;
  // Sends what leads to the newest, unless it is sending or does not want it.
  void Offer(const VersionHistory& history);
  // Sends this version, whatever there is else, and then ends the stream with OK. Once, of an order that names one.
  void SendAlone(std::shared_ptr<const WeightVersion> version) { SendAlone(Parcel(std::move(version))); }
  void SendAlone(std::shared_ptr<StoredVersion> version) { SendAlone(Parcel(std::move(version))); }
  // The message under way is with the reader. Offer comes next, once nothing is being sent.
  void OnSent();
  // Bytes of weights that were sent since the last call.
  struct Sent {
    uint64_t whole = 0, changes = 0;
  };
  Sent TakeSent() { return std::exchange(sent_, {}); }
  void Stop(absl::Status status);
  bool stopped() const { return stopped_; }
  bool follows() const { return !stopped_ && !alone_; }  // each new version is for it
  VersionSink* sink() const { return sink_.get(); }
  double began_s() const { return began_s_; }  // MonotonicSeconds: with what it is sent now
  bool sending() const { return place_ < parcels_.size(); }
  // Whether it is in the middle of a version that is sent whole, and is not this one.
  bool Keeps(const WeightVersion* newest) const;
  // Whether its reader has taken nothing for patience_s; or has taken longer over what it is sent now than that and what
  // the bytes need at kLeastBytesPerS.
  bool IsSlow(double now_s, double patience_s) const;

 private:
  using Parcel = std::variant<std::shared_ptr<const VersionChange>, std::shared_ptr<const WeightVersion>,
                              std::shared_ptr<StoredVersion>>;
  // What a whole version is sent with.
  struct Whole {
    VersionId id;
    uint64_t number = 0;  // 0: it is on the disk
    double closed_unix_s = 0;
    const std::vector<uint64_t>* digests;
  };

  // The changes from `have` to the newest; none: not all are known, or a whole version takes fewer bytes.
  std::vector<Parcel> Path(const VersionHistory& history) const;
  bool LeavesOut(const std::vector<uint64_t>& digests, uint32_t tensor) const;
  // Of what is sent of a whole version.
  uint64_t BytesOf(const std::vector<uint64_t>& digests) const;
  void SendAlone(Parcel parcel);
  // Writes some more of the parcel in hand. False: it has no more.
  bool WriteSome(const std::shared_ptr<const VersionChange>& change);
  bool WriteSome(const std::shared_ptr<const WeightVersion>& version);
  bool WriteSome(const std::shared_ptr<StoredVersion>& version);
  // `piece`: of the run's chunk `next_`; nullptr: it is not here yet.
  bool WriteWhole(const Whole& whole, absl::FunctionRef<const VersionPiece*()> piece);
  void Fetch(StoredVersion& version);
  // False: there is no room for it in the message in hand. `sent`: what counts its bytes.
  bool Write(const VersionChunk& chunk, uint64_t* sent);
  // What the chunk has, where it comes whole.
  void SetWhole(const VersionPiece& piece, VersionChunk* chunk) const;
  void Open(const VersionOpening& opening);
  void Close(VersionId id, uint64_t number, uint64_t changed);
  void SendMore();

  const RunSpec* const spec_;
  const Plan* const plan_;
  const ChunkSet::Starts chunk_starts_;
  const uint64_t every_;
  std::optional<VersionId> have_;
  std::optional<uint64_t> have_number_ = {};  // WeightVersion::number
  std::vector<uint64_t> digests_;             // of what it had at first; none once it has a version
  const std::shared_ptr<VersionSink> sink_;
  std::vector<Parcel> parcels_;  // under way, or none
  size_t place_ = 0;             // the parcel in hand
  bool opened_ = false;          // its VersionBegin is written
  uint64_t next_ = 0;            // in it: of the changed pieces, or of the run's chunks
  uint32_t tensor_ = 0;          // that the chunk `next_` is of, in a whole version
  double began_s_ = 0;           // with the parcels
  double progress_s_ = 0;        // since the reader last took something
  std::optional<double> wanted_since_s_ = {};
  uint64_t bytes_ = 0;  // written of them
  Sent sent_;
  bool in_flight_ = false;  // a message is under way
  bool gathered_ = false;   // something is written that is not sent
  bool stopped_ = false;
  const bool alone_;
  const std::vector<bool> tensors_;    // that are wanted; empty: all
  VersionPiecePtr fetched_ = nullptr;  // from the disk, the chunk `next_`
  bool fetching_ = false;
  // While the job is there: what is read for it may come later.
  const std::shared_ptr<FollowJob*> self_ = std::make_shared<FollowJob*>(this);
};

}  // namespace ballast
