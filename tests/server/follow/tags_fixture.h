// Versions that have names, asked for and read as a run's calls do.
#pragma once

#include <gmock/gmock.h>

#include <memory>
#include <optional>
#include <string>
#include <utility>

#include "absl/synchronization/notification.h"

#include "tests/server/follow/followers_fixture.h"

namespace ballast::testing {

class TagsTest : public FollowersTest {
 protected:
  // One call, whose answer comes.
  struct Call {
    absl::StatusOr<TagKeeper::Tagged> answer = absl::UnknownError("not yet");
    absl::Notification done;
  };
  using CallPtr = std::shared_ptr<Call>;

  CallPtr BeginTag(const std::string& name, std::optional<VersionChoice> version = {}, bool replace = false) {
    return BeginOrder({.name = name, .replace = replace}, std::move(version));
  }
  CallPtr BeginOrder(TagKeeper::Order order, std::optional<VersionChoice> version = {}) {
    auto call = std::make_shared<Call>();
    OnStrand([&] {
      followers_->Tag({.order = std::move(order), .version = std::move(version)},
                      [call](absl::StatusOr<TagKeeper::Tagged> answer) {
                        call->answer = std::move(answer);
                        call->done.Notify();
                      });
    });
    return call;
  }
  static absl::StatusOr<TagKeeper::Tagged> Await(const CallPtr& call) {
    EXPECT_TRUE(call->done.WaitForNotificationWithTimeout(absl::Minutes(1)));
    return call->answer;
  }
  absl::StatusOr<TagKeeper::Tagged> Tag(const std::string& name, std::optional<VersionChoice> version = {},
                                        bool replace = false) {
    return Await(BeginTag(name, std::move(version), replace));
  }
  // Of the weights that there are, which nobody follows.
  absl::StatusOr<TagKeeper::Tagged> TagNow(const std::string& name, uint64_t step, bool replace = false) {
    const CallPtr call = BeginTag(name, {}, replace);
    if (call->done.HasBeenNotified()) return call->answer;
    if (Close(step)) Encode();
    return Await(call);
  }
  absl::Status Untag(const std::string& name) {
    absl::Notification done;
    absl::Status answer;
    OnStrand([&] {
      followers_->Untag(name, [&](const absl::Status& s) {
        answer = s;
        done.Notify();
      });
    });
    done.WaitForNotification();
    return answer;
  }
  // What a reader of this version alone gets; its stream has ended then.
  absl::StatusOr<ServedWeights> Read(VersionChoice version, FollowOrder order = {},
                                     std::optional<ServedWeights> had = {}) {
    order.version = std::move(version);
    const auto reader = Follow(std::move(order), std::move(had));
    EXPECT_TRUE(reader->AwaitEnd());
    OnStrand([&] { followers_->OnGone(reader.get()); });
    sent_bytes_ = reader->sent_bytes;
    if (!reader->ended()->ok()) return *reader->ended();
    return reader->weights();
  }
  static VersionChoice Named(const std::string& name) { return {.tag = name}; }
  static VersionChoice OfStep(uint64_t step) { return {.id = {.step = step}}; }
  uint64_t memory_bytes() {
    uint64_t bytes = 0;
    OnStrand([&] { bytes = followers_->memory_bytes(); });
    return bytes;
  }
  void ChangeAll(uint64_t seed) {
    for (uint32_t tensor = 0; tensor < 3; ++tensor) ChangeNow(tensor, seed);
  }

  uint64_t sent_bytes_ = 0;  // by Read
};

}  // namespace ballast::testing
