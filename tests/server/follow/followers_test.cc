// Versions and their readers over a store on the CPU: each version has the bits that the store serves when its step has
// closed, however the reader comes by it and whatever changes meanwhile.
#include "server/follow/followers.h"

#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include <algorithm>
#include <random>

#include "server/base/clock.h"
#include "tests/server/follow/followers_fixture.h"

namespace ballast {
namespace {

using ::testing::ElementsAre;
using testing::FollowersTest;
using ::testing::HasSubstr;
using testing::ServedWeights;
using testing::VersionReader;

class FollowFormatsTest : public FollowersTest, public ::testing::WithParamInterface<const char*> {};

TEST_P(FollowFormatsTest, EveryVersionHasTheBitsThatWereServed) {
  Make(GetParam());
  const auto reader = Follow();
  Version(0);
  EXPECT_EQ(reader->At(0), Look());
  std::mt19937_64 random(3);
  for (uint64_t step = 1; step <= 12; ++step) {
    for (uint32_t tensor = 0; tensor < 3; ++tensor) {
      if (random() % 3 > 0) random() % 4 == 0 ? ChangeNow(tensor, step) : Nudge(tensor, random());
    }
    const ServedWeights now = Look();
    Version(step);
    EXPECT_EQ(reader->At(step), now) << step;
  }
  EXPECT_EQ(reader->came.front(), "0");
  EXPECT_GT(std::count_if(reader->came.begin(), reader->came.end(), [](const std::string& v) { return v[0] == '+'; }),
            3);
}

INSTANTIATE_TEST_SUITE_P(Formats, FollowFormatsTest,
                         ::testing::Values("", "bf16", "fp16", "fp8-e4m3", "int8-row", "int8-tensor"));

TEST_F(FollowersTest, WhatChangesAfterTheStepIsNotInItsVersion) {
  Make("bf16");
  const auto reader = Follow();
  Version(0);
  Nudge(0, 1);
  const ServedWeights then = Look();
  ASSERT_TRUE(Close(1));  // and nothing is encoded yet
  for (uint32_t tensor = 0; tensor < 3; ++tensor) ChangeNow(tensor, 9);
  AwaitMade(1);
  EXPECT_EQ(reader->At(1), then);
  const ServedWeights now = Look();
  Version(2);
  EXPECT_EQ(reader->At(2), now);
}

TEST_F(FollowersTest, NothingIsMadeForNobodyOrOfAStepThatIsNotDue) {
  Make("bf16", /*every=*/10);
  EXPECT_FALSE(Close(1));
  const auto reader = Follow();
  Version(1);  // the first reader comes
  EXPECT_FALSE(Close(9));
  Version(11);  // 10 was missed
  EXPECT_FALSE(Close(19));
  Version(5, /*generation=*/2);  // a rewind
  reader->At(5);
  EXPECT_THAT(reader->came, ElementsAre("1", "+11", "+5"));
}

TEST_F(FollowersTest, OfAPartNoVersionIsMadeThatNobodyWantsYet) {
  is_part_ = true;
  Make("bf16");
  const auto first = Follow({.every = 4});
  Version(1);
  first->At(1);
  EXPECT_FALSE(Close(2));
  EXPECT_FALSE(Close(4));
  Version(5);
  first->At(5);
  const auto second = Follow({.every = 1, .have = first->have()}, first->weights());
  EXPECT_FALSE(Close(5));
  Version(6);
  second->At(6);
  EXPECT_THAT(first->came, ElementsAre("1", "+5"));
  Version(2, /*generation=*/2);  // a rewind
  first->At(2);
}

TEST_F(FollowersTest, LittleChangesTakeFewBytesAndNoneNone) {
  Make("bf16");
  const auto reader = Follow();
  ChangeNow(0, 1);
  for (uint32_t tensor = 0; tensor < 3; ++tensor) Nudge(tensor, 0);
  Version(0);
  reader->At(0);
  const uint64_t whole = reader->sent_bytes;
  Nudge(0, 1);
  const ServedWeights now = Look();
  Version(1);
  EXPECT_EQ(reader->At(1), now);
  EXPECT_GT(reader->changed, 900u);
  EXPECT_LT(reader->changed, 1400u);
  EXPECT_LT(reader->sent_bytes * 20, whole);
  Version(2);
  EXPECT_EQ(reader->At(2), now);
  EXPECT_EQ(reader->sent_bytes, 0u);
}

TEST_F(FollowersTest, AReaderThatKnowsItsVersionIsSentWhatHasChangedSince) {
  Make("bf16");
  const auto first = Follow();
  Version(0);
  first->At(0);
  const VersionId had = first->have();
  const ServedWeights had_weights = Look();
  Nudge(1, 1);
  Version(1);
  Nudge(1, 2);
  Version(2);
  first->At(2);

  const auto back = Follow({.have = had}, had_weights);
  EXPECT_EQ(back->At(2), Look());
  EXPECT_THAT(back->came, ElementsAre("+1", "+2"));

  VersionId other = had;
  ++other.epoch;
  std::vector<uint64_t> digests(3);
  const ServedWeights now = Look();
  for (uint32_t i = 0; i < 3; ++i) digests[i] = VersionReader::DigestOf(spec_, now, i) + (i == 1 ? 1 : 0);
  const auto lost = Follow({.have = other, .digests = digests}, had_weights);
  EXPECT_EQ(lost->At(2), now);
  EXPECT_THAT(lost->came, ElementsAre("2"));
  EXPECT_EQ(lost->sent_bytes, 300 * 2u) << "but for the tensors that it has";
}

TEST_F(FollowersTest, AReaderIsNotTakenBackBehindARewindThatItKnowsOf) {
  Make("bf16");
  const auto first = Follow();
  Version(5);
  first->At(5);
  VersionId later = first->have();
  later.generation = 2;
  later.step = 3;
  Nudge(1, 1);
  const auto ahead = Follow({.have = later}, Look());
  Version(6);
  first->At(6);
  Version(3, 2);
  Nudge(1, 2);
  Version(4, 2);
  EXPECT_EQ(ahead->At(4), Look());
  EXPECT_THAT(ahead->came, ElementsAre("+4"));
}

TEST_F(FollowersTest, AReaderThatComesAloneIsSentNoOldVersion) {
  Make("bf16", /*every=*/10);
  const auto first = Follow();
  Version(0);
  first->At(0);
  OnStrand([&] { followers_->OnGone(first.get()); });
  ChangeNow(0, 5);
  EXPECT_FALSE(Close(3)) << "nobody reads";
  const auto second = Follow();
  Version(4);  // though 10 would be the next
  EXPECT_EQ(second->At(4), Look());
  EXPECT_THAT(second->came, ElementsAre("4"));
  OnStrand([&] { followers_->OnGone(second.get()); });
  const auto third = Follow();
  EXPECT_FALSE(Close(4)) << "it is the newest";
  EXPECT_EQ(third->At(4), Look());
}

TEST_F(FollowersTest, WhatNobodyHasReadForLongIsLetGo) {
  Make("bf16");
  const auto reader = Follow();
  Version(0);
  reader->At(0);
  OnStrand([&] {
    followers_->OnGone(reader.get());
    EXPECT_GT(followers_->memory_bytes(), 0u);
    followers_->Tick(MonotonicSeconds() + 1000);
    EXPECT_EQ(followers_->memory_bytes(), 0u);
  });
}

TEST_F(FollowersTest, HowLongAReaderIsBehindIsShown) {
  Make("bf16");
  const auto slow = Follow({}, {}, /*held=*/true), quick = Follow();
  Version(0);
  for (uint64_t step = 1; step <= 3; ++step) {
    ChangeNow(0, step);
    Version(step);
    quick->At(step);
  }
  const auto behind_at = [&](double now_s) {
    OnStrand([&] { followers_->Tick(now_s); });
    absl::MutexLock lock(&mu_);
    return shown_.readers.behind_seconds;
  };
  EXPECT_GE(behind_at(MonotonicSeconds() + 100), 100);
  slow->held = false;
  slow->Sent();
  slow->At(3);
  EXPECT_EQ(behind_at(MonotonicSeconds() + 100), 0);
}

TEST_F(FollowersTest, EachReaderHasItsOwnEvery) {
  Make("bf16");
  const auto all = Follow(), some = Follow({.every = 3});
  ServedWeights at6;
  for (uint64_t step = 0; step <= 7; ++step) {
    Nudge(0, step);
    if (step == 6) at6 = Look();
    Version(step);
    all->At(step);
  }
  EXPECT_EQ(some->At(6), at6);
  EXPECT_THAT(some->came, ElementsAre("0", "+1", "+2", "+3", "+4", "+5", "+6"));
}

TEST_F(FollowersTest, ASlowReaderHoldsNobodyUpAndGetsFewerVersions) {
  Make("bf16");
  const auto slow = Follow({}, {}, /*held=*/true);
  const auto quick = Follow();
  for (uint64_t step = 0; step < 8; ++step) {
    for (uint32_t tensor = 0; tensor < 3; ++tensor) ChangeNow(tensor, step + 10);
    const ServedWeights now = Look();
    Version(step);
    EXPECT_EQ(quick->At(step), now);
  }
  EXPECT_TRUE(slow->came.empty());
  slow->held = false;
  slow->Sent();
  EXPECT_EQ(slow->At(7), Look());
  EXPECT_THAT(slow->came, ElementsAre("0", "7!"));
}

TEST_F(FollowersTest, MemoryIsBoundedAndWhoKeepsItTooLongIsEnded) {
  Make("bf16");
  const uint64_t most = FollowMemoryBytes(spec_, plan_);
  std::vector<std::shared_ptr<VersionReader>> slow;
  uint64_t step = 0;
  const auto quick = Follow();
  for (; step < 3; ++step) {
    for (uint32_t tensor = 0; tensor < 3; ++tensor) ChangeNow(tensor, step + 10);
    Version(step);
    quick->At(step);
    slow.push_back(Follow({}, {}, /*held=*/true));
    OnStrand([&] { EXPECT_LE(followers_->memory_bytes(), most); });
  }
  for (uint32_t tensor = 0; tensor < 3; ++tensor) ChangeNow(tensor, 99);
  EXPECT_FALSE(Close(step)) << "all three are being sent";
  OnStrand([&] { followers_->Tick(MonotonicSeconds()); });
  EXPECT_FALSE(slow[0]->ended());
  OnStrand([&] { followers_->Tick(MonotonicSeconds() + 1000); });
  ASSERT_TRUE(slow[0]->ended());
  EXPECT_THAT(std::string(slow[0]->ended()->message()), HasSubstr("limits.pull_timeout"));
  EXPECT_FALSE(slow[1]->ended()) << "one was enough";
  EXPECT_FALSE(slow[2]->ended()) << "it is sent the newest";
  EXPECT_FALSE(quick->ended());
  const ServedWeights now = Look();
  Version(step);
  EXPECT_EQ(quick->At(step), now);
  OnStrand([&] { EXPECT_LE(followers_->memory_bytes(), most); });
  EXPECT_THAT(metrics_.Serialize(), HasSubstr("ballast_followers_ended_total{run_id=\"r1\"} 1"));
}

TEST_F(FollowersTest, MoreReadersThanTheSpecAllowsAreRefused) {
  Make("bf16", /*every=*/1, /*readers=*/2);
  Follow();
  const auto second = Follow(), third = Follow();
  EXPECT_THAT(std::string(third->ended()->message()), HasSubstr("2 readers follow run 'r1'"));
  EXPECT_EQ(third->ended()->code(), absl::StatusCode::kResourceExhausted);
  OnStrand([&] { followers_->OnGone(second.get()); });
  EXPECT_FALSE(Follow()->ended());
}

TEST_F(FollowersTest, AfterAResetNoVersionIsKnownAnyMore) {
  Make("bf16");
  const auto reader = Follow();
  Version(0);
  reader->At(0);
  OnStrand([&] { followers_->Reset(absl::UnavailableError("replaced")); });
  EXPECT_EQ(reader->ended()->message(), "replaced");
  ChangeNow(0, 5);
  const auto again = Follow({.have = reader->have()});
  Version(0);
  EXPECT_EQ(again->At(0), Look());
  EXPECT_THAT(again->came, ElementsAre("0"));
}

TEST_F(FollowersTest, WhatIsUnderWayMayOutliveThem) {
  Make("bf16");
  const auto reader = Follow();
  ASSERT_TRUE(Close(0));
  Encode();
  OnStrand([&] {
    followers_->End(absl::NotFoundError("deleted"));
    store_->set_before_change(nullptr);
    followers_.reset();
  });
  EXPECT_EQ(reader->ended()->message(), "deleted");
}

}  // namespace
}  // namespace ballast
