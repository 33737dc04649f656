// A reader whose call to the daemon ends, or brings what is damaged: it asks again, for as much as it has to.
#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include "tests/client/follow/reader.h"

namespace ballast {
namespace {

using ::testing::AllOf;
using ::testing::ElementsAre;
using ::testing::HasSubstr;
using ::testing::IsEmpty;

grpc::Status Over() { return {grpc::StatusCode::UNAVAILABLE, "Connection reset by the test"}; }

class FollowRecoveryTest : public ::testing::Test {
 protected:
  FollowRecoveryTest() {
    daemon_.Say(first_.Whole());
    EXPECT_EQ(reader_.Next().step, 1u);
  }
  // All but so many of the last ones, and then the call ends.
  void SayInPart(VersionParts parts, size_t left_out) {
    parts.resize(parts.size() - left_out);
    daemon_.Say(parts, Over());
  }
  // The version with a part that the test makes wrong, and then the call's end.
  template <typename Damage>
  void SayDamaged(VersionParts parts, const Damage& damage) {
    damage(*parts[1].mutable_chunk());
    daemon_.Say(parts, Over());
  }
  std::string Said() {
    std::string all;
    for (const std::string& line : reader_.Lines()) all += line + "\n";
    return all;
  }

  FakeFollowService daemon_;
  Reader reader_{daemon_.address()};
  const FollowedRun first_{kFollowedSpec, 1}, second_ = first_.Next(), third_ = second_.Next();
};

TEST_F(FollowRecoveryTest, ACutInTheMiddleOfChangesLeavesTheVersionBefore) {
  SayInPart(second_.ChangesOf(first_), 2);
  const v1::SubscribeRequest again = daemon_.AwaitRequests(2)[1];
  EXPECT_EQ(again.have().step(), 1u);
  EXPECT_EQ(again.have().generation(), 1u);
  EXPECT_EQ(again.digests_size(), kFollowedSpec.tensors_size());
  EXPECT_EQ(again.digests(0), first_.Digest(0));
  EXPECT_EQ(again.digests(4), first_.Digest(4));
  reader_.Expect(first_);
  daemon_.Say(second_.ChangesOf(first_));
  daemon_.Say(third_.ChangesOf(second_));
  EXPECT_EQ(reader_.Next().step, 2u);
  EXPECT_EQ(reader_.Next().step, 3u);
  reader_.Expect(third_);
  EXPECT_THAT(Said(), HasSubstr("following run 'r': lost the daemon at"));
}

TEST_F(FollowRecoveryTest, OfAVersionThatCameWholeInPartTheRestComes) {
  SayInPart(second_.Whole(), 6);  // f has come not at all, e in part
  const auto none = reader_.subscriber->Next(0.2);
  ASSERT_TRUE(none.ok()) << none.status();
  const v1::SubscribeRequest again = daemon_.AwaitRequests(2)[1];
  EXPECT_FALSE(again.has_have());
  EXPECT_THAT(again.digests(), ElementsAre(second_.Digest(0), second_.Digest(1), second_.Digest(2), second_.Digest(3),
                                           0, first_.Digest(5)));
  daemon_.Say(second_.Whole({0, 1, 2, 3}));
  const FollowedVersion version = reader_.Next();
  EXPECT_THAT(version.changed, ElementsAre(0, 1, 2, 3, 4, 5)) << "since the first";
  reader_.Expect(second_);
}

TEST_F(FollowRecoveryTest, TheSameVersionIsNotToldTwice) {
  daemon_.End(Over());
  std::vector<uint32_t> all(static_cast<size_t>(kFollowedSpec.tensors_size()));
  for (uint32_t i = 0; i < all.size(); ++i) all[i] = i;
  daemon_.Say(first_.Whole(all));
  daemon_.Say(second_.ChangesOf(first_));
  EXPECT_EQ(reader_.Next().step, 2u);
  reader_.Expect(second_);
}

TEST_F(FollowRecoveryTest, ADamagedChunkIsAskedForAgain) {
  SayDamaged(second_.ChangesOf(first_), [](v1::ChangedChunk& chunk) { chunk.set_crc32c(chunk.crc32c() + 1); });
  daemon_.Say(second_.ChangesOf(first_));
  EXPECT_EQ(reader_.Next().step, 2u);
  EXPECT_EQ(daemon_.AwaitRequests(2)[1].have().step(), 1u) << "nothing was written";
  EXPECT_THAT(Said(), HasSubstr("tensor 0 'a', chunk 0 arrived damaged; asking for it again"));
}

TEST_F(FollowRecoveryTest, ATensorOfAnotherDigestHasLostItsWay) {
  FollowedRun other = first_;
  other.codes[0][3] ^= 1;  // what the daemon believes this reader to have
  const FollowedRun next = other.Next();
  daemon_.Say(next.ChangesOf(other), Over());
  daemon_.Say(next.Whole());
  EXPECT_EQ(reader_.Next().step, 2u);
  reader_.Expect(next);
  const v1::SubscribeRequest again = daemon_.AwaitRequests(2)[1];
  EXPECT_FALSE(again.has_have());
  EXPECT_THAT(again.digests(), IsEmpty());
  EXPECT_THAT(Said(), HasSubstr("tensor 0 'a' has another digest than the daemon's"));
}

TEST_F(FollowRecoveryTest, WhatIsDamagedAgainAndAgainIsAnError) {
  for (int i = 0; i < 3; ++i) {
    SayDamaged(i == 0 ? second_.ChangesOf(first_) : second_.Whole(),
               [](v1::ChangedChunk& chunk) { chunk.set_crc32c(chunk.crc32c() + 1); });
  }
  const absl::Status damaged = reader_.Failure();
  EXPECT_EQ(damaged.code(), absl::StatusCode::kDataLoss) << damaged;
  EXPECT_THAT(std::string(damaged.message()), HasSubstr("following run 'r': tensor 0 'a', chunk 0 arrived damaged"));
  EXPECT_EQ(daemon_.AwaitRequests(3).size(), 3u);
}

TEST_F(FollowRecoveryTest, ChangesThatAreMalformedAreAnError) {
  for (int i = 0; i < 3; ++i) {
    VersionParts changes = second_.ChangesOf(first_);
    v1::ChangedChunk& chunk = *changes[1].mutable_chunk();
    chunk.set_position_coding(v1::POSITION_CODING_GAPS);
    chunk.set_positions("\x7f");
    chunk.set_count(1);
    chunk.set_values("1234");
    chunk.set_crc32c(Crc32c(BytesOf(chunk.positions() + chunk.values())));
    uint64_t bytes = 0;
    for (const v1::VersionPart& part : changes) {
      bytes += part.chunk().positions().size() + part.chunk().values().size();
      bytes += 4 * static_cast<uint64_t>(part.chunk().scales_size());
    }
    changes[0].mutable_begin()->set_bytes(bytes);
    daemon_.Say(changes, Over());
    if (i < 2) daemon_.Say(first_.Whole());
  }
  for (int i = 0; i < 2; ++i) EXPECT_EQ(reader_.Next().step, 1u) << "it asks for all";
  daemon_.AwaitSaid();
  const auto none = reader_.subscriber->Next(0.2);
  ASSERT_TRUE(none.ok());
  EXPECT_EQ(reader_.subscriber->Served(0).status().code(), absl::StatusCode::kFailedPrecondition);
  EXPECT_THAT(Said(), HasSubstr("tensor 0 'a', chunk 0: changes of weights are malformed: position 0 is missing"));
}

TEST_F(FollowRecoveryTest, ABusyDaemonIsAskedWhenItSays) {
  daemon_.End({grpc::StatusCode::RESOURCE_EXHAUSTED, "16 readers follow run 'r'"}, 5);
  daemon_.End({grpc::StatusCode::UNAVAILABLE, "run 'r' was amended"}, 5);
  daemon_.Say(second_.ChangesOf(first_));
  EXPECT_EQ(reader_.Next().step, 2u);
  EXPECT_EQ(daemon_.AwaitRequests(3).size(), 3u);
  EXPECT_THAT(Said(), HasSubstr("waiting 0.005 s (16 readers follow run 'r')"));
}

TEST_F(FollowRecoveryTest, AnAmendedRunHasOtherTensors) {
  v1::RunSpec grown = kFollowedSpec;
  v1::TensorSpec* added = grown.add_tensors();
  added->set_name("g");
  added->set_dtype("bf16");
  added->add_shape(3);
  daemon_.Amend(grown);
  daemon_.End({grpc::StatusCode::UNAVAILABLE, "run 'r' was amended"}, 1);
  const FollowedRun after(grown, 2);
  daemon_.Say(after.Whole());
  EXPECT_TRUE(reader_.subscriber->Await(kLongS));
  reader_.Expect(first_);
  EXPECT_EQ(reader_.subscriber->spec().tensors_size(), kFollowedSpec.tensors_size()) << "until Next";
  const FollowedVersion version = reader_.Next();
  EXPECT_TRUE(version.respecified);
  EXPECT_EQ(reader_.subscriber->spec().tensors_size(), grown.tensors_size());
  reader_.Expect(after);
  EXPECT_FALSE(daemon_.AwaitRequests(2)[1].has_have());
}

TEST_F(FollowRecoveryTest, ARunThatIsNoLongerFollowedSaysSo) {
  v1::RunSpec unfollowed = kFollowedSpec;
  unfollowed.clear_follow();
  daemon_.Amend(unfollowed);
  daemon_.End({grpc::StatusCode::UNAVAILABLE, "run 'r' was amended"}, 1);
  daemon_.End({grpc::StatusCode::FAILED_PRECONDITION, "no follow"});
  EXPECT_THAT(std::string(reader_.Failure().message()), HasSubstr("has no RunSpec.follow"));
}

TEST(FollowOutageTest, ADaemonThatStaysAwayIsAnError) {
  FakeFollowService daemon;
  Reader reader(daemon.address(), /*reconnect_timeout_s=*/0.3);
  daemon.Say(FollowedRun(kFollowedSpec, 1).Whole());
  reader.Next();
  daemon.Shutdown();
  const absl::Status away = reader.Failure();
  EXPECT_EQ(away.code(), absl::StatusCode::kUnavailable) << away;
  EXPECT_THAT(std::string(away.message()),
              AllOf(HasSubstr("following run 'r'"), HasSubstr(daemon.address()), HasSubstr("reconnect_timeout_s")));
  reader.Expect(FollowedRun(kFollowedSpec, 1));
}

TEST(FollowOutageTest, ASubscriberEndsWhileItsDaemonIsAway) {
  FakeFollowService daemon;
  Reader reader(daemon.address(), /*reconnect_timeout_s=*/3600);
  daemon.AwaitRequests(1);
  daemon.Shutdown();
  while (reader.Lines().empty()) EXPECT_FALSE(reader.subscriber->Await(0.01));
  reader.subscriber.reset();
}

}  // namespace
}  // namespace ballast
