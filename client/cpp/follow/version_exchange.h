// Whose the weights of a Subscriber are: the thread's that receives, which may write them, or the caller's, who may read
// them. They begin as the receiver's, become the caller's with each version, and the receiver's again only while the
// caller waits in Next. Thread-safe.
#pragma once

#include <memory>
#include <optional>
#include <utility>

#include "absl/base/thread_annotations.h"
#include "absl/status/status.h"
#include "absl/status/statusor.h"
#include "absl/synchronization/mutex.h"
#include "absl/time/time.h"

#include "ballast/v1/follow.pb.h"
#include "client/cpp/follow/change_signal.h"
#include "client/cpp/follow/held_subscriber.h"
#include "client/cpp/follow/subscriber.h"

namespace ballast {

class VersionExchange {
 public:
  // `changes`: told whenever `standing` is another one; nullptr: nobody is.
  explicit VersionExchange(std::shared_ptr<ChangeSignal> changes) : changes_(std::move(changes)) {}

  // --- the receiver ---
  // A call begins: what it brings was not declined.
  void Begin();
  // Returns when the weights are the receiver's. `all_here`: what it writes is all here, so that the caller waits for it
  // whatever its timeout. `offered`: the version that it writes; none: it is none. False: Close or Decline was called.
  bool TakeWeights(bool all_here, std::optional<v1::VersionId> offered);
  // The weights are of this version, which is named by `id`, and the caller's.
  void Publish(FollowedVersion version, const v1::VersionId& id);
  // They are what they were when they were taken, and the caller's again.
  void GiveBack();
  // They are of no version, and stay the receiver's.
  void Spoil();
  // Nothing more comes.
  void Fail(absl::Status status);

  // --- the caller: as Subscriber's ---
  absl::StatusOr<std::optional<FollowedVersion>> Next(absl::Duration timeout);
  bool Await(absl::Duration timeout);
  // Whether the weights are the caller's, and of the version that Next returned last.
  bool readable() const;

  // --- anyone ---
  HeldSubscriber::Standing standing() const;
  // The receiver does not get the weights for what the present call brings: what it waits to write, and what it has read and
  // is about to wait with.
  void Decline();
  void Close();
  bool closed() const;

 private:
  bool told() const ABSL_SHARED_LOCKS_REQUIRED(mu_) { return version_ || failure_ || closed_; }
  void Tell() const {
    if (changes_ != nullptr) changes_->Notify();
  }

  const std::shared_ptr<ChangeSignal> changes_;
  mutable absl::Mutex mu_;
  bool receivers_ ABSL_GUARDED_BY(mu_) = true;
  bool wanted_ ABSL_GUARDED_BY(mu_) = false;   // by the receiver, and they are the caller's
  bool granted_ ABSL_GUARDED_BY(mu_) = false;  // the caller waits in Next for a version
  bool all_here_ ABSL_GUARDED_BY(mu_) = false;
  bool declined_ ABSL_GUARDED_BY(mu_) = false;                   // since Begin
  std::optional<v1::VersionId> offered_ ABSL_GUARDED_BY(mu_);    // while it is wanted
  std::optional<v1::VersionId> here_ ABSL_GUARDED_BY(mu_);       // published last
  std::optional<FollowedVersion> version_ ABSL_GUARDED_BY(mu_);  // that Next has not returned
  std::optional<absl::Status> failure_ ABSL_GUARDED_BY(mu_);
  bool closed_ ABSL_GUARDED_BY(mu_) = false;
};

}  // namespace ballast
