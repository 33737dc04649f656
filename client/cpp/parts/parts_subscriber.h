// ballast::Subscriber of a run that is on several daemons, each of which has some of its tensors (proto/PROTOCOL.md, "Several
// daemons"): a subscriber for each, and versions that all of them have. subscriber.h says what the calls do; besides:
//
// - A version is handed out when every daemon has given the same step of it, and each is still at the generation that it is
//   of (version_negotiation.h). Until then changes wait, and the weights that are here stay. Where a part comes whole, its
//   weights are written as they come, but only once all parts are about to come to the same step, in Next; where that is
//   lost on the way, there are no weights to read until all have come to one again.
// - While one daemon is away, or slow, the others' versions wait for it; it has `reconnect_timeout_s`.
// - FollowedVersion: `generation` is another one whenever a daemon's is; `skipped` is that of the part that missed most, and
//   `closed_unix_s` of the daemon that closed the step last. `base_step` is there where all parts came as changes.
// - Memory: all weights once, over the parts; and while they wait, what each part's version changes, at most twice its weights.
// - A version that has a name is its parts' versions of that name, if they were named together (part_tags.h): each comes whole,
//   and nothing is negotiated until Resume. INVALID_ARGUMENT: the list of servers. FAILED_PRECONDITION: they do not have
//   the parts of one run, in this order.
//
// Threads: as subscriber.h says. A thread of its own watches what the parts offer, and asks their daemons.
#pragma once

#include <atomic>
#include <memory>
#include <optional>
#include <string>
#include <thread>
#include <vector>

#include "absl/base/thread_annotations.h"
#include "absl/synchronization/mutex.h"
#include "absl/time/time.h"

#include "client/cpp/follow/change_signal.h"
#include "client/cpp/follow/held_subscriber.h"
#include "client/cpp/parts/part_placement.h"
#include "client/cpp/parts/patience.h"
#include "client/cpp/parts/version_negotiation.h"

namespace ballast {

class PartsSubscriber final : public Subscriber {
 public:
  static absl::StatusOr<std::unique_ptr<Subscriber>> Open(ClientOptions options, const SubscribeOptions& subscription);
  static constexpr absl::Duration kPatience = absl::Seconds(1);  // at least (patience.h)
  // Of parts that are open, which tell `changes` whenever their standing is another one. `names`: of their daemons.
  static absl::StatusOr<std::unique_ptr<PartsSubscriber>> Of(std::vector<std::unique_ptr<HeldSubscriber>> parts,
                                                             std::vector<std::string> names, uint64_t every,
                                                             std::shared_ptr<ChangeSignal> changes,
                                                             absl::Duration patience = kPatience);
  ~PartsSubscriber() override;

  absl::StatusOr<std::optional<FollowedVersion>> Next(double timeout_s) override;
  bool Await(double timeout_s) override;
  const v1::RunSpec& spec() const override { return spec_; }
  bool readable() const override;
  absl::StatusOr<FollowedTensor> Served(uint32_t tensor) const override;
  absl::Status Read(uint32_t tensor, absl::Span<std::byte> out) const override;
  absl::StatusOr<uint64_t> CountChanged(uint32_t tensor) const override;
  absl::Status ReadChanged(uint32_t tensor, absl::Span<int64_t> places, absl::Span<std::byte> values) const override;
  absl::Status Rollback(const std::string& tag) override;
  void Resume() override;
  void Close() override;

 private:
  // What has come of a part since a version was handed out.
  struct Came {
    FollowedVersion last;  // of all its versions; what it changed is counted over all of them
    bool whole = false;    // one came whole
    uint64_t received_bytes = 0, changed_elements = 0, skipped = 0;
    bool any = false;
  };
  // By part.
  using Ids = std::vector<v1::VersionId>;
  using Standings = std::vector<HeldSubscriber::Standing>;

  PartsSubscriber(std::vector<std::unique_ptr<HeldSubscriber>> parts, std::vector<std::string> names, uint64_t every,
                  std::shared_ptr<ChangeSignal> changes, absl::Duration patience);

  Standings Look() const;
  std::optional<Ids> agreed() const;
  std::optional<Ids> handed() const;
  // Asks the daemons which versions have the name. Errors as from Rollback.
  absl::StatusOr<Ids> AskFor(const std::string& tag) const;

  // --- the caller's thread ---
  absl::Status LearnSpec();
  // What part p has to tell, or waits for Next to write.
  absl::Status Collect(size_t p);
  // That of all parts which need no agreement, and of all that agree.
  absl::Status CollectAll();
  // Whether CollectAll has something to do.
  bool HasSomething() const;
  // All that was agreed on is here, and is not known not to make up one run.
  bool IsHere() const;
  // It makes up one run, which is learned.
  bool Fits();
  // What was agreed on, if all of it is here still: who told it to go elsewhere may have come in between.
  std::optional<FollowedVersion> HandOut();
  // Likewise, as handed out from now on; its name goes to `tag`.
  std::optional<Ids> TakeAgreed(std::string* tag);
  absl::Status CheckReadable() const;
  absl::StatusOr<PartPlacement::Place> Find(uint32_t tensor) const;

  // --- the thread that watches ---
  void Watch();
  // Returns when it is to be called again, though nothing has changed.
  absl::Time Settle();
  absl::Time RelaxLater(const std::vector<VersionNegotiation::Standing>& standings);
  absl::Time Ask(const std::vector<VersionNegotiation::Standing>& standings);
  bool is_tagged() const;
  // While it goes to a version: the name may have been given to another one since.
  absl::Time SettleTagged(const Ids& common);
  // last: handed out.
  static std::vector<VersionNegotiation::Standing> StandingsOf(const Standings& seen, const std::optional<Ids>& last);
  void Tell(const std::vector<VersionNegotiation::Order>& orders);

  const std::vector<std::unique_ptr<HeldSubscriber>> parts_;
  const std::vector<std::string> names_;
  const std::shared_ptr<ChangeSignal> changes_;
  std::atomic<bool> closed_ = false;

  // The caller's.
  PartPlacement placement_;
  v1::RunSpec spec_;
  std::vector<Came> came_;  // by part
  bool misfit_ = false;     // what is here, as that of a run that some of its daemons have amended
  uint64_t last_step_ = 0;  // handed out

  // The watching thread's.
  VersionNegotiation negotiation_;
  Patience patience_;
  std::optional<Ids> seen_handed_ = {};
  absl::Time listed_at_ = absl::InfinitePast();  // the versions that have names

  absl::Mutex turning_ ABSL_ACQUIRED_BEFORE(mu_);  // while parts are told where to go
  mutable absl::Mutex mu_;
  std::optional<std::string> tagged_ ABSL_GUARDED_BY(mu_);  // the name of the version that it has gone to
  bool resumed_ ABSL_GUARDED_BY(mu_) = false;               // parts are to be told
  std::optional<Ids> agreed_ ABSL_GUARDED_BY(mu_);
  std::optional<Ids> handed_ ABSL_GUARDED_BY(mu_);  // out last
  std::thread thread_;
};

}  // namespace ballast
