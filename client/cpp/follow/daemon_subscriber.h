// ballast::Subscriber of one daemon: subscriber.h says what the calls do. As part of one of several daemons (OpenHeld) it is a
// HeldSubscriber, and its run a part of a run; elsewhere that is refused.
#pragma once

#include <grpcpp/grpcpp.h>

#include <atomic>
#include <cstdint>
#include <memory>
#include <optional>
#include <string>
#include <thread>
#include <vector>

#include "absl/base/thread_annotations.h"
#include "absl/synchronization/mutex.h"

#include "ballast/v1/follow.pb.h"
#include "client/cpp/follow/change_signal.h"
#include "client/cpp/follow/changed_elements.h"
#include "client/cpp/follow/followed_weights.h"
#include "client/cpp/follow/held_subscriber.h"
#include "client/cpp/follow/incoming_version.h"
#include "client/cpp/follow/subscriber.h"
#include "client/cpp/follow/version_exchange.h"
#include "client/cpp/transport/connection.h"
#include "client/cpp/transport/retry.h"
#include "client/cpp/transport/scoped_call.h"

namespace ballast {

class DaemonSubscriber final : public HeldSubscriber {
 public:
  static absl::StatusOr<std::unique_ptr<DaemonSubscriber>> Open(ClientOptions options,
                                                                const SubscribeOptions& subscription);
  // `changes`: told whenever standing() is another one.
  static absl::StatusOr<std::unique_ptr<DaemonSubscriber>> OpenHeld(ClientOptions options,
                                                                    const SubscribeOptions& subscription,
                                                                    std::shared_ptr<ChangeSignal> changes);
  ~DaemonSubscriber() override;

  absl::StatusOr<std::optional<FollowedVersion>> Next(double timeout_s) override;
  bool Await(double timeout_s) override;
  const v1::RunSpec& spec() const override { return weights_.spec(); }
  bool readable() const override { return exchange_.readable(); }
  absl::StatusOr<FollowedTensor> Served(uint32_t tensor) const override;
  absl::Status Read(uint32_t tensor, absl::Span<std::byte> out) const override;
  absl::StatusOr<uint64_t> CountChanged(uint32_t tensor) const override;
  absl::Status ReadChanged(uint32_t tensor, absl::Span<int64_t> places, absl::Span<std::byte> values) const override;
  absl::Status Rollback(const std::string& tag) override;
  void Resume() override { Turn({.tag = "", .every = subscription_.every}); }
  void Close() override;

  Standing standing() const override { return exchange_.standing(); }
  void Seek(std::optional<uint64_t> from, uint64_t every) override;
  void SeekTag(const std::string& tag) override;
  absl::StatusOr<v1::ListVersionsResponse> VersionsFor(const std::string& tag) override;
  absl::StatusOr<Timeline> Now() override;
  void EndVersion() override;

 private:
  // Of versions.
  struct Wish {
    std::string tag;                         // of this name; empty: the newest
    std::optional<v1::VersionId> from = {};  // of its generation and epoch none before its step
    uint64_t every = 0;                      // none nearer to the last one
  };

  DaemonSubscriber(std::unique_ptr<Connection> connection, std::shared_ptr<std::atomic<bool>> closing,
                   SubscribeOptions subscription, FollowedWeights weights, std::shared_ptr<ChangeSignal> changes);

  absl::Status CheckReading(uint32_t tensor) const;
  // `declines`: what the present call brings is not wanted any more.
  void Turn(Wish wish, bool declines = false);
  // An answer about the run, for Now.
  template <typename Stub, typename Asked, typename Answer>
  absl::Status AskNow(Stub& stub, grpc::Status (Stub::*method)(grpc::ClientContext*, const Asked&, Answer*),
                      Asked request, Answer* response);

  // --- the receiver's thread ---
  void Receive();
  // What is wanted now.
  void LearnWanted();
  // Whether the call that begins is not wanted.
  bool IsCancelled() const ABSL_SHARED_LOCKS_REQUIRED(mu_) { return exchange_.closed() || turns_ != turn_; }
  // Whether something else is wanted since.
  bool HasTurned();
  // Until it is, or Close was called.
  void AwaitTurn();
  // One call. *refused: why it ended on this side.
  absl::Status SubscribeOnce(absl::Status* refused);
  // Why no further call is made; none: one is.
  std::optional<absl::Status> Judge(const absl::Status& status, const absl::Status& refused, Retry* retry);
  absl::Status ReadSpecAgain();
  v1::SubscribeRequest Request() const;
  absl::Status Take(v1::VersionPart* part);
  absl::Status TakeBegin(const v1::VersionBegin& begin);
  absl::Status TakeChunk(v1::ChangedChunk* chunk);
  absl::Status TakeEnd(const v1::VersionEnd& end);
  absl::Status Write(const v1::ChangedChunk& chunk);
  absl::Status WriteChanges();
  absl::Status CheckNoneLacks() const;
  void DropChanges();
  void Forget();
  // Whether this version is as far from the last one published as is wanted.
  bool IsWanted(const v1::VersionId& id) const;
  // SubscribeRequest.have and every, for that.
  void AskForWanted(v1::SubscribeRequest* request) const;
  void Publish(FollowedVersion version);

  const std::unique_ptr<Connection> connection_;
  const std::shared_ptr<std::atomic<bool>> closing_;  // what the connection's waits ask
  const SubscribeOptions subscription_;
  const bool held_;         // somebody else says when a version is over: EndVersion
  const std::string what_;  // for the log
  VersionExchange exchange_;
  absl::Mutex mu_;
  grpc::ClientContext* call_ ABSL_GUARDED_BY(mu_) = nullptr;  // under way
  grpc::ClientContext* asks_ ABSL_GUARDED_BY(mu_) = nullptr;  // that of AskNow
  Wish wish_ ABSL_GUARDED_BY(mu_);
  uint64_t turns_ ABSL_GUARDED_BY(mu_) = 0;  // times that it has changed

  FollowedWeights weights_;                 // the receiver's or the caller's, as exchange_ says, like the next
  std::optional<ChangedElements> changed_;  // by the version that the weights are of; none: they are not marked

  // The receiver's.
  Wish asked_;                         // wish_, when it was learned
  uint64_t turn_ = 0;                  // turns_, likewise
  std::optional<v1::VersionId> have_;  // none: the weights are of no version
  std::optional<v1::VersionId> told_;  // the last one published
  std::optional<IncomingVersion> incoming_;
  // Changes come by way of versions that are not wanted themselves: they are kept, and written with those of one that is.
  std::vector<v1::ChangedChunk> changes_;      // of these, and of the incoming one if it changes another
  std::optional<v1::VersionId> coming_;        // the last of these; none: there is none
  uint64_t way_bytes_ = 0, way_elements_ = 0;  // received of these, and changed by them
  std::vector<bool> touched_;                  // by tensor, since the last one published
  bool respecified_ = false;                   // likewise
  uint64_t versions_ = 0;                      // received
  uint64_t calls_ = 0;
  int refusals_ = 0;  // in a row
  std::thread thread_;
};

}  // namespace ballast
