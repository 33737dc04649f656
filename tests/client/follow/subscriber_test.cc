// A reader that keeps up with a run: what it is told of versions, and what it may read of them when.
#include "client/cpp/follow/subscriber.h"

#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include <cstring>
#include <thread>

#include "tests/client/fake_daemon.h"
#include "tests/client/follow/reader.h"

namespace ballast {
namespace {

using ::testing::AllOf;
using ::testing::ElementsAre;
using ::testing::HasSubstr;
using ::testing::IsEmpty;

absl::Status OpenFailure(const std::string& server, const std::string& run = "r") {
  return Subscriber::Open({.server = server, .log = [](const std::string&) {}}, {.run_id = run}).status();
}

TEST(SubscriberTest, TheNewestVersionComesWhole) {
  FakeFollowService daemon;
  Reader reader(daemon.address(), 10, /*every=*/3);
  const FollowedRun first(kFollowedSpec, 7);
  daemon.Say(first.Whole());
  const FollowedVersion version = reader.Next();
  EXPECT_EQ(version.step, 7u);
  EXPECT_EQ(version.generation, 1u);
  EXPECT_FALSE(version.base_step);
  EXPECT_THAT(version.changed, ElementsAre(0, 1, 2, 3, 4, 5));
  EXPECT_EQ(version.elements, 10u + 4 + 1 + 6 + 15 + 7);
  EXPECT_EQ(version.changed_elements, version.elements);
  EXPECT_EQ(version.whole_bytes, 40u + 16 + 4 + 12 + 15 + 3 * 4 + 14);
  EXPECT_EQ(version.closed_unix_s, 1e9 + 7);
  EXPECT_GT(version.StalenessSeconds(), 1e8);
  reader.Expect(first);
  const v1::SubscribeRequest asked = daemon.AwaitRequests(1)[0];
  EXPECT_EQ(asked.every(), 3u);
  EXPECT_FALSE(asked.has_have());
  EXPECT_THAT(asked.digests(), IsEmpty());
}

TEST(SubscriberTest, ChangesMakeTheNextVersion) {
  FakeFollowService daemon;
  Reader reader(daemon.address());
  const FollowedRun first(kFollowedSpec, 1);
  FollowedRun second = first;
  second.step = 2;
  second.codes[0][9] = 'x';
  second.codes[3][11] = 'y';
  second.scales[4][1] = 0.25f;  // of a row that two chunks share, and no code
  daemon.Say(first.Whole());
  VersionParts changes = second.ChangesOf(first);
  changes[0].mutable_begin()->set_skipped(5);
  daemon.Say(changes);
  reader.Next();
  const FollowedVersion version = reader.Next();
  EXPECT_EQ(version.step, 2u);
  EXPECT_EQ(version.base_step, 1u);
  EXPECT_THAT(version.changed, ElementsAre(0, 3, 4));
  EXPECT_EQ(version.changed_elements, 2u);
  EXPECT_EQ(version.received_bytes, changes[0].begin().bytes());
  EXPECT_LT(version.received_bytes, version.whole_bytes);
  EXPECT_EQ(version.skipped, 5u);
  reader.Expect(second);
}

TEST(SubscriberTest, VersionsOnTheWayToOneThatIsWantedAreCountedWithIt) {
  FakeFollowService daemon;
  Reader reader(daemon.address(), 10, /*every=*/3);
  std::vector<FollowedRun> runs = {FollowedRun(kFollowedSpec, 1)};
  daemon.Say(runs[0].Whole());
  EXPECT_EQ(reader.Next().step, 1u);
  uint64_t bytes = 0;
  for (uint64_t step = 2; step <= 4; ++step) {
    runs.push_back(runs.back());
    runs.back().step = step;
    runs.back().codes[0][step] = 'x';
    const VersionParts changes = runs.back().ChangesOf(runs[runs.size() - 2]);
    bytes += changes[0].begin().bytes();
    daemon.Say(changes);
  }
  const FollowedVersion version = reader.Next();
  EXPECT_EQ(version.step, 4u);
  EXPECT_EQ(version.base_step, 1u);
  EXPECT_EQ(version.changed_elements, 3u);
  EXPECT_EQ(version.received_bytes, bytes);
  EXPECT_THAT(version.changed, ElementsAre(0));
  reader.Expect(runs.back());
}

TEST(SubscriberTest, AVersionOnTheWayLeavesTheWeightsAndTheTimeoutAsTheyAre) {
  FakeFollowService daemon;
  Reader reader(daemon.address(), 10, /*every=*/3);
  const FollowedRun first(kFollowedSpec, 1), second = first.Next(), third = second.Next(), fourth = third.Next();
  daemon.Say(first.Whole());
  EXPECT_EQ(reader.Next().step, 1u);
  daemon.Say(second.ChangesOf(first));
  daemon.AwaitSaid();
  const auto none = reader.subscriber->Next(0.2);
  ASSERT_TRUE(none.ok()) << none.status();
  EXPECT_FALSE(none->has_value());
  reader.Expect(first);
  daemon.Cut();
  const v1::SubscribeRequest again = daemon.AwaitRequests(2)[1];
  EXPECT_EQ(again.have().step(), 1u) << "what was on the way is dropped";
  daemon.Say(second.ChangesOf(first));
  daemon.Say(third.ChangesOf(second));
  daemon.Say(fourth.ChangesOf(third));
  EXPECT_EQ(reader.Next().step, 4u);
  reader.Expect(fourth);
}

TEST(SubscriberTest, TensorsAreReadInTheirDtype) {
  FakeFollowService daemon;
  Reader reader(daemon.address());
  FollowedRun run(kFollowedSpec, 1);
  run.codes[4].assign(15, '\x7f');  // the code 127 stands for its row's scale
  const uint16_t three = 0x4040;
  std::memcpy(run.codes[5].data(), &three, 2);
  daemon.Say(run.Whole());
  reader.Next();
  std::vector<float> e(15), f(7);
  ASSERT_TRUE(reader.subscriber->Read(4, absl::MakeSpan(reinterpret_cast<std::byte*>(e.data()), 60)).ok());
  EXPECT_THAT(std::vector<float>({e[0], e[4], e[5], e[14]}), ElementsAre(1, 1, 2, 3));
  ASSERT_TRUE(reader.subscriber->Read(5, absl::MakeSpan(reinterpret_cast<std::byte*>(f.data()), 28)).ok());
  EXPECT_EQ(f[0], 3);
  std::string d(12, '\0');
  ASSERT_TRUE(reader.subscriber->Read(3, absl::MakeSpan(reinterpret_cast<std::byte*>(d.data()), 12)).ok());
  EXPECT_EQ(d, run.codes[3]);
  const absl::Status small = reader.subscriber->Read(4, absl::MakeSpan(reinterpret_cast<std::byte*>(e.data()), 15));
  EXPECT_EQ(small.code(), absl::StatusCode::kInvalidArgument);
  EXPECT_THAT(std::string(small.message()), HasSubstr("tensor 4 'e': got room for 15 bytes, wanted 60 (fp32)"));
  EXPECT_EQ(reader.subscriber->Served(6).status().code(), absl::StatusCode::kInvalidArgument);
}

TEST(SubscriberTest, NothingIsReadBeforeTheFirstVersion) {
  FakeFollowService daemon;
  Reader reader(daemon.address());
  daemon.AwaitRequests(1);
  const absl::Status none = reader.subscriber->Served(0).status();
  EXPECT_EQ(none.code(), absl::StatusCode::kFailedPrecondition);
  EXPECT_THAT(std::string(none.message()), HasSubstr("no version of run 'r' is here"));
  const auto nothing = reader.subscriber->Next(0);
  ASSERT_TRUE(nothing.ok());
  EXPECT_FALSE(nothing->has_value());
  EXPECT_FALSE(reader.subscriber->Await(0));
}

TEST(SubscriberTest, ChangesAreWrittenWithinNextAlone) {
  FakeFollowService daemon;
  Reader reader(daemon.address());
  const FollowedRun first(kFollowedSpec, 1), second(kFollowedSpec, 2);
  daemon.Say(first.Whole());
  reader.Next();
  daemon.Say(second.ChangesOf(first));
  EXPECT_TRUE(reader.subscriber->Await(kLongS));
  reader.Expect(first);
  const auto version = reader.subscriber->Next(0);  // all is here
  ASSERT_TRUE(version.ok() && *version) << version.status();
  EXPECT_EQ((*version)->step, 2u);
  reader.Expect(second);
}

TEST(SubscriberTest, AVersionThatComesWholeWaitsForNext) {
  FakeFollowService daemon;
  Reader reader(daemon.address());
  const FollowedRun first(kFollowedSpec, 1), second(kFollowedSpec, 2);
  daemon.Say(first.Whole());
  reader.Next();
  VersionParts whole = second.Whole();
  const v1::VersionPart end = whole.back();
  whole.pop_back();
  daemon.Say(whole);
  EXPECT_TRUE(reader.subscriber->Await(kLongS));
  reader.Expect(first);
  const auto none = reader.subscriber->Next(0);
  ASSERT_TRUE(none.ok());
  EXPECT_FALSE(none->has_value());
  EXPECT_EQ(reader.subscriber->Served(0).status().code(), absl::StatusCode::kFailedPrecondition) << "of two versions";
  daemon.Say({end});
  EXPECT_EQ(reader.Next().step, 2u);
  reader.Expect(second);
}

TEST(SubscriberTest, ARewindIsAVersionOfAnEarlierStep) {
  FakeFollowService daemon;
  Reader reader(daemon.address());
  const FollowedRun first(kFollowedSpec, 9);
  FollowedRun rewound(kFollowedSpec, 4), next(kFollowedSpec, 5);
  rewound.generation = next.generation = 2;
  daemon.Say(first.Whole());
  daemon.Say(rewound.ChangesOf(first));
  daemon.Say(next.Whole());
  reader.Next();
  const FollowedVersion back = reader.Next();
  EXPECT_EQ(back.step, 4u);
  EXPECT_EQ(back.generation, 2u);
  EXPECT_EQ(back.base_step, 9u);
  reader.Expect(rewound);
  const FollowedVersion whole = reader.Next();
  EXPECT_FALSE(whole.base_step);
  reader.Expect(next);
}

TEST(SubscriberTest, ManySmallTensorsComeInBatches) {
  v1::RunSpec spec;
  spec.set_run_id("r");
  spec.mutable_follow();
  spec.add_groups()->set_rule("adamw");
  for (int i = 0; i < 20'000; ++i) {
    v1::TensorSpec* tensor = spec.add_tensors();
    tensor->set_name("t" + std::to_string(i));
    tensor->set_dtype("bf16");
    tensor->add_shape(2);
  }
  FakeFollowService daemon(spec);
  Reader reader(daemon.address());
  const FollowedRun first(spec, 1), second(spec, 2);
  daemon.Say(Batched(first.Whole()));
  daemon.Say(Batched(second.ChangesOf(first)));
  EXPECT_EQ(reader.Next().changed.size(), 20'000u);
  EXPECT_EQ(reader.Next().step, 2u);
  reader.Expect(second);
}

TEST(SubscriberTest, CloseEndsNextAtOnce) {
  FakeFollowService daemon;
  Reader reader(daemon.address());
  daemon.AwaitRequests(1);
  std::thread closer([&] { reader.subscriber->Close(); });
  EXPECT_EQ(reader.Failure().code(), absl::StatusCode::kCancelled);
  closer.join();
  EXPECT_TRUE(reader.subscriber->Await(kLongS));
}

TEST(SubscriberTest, ADeletedRunIsNamed) {
  FakeFollowService daemon;
  Reader reader(daemon.address());
  daemon.Say(FollowedRun(kFollowedSpec, 1).Whole());
  daemon.Delete();
  EXPECT_EQ(reader.Next().step, 1u) << "what had come before";
  const absl::Status gone = reader.Failure();
  EXPECT_EQ(gone.code(), absl::StatusCode::kNotFound);
  EXPECT_THAT(std::string(gone.message()),
              AllOf(HasSubstr("following run 'r': the daemon at " + daemon.address() + " no longer has it"),
                    HasSubstr("run 'r' was deleted")));
  EXPECT_EQ(reader.Failure(), gone) << "again";
  reader.Expect(FollowedRun(kFollowedSpec, 1));
}

TEST(SubscriberTest, WhatCannotBeFollowedIsRefusedByName) {
  FakeFollowService daemon(FakeSpec());
  const absl::Status missing = OpenFailure(daemon.address(), "other");
  EXPECT_EQ(missing.code(), absl::StatusCode::kNotFound);
  EXPECT_THAT(std::string(missing.message()), HasSubstr("no run 'other'"));
  daemon.End({grpc::StatusCode::FAILED_PRECONDITION, "no follow"});
  const absl::Status unfollowed = OpenFailure(daemon.address());
  EXPECT_EQ(unfollowed.code(), absl::StatusCode::kFailedPrecondition);
  EXPECT_THAT(std::string(unfollowed.message()),
              AllOf(HasSubstr("run 'r'"), HasSubstr("create the run with follow, or amend it")));
}

TEST(SubscriberTest, AnOlderDaemonIsNamed) {
  FakeDaemon older;  // it knows neither the field nor the call
  FakeDaemon without(FakeOptions{.spec = FollowedSpec()});
  Reader reader(without.address());
  for (const absl::Status& status : {OpenFailure(older.address()), reader.Failure()}) {
    EXPECT_EQ(status.code(), absl::StatusCode::kUnimplemented) << status;
    EXPECT_THAT(std::string(status.message()), HasSubstr("is older than this client"));
  }
}

}  // namespace
}  // namespace ballast
