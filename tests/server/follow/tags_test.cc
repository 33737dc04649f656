// Versions that have names, in memory: they stay whatever the run does, and never take the room of those that are made.
#include <gtest/gtest.h>

#include "server/base/clock.h"
#include "tests/server/follow/tags_fixture.h"

namespace ballast {
namespace {

using ::testing::HasSubstr;
using testing::ServedWeights;
using testing::TagsTest;
using testing::VersionReader;

class TagsInMemoryTest : public TagsTest {
 protected:
  TagsInMemoryTest() { most_tags_ = 2; }
};

TEST_F(TagsInMemoryTest, ANameKeepsTheVersionWhateverComesAfterIt) {
  Make("bf16");
  const auto reader = Follow();
  Version(3);
  const ServedWeights then = Look();
  const auto good = Tag("good", OfStep(3));
  ASSERT_TRUE(good.ok()) << good.status();
  EXPECT_TRUE(good->created);
  EXPECT_EQ(good->tag.id.step, 3u);
  for (uint64_t step = 4; step < 9; ++step) {
    ChangeAll(step);
    Version(step);
    reader->At(step);
  }
  EXPECT_EQ(*Read(Named("good")), then);
  EXPECT_EQ(*Read(OfStep(3)), then) << "its id names it, too";
  EXPECT_EQ(*Read(OfStep(8)), Look()) << "the newest needs no name";
  EXPECT_EQ(reader->At(8), Look()) << "who follows goes on";
  OnStrand([&] { followers_->Reset(absl::UnavailableError("replaced")); });
  EXPECT_EQ(*Read(Named("good")), then) << "replaced weights leave it";
  ASSERT_TRUE(Untag("good").ok());
  const auto gone = Read(Named("good"));
  EXPECT_EQ(gone.status().code(), absl::StatusCode::kNotFound);
  EXPECT_THAT(std::string(gone.status().message()), HasSubstr("has no version of the name 'good'"));
}

TEST_F(TagsInMemoryTest, WithoutAReaderAVersionIsMadeOfTheLastStepThatClosed) {
  Make("bf16", /*every=*/10);
  const auto first = TagNow("a", 3);
  ASSERT_TRUE(first.ok()) << first.status();
  EXPECT_EQ(first->tag.id.step, 3u);
  const ServedWeights at3 = Look();
  ChangeAll(5);
  EXPECT_FALSE(Close(4)) << "nobody wants it";
  const auto second = TagNow("b", 4);
  ASSERT_TRUE(second.ok()) << second.status();
  EXPECT_EQ(*Read(Named("a")), at3);
  EXPECT_EQ(*Read(Named("b")), Look());
}

TEST_F(TagsInMemoryTest, ANameForOneStepWaitsForThatOne) {
  Make("bf16");
  const auto first = TagNow("a", 3);
  ASSERT_TRUE(first.ok()) << first.status();
  VersionId later = first->tag.id;
  later.step = 5;
  const CallPtr one = BeginOrder({.name = "b", .mark = 7, .only = later});
  const CallPtr other = BeginOrder({.name = "b", .mark = 7, .only = later});
  ChangeAll(4);
  EXPECT_FALSE(Close(4)) << "it is for another";
  ChangeAll(5);
  ASSERT_TRUE(Close(5));
  Encode();
  ASSERT_TRUE(Await(one).ok() && Await(other).ok());
  EXPECT_EQ(Await(one)->tag.id, later);
  EXPECT_FALSE(Await(other)->created);
  EXPECT_EQ(*Read(Named("b")), Look());
  const CallPtr again = BeginOrder({.name = "b", .mark = 7, .only = later});
  EXPECT_TRUE(Await(again).ok()) << "it has it, whatever the run has come to";
}

TEST_F(TagsInMemoryTest, AStepThatDoesNotCloseIsNotAwaitedForEver) {
  Make("bf16");
  VersionId never = TagNow("a", 3)->tag.id;
  never.step = 9;
  const CallPtr call = BeginOrder({.name = "b", .only = never});
  OnStrand([&] { followers_->Tick(MonotonicSeconds()); });
  EXPECT_FALSE(call->done.HasBeenNotified());
  OnStrand([&] { followers_->Tick(MonotonicSeconds() + 31); });
  EXPECT_EQ(Await(call).status().code(), absl::StatusCode::kAborted);
  EXPECT_THAT(std::string(Await(call).status().message()), HasSubstr("step 9 of run"));
  EXPECT_FALSE(Close(9)) << "nobody waits for it now";
}

TEST_F(TagsInMemoryTest, ANameThatCameWhileAnOlderVersionWasMadeGetsTheNext) {
  Make("bf16");
  const auto reader = Follow();
  ASSERT_TRUE(Close(1));
  const CallPtr call = BeginTag("late");
  ChangeAll(7);  // step 2, whose version is not begun
  Encode();
  AwaitMade(1);
  EXPECT_FALSE(call->done.HasBeenNotified());
  ASSERT_TRUE(Close(2));
  Encode();
  EXPECT_EQ(Await(call)->tag.id.step, 2u);
  EXPECT_EQ(*Read(Named("late")), Look());
}

TEST_F(TagsInMemoryTest, TheSameNameForTheSameVersionIsAnsweredAlikeAndForAnotherRefused) {
  Make("bf16");
  ASSERT_TRUE(TagNow("good", 1)->created);
  EXPECT_FALSE(TagNow("good", 1)->created);
  ChangeAll(3);
  const auto other = TagNow("good", 2);
  EXPECT_EQ(other.status().code(), absl::StatusCode::kAlreadyExists);
  EXPECT_THAT(std::string(other.status().message()), HasSubstr("of step 1; with replace"));
  EXPECT_NE(*Read(Named("good")), Look());
  ASSERT_TRUE(TagNow("good", 2, /*replace=*/true)->created);
  EXPECT_EQ(*Read(Named("good")), Look());
  ASSERT_TRUE(Tag("other-name", Named("good")).ok()) << "a second name of the same version";
  ASSERT_TRUE(Untag("good").ok());
  EXPECT_EQ(*Read(Named("other-name")), Look());
}

TEST_F(TagsInMemoryTest, RefusesByName) {
  Make("bf16");
  EXPECT_THAT(std::string(Tag("a", OfStep(7)).status().message()),
              HasSubstr("run 'r1' has no version of step 7: there is no newest version; names: none"));
  ASSERT_TRUE(TagNow("a", 1).ok());
  ASSERT_TRUE(TagNow("b", 1).ok());
  const auto third = TagNow("c", 1);
  EXPECT_EQ(third.status().code(), absl::StatusCode::kResourceExhausted);
  EXPECT_THAT(std::string(third.status().message()), HasSubstr("allows 2 (follow.tags)"));
  EXPECT_THAT(std::string(third.status().message()), HasSubstr("'a' (step 1), 'b' (step 1)"));
  EXPECT_THAT(std::string(Tag("c", Named("d")).status().message()), HasSubstr("the newest is of step 1"));
  EXPECT_EQ(Untag("d").code(), absl::StatusCode::kNotFound);
}

TEST_F(TagsInMemoryTest, ARunThatKeepsNoNamesSaysWhatWould) {
  most_tags_ = 0;
  Make("bf16");
  const absl::Status refused = Tag("a").status();
  EXPECT_EQ(refused.code(), absl::StatusCode::kFailedPrecondition);
  EXPECT_THAT(std::string(refused.message()), HasSubstr("its spec has no follow.tags"));
}

TEST_F(TagsInMemoryTest, AReaderOfOneIsSentWhatItsDigestsDoNotHave) {
  Make("int8-row");
  ASSERT_TRUE(TagNow("good", 1).ok());
  const ServedWeights then = Look();
  ChangeNow(1, 9);
  const ServedWeights now = Look();
  std::vector<uint64_t> digests(3);
  for (uint32_t i = 0; i < 3; ++i) digests[i] = VersionReader::DigestOf(spec_, now, i);
  EXPECT_EQ(*Read(Named("good"), {.digests = digests}, now), then);
  EXPECT_GT(sent_bytes_, 0u);
  EXPECT_LT(sent_bytes_, 1000u) << "of the one tensor that differs";
  EXPECT_EQ((*Read(Named("good"), {.tensors = {true, false, false}}))[0], then[0]);
}

// The plan has room for them beside all that following takes: while they are there versions go on being made.
TEST_F(TagsInMemoryTest, TheyNeverTakeTheRoomOfTheNextVersion) {
  Make("bf16");
  const uint64_t most = FollowMemoryBytes(spec_, plan_) + TagMemoryBytes(spec_, plan_);
  const auto quick = Follow();
  const auto slow = Follow({}, {}, /*held=*/true);
  for (uint64_t step = 0; step < 10; ++step) {
    ChangeAll(step + 10);
    Version(step);
    quick->At(step);
    EXPECT_TRUE(Tag(step % 2 == 0 ? "even" : "odd", OfStep(step), /*replace=*/true).ok());
    EXPECT_LE(memory_bytes(), most);
  }
  EXPECT_EQ(TagMemoryBytes(spec_, plan_), 2 * VersionBytes(spec_, plan_));
  RunSpec without = spec_;
  without.follow->tags = 0;
  EXPECT_EQ(plan_.bytes.following, MakePlan(without).bytes.following + 2 * VersionBytes(spec_, plan_));
  EXPECT_FALSE(slow->ended());
}

TEST_F(TagsInMemoryTest, AReaderOfOneThatTakesNothingGivesItsPlaceUp) {
  Make("bf16");
  ASSERT_TRUE(TagNow("good", 1).ok());
  const auto follower = Follow({}, {}, /*held=*/true);
  const auto stuck = Follow({.version = Named("good")}, {}, /*held=*/true);
  OnStrand([&] { followers_->Tick(MonotonicSeconds()); });
  EXPECT_FALSE(stuck->ended());
  OnStrand([&] { followers_->Tick(MonotonicSeconds() + 1000); });
  ASSERT_TRUE(stuck->ended());
  EXPECT_THAT(std::string(stuck->ended()->message()), HasSubstr("limits.pull_timeout"));
  EXPECT_FALSE(follower->ended()) << "it is in nobody's way";
}

TEST_F(TagsInMemoryTest, NamesThatWaitEndWithTheRunOrItsWeights) {
  Make("bf16");
  const CallPtr replaced = BeginTag("a");
  OnStrand([&] { followers_->Reset(absl::UnavailableError("replaced")); });
  EXPECT_EQ(Await(replaced).status().message(), "replaced");
  const CallPtr deleted = BeginTag("a");
  ASSERT_TRUE(Close(1));
  OnStrand([&] { followers_->End(absl::NotFoundError("deleted")); });
  EXPECT_EQ(Await(deleted).status().message(), "deleted");
}

TEST_F(TagsInMemoryTest, TheyAreShownAndCountInTheMetrics) {
  Make("bf16");
  ASSERT_TRUE(TagNow("good", 1).ok());
  absl::MutexLock lock(&mu_);
  EXPECT_EQ(shown_.readers.tags, 1u);
  EXPECT_GT(shown_.readers.tag_bytes, 200000u);
  EXPECT_THAT(metrics_.Serialize(), HasSubstr("ballast_version_tags{run_id=\"r1\"} 1"));
}

}  // namespace
}  // namespace ballast
