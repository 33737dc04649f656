// A subscriber that is told to go to another version: one that has a name, the newest ones, or a later one.
#include <algorithm>
#include <utility>

#include "client/cpp/follow/daemon_subscriber.h"
#include "client/cpp/follow/subscribed_series.h"
#include "client/cpp/follow/version_tags.h"

namespace ballast {
namespace {

// Whether steps of one are steps of the other.
bool AreOfOneTimeline(const v1::VersionId& a, const v1::VersionId& b) {
  return a.generation() == b.generation() && a.epoch() == b.epoch();
}

}  // namespace

absl::Status DaemonSubscriber::Rollback(const std::string& tag) {
  if (auto s = CheckNameable(subscription_, tag); !s.ok()) return s;
  if (auto s = CheckTag(*connection_, subscription_.run_id, tag); !s.ok()) return s;
  Turn({.tag = tag});
  return absl::OkStatus();
}

void DaemonSubscriber::SeekTag(const std::string& tag) { Turn({.tag = tag}, /*declines=*/true); }

absl::StatusOr<v1::ListVersionsResponse> DaemonSubscriber::VersionsFor(const std::string& tag) {
  if (auto s = CheckNameable(subscription_, tag); !s.ok()) return s;
  return ListVersions(*connection_, subscription_.run_id);
}

// What is offered, or else what is here, says of which generation the step is.
void DaemonSubscriber::Seek(std::optional<uint64_t> from, uint64_t every) {
  Wish wish{.tag = "", .every = every};
  const Standing now = standing();
  if (from && (now.offered || now.here)) {
    wish.from = now.offered ? now.offered : now.here;
    wish.from->set_step(*from);
  }
  Turn(std::move(wish), /*declines=*/true);
}

void DaemonSubscriber::Turn(Wish wish, bool declines) {
  absl::MutexLock lock(&mu_);
  wish_ = std::move(wish);
  ++turns_;
  if (declines) exchange_.Decline();
  if (call_ != nullptr) call_->TryCancel();
}

void DaemonSubscriber::LearnWanted() {
  absl::MutexLock lock(&mu_);
  asked_ = wish_;
  turn_ = turns_;
  exchange_.Begin();
}

bool DaemonSubscriber::IsWanted(const v1::VersionId& id) const {
  if (asked_.from && AreOfOneTimeline(id, *asked_.from) && id.step() < asked_.from->step()) return false;
  if (!told_ || !AreOfOneTimeline(id, *told_)) return true;
  return id.step() < told_->step() || id.step() - told_->step() >= asked_.every;
}

void DaemonSubscriber::AskForWanted(v1::SubscribeRequest* request) const {
  request->set_every(asked_.every);
  if (have_) *request->mutable_have() = *have_;
  if (!asked_.from) return;
  if (!have_ || !AreOfOneTimeline(*have_, *asked_.from)) {
    // A version that the daemon does not have any more, so that none is sent before that step, and then a whole one.
    *request->mutable_have() = *asked_.from;
    request->mutable_have()->set_step(0);
    request->set_every(asked_.from->step());
  } else if (asked_.from->step() > have_->step()) {
    request->set_every(std::max(asked_.every, asked_.from->step() - have_->step()));
  }
}

bool DaemonSubscriber::HasTurned() {
  absl::MutexLock lock(&mu_);
  return turns_ != turn_;
}

void DaemonSubscriber::AwaitTurn() {
  absl::MutexLock lock(&mu_);
  const auto over = [&]() ABSL_NO_THREAD_SAFETY_ANALYSIS { return turns_ != turn_ || *closing_; };
  mu_.Await(absl::Condition(&over));
}

}  // namespace ballast
