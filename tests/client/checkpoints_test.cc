// What the client asks of checkpoints, and what it makes of answers that are lost.
#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include "client/cpp/client.h"
#include "tests/client/fake_daemon.h"
#include "tests/client/quiet_client.h"
#include "tests/client/trainer.h"

namespace ballast {
namespace {

using ::testing::AllOf;
using ::testing::ElementsAre;
using ::testing::HasSubstr;
using ::testing::Not;

FakeOptions WithStorage() {
  FakeOptions options{.has_storage = true};
  v1::StoredCheckpoint& stored = options.stored.emplace_back();
  stored.set_number(7);
  stored.set_step(120);
  stored.set_state("newest");
  return options;
}

std::unique_ptr<Client> Open(const FakeDaemon& daemon) { return QuietClient(daemon.address()); }

TEST(CheckpointsTest, ACheckpointIsOfTheLastStep) {
  FakeDaemon daemon(WithStorage());
  Trainer trainer(daemon.address());
  ASSERT_TRUE(trainer.Attach().ok());
  ASSERT_TRUE(trainer.Step().ok());
  const auto written = trainer.client->Checkpoint("r");
  ASSERT_TRUE(written.ok()) << written.status();
  EXPECT_EQ(written->step(), 1u);
  EXPECT_EQ(written->number(), 8u);
  EXPECT_EQ(daemon.seen().checkpoints, 1);
  EXPECT_TRUE(trainer.Step().ok()) << "the session goes on";
}

TEST(CheckpointsTest, AnAnswerThatIsLostIsAskedForAgain) {
  FakeOptions options = WithStorage();
  options.cut_at_moment = 1;  // the answer is about to go out
  FakeDaemon daemon(options);
  const auto written = Open(daemon)->Checkpoint("r");
  ASSERT_TRUE(written.ok()) << written.status();
  EXPECT_EQ(daemon.seen().checkpoints, 2);
}

// A second one would undo the steps that were made since the first.
TEST(CheckpointsTest, ARestoreWhoseAnswerIsLostIsNotMadeTwice) {
  FakeOptions options = WithStorage();
  options.cut_at_moment = 1;
  FakeDaemon daemon(options);
  EXPECT_EQ(Open(daemon)->Restore("r", 120).status().code(), absl::StatusCode::kUnavailable);
  EXPECT_THAT(daemon.seen().restores, ElementsAre(120u));
}

TEST(CheckpointsTest, TheyAreListedAndRestored) {
  FakeDaemon daemon(WithStorage());
  const auto client = Open(daemon);
  const auto listed = client->ListCheckpoints("r");
  ASSERT_TRUE(listed.ok()) << listed.status();
  ASSERT_EQ(listed->checkpoints_size(), 1);
  EXPECT_EQ(listed->checkpoints(0).state(), "newest");
  const auto restored = client->Restore("r", 120);
  ASSERT_TRUE(restored.ok()) << restored.status();
  EXPECT_EQ(restored->step(), 120u);
  EXPECT_EQ(restored->generation(), 2u);
}

TEST(CheckpointsTest, ADeletedRunsCheckpointsStayWhereThatIsAskedFor) {
  FakeDaemon daemon(WithStorage());
  const auto client = Open(daemon);
  ASSERT_TRUE(client->DeleteRun("r", false).ok());
  ASSERT_TRUE(client->DeleteRun("r", true, true).ok());
  const auto deletions = daemon.seen().deletions;
  ASSERT_EQ(deletions.size(), 2u);
  EXPECT_FALSE(deletions[0].keep_checkpoints());
  EXPECT_TRUE(deletions[1].force());
  EXPECT_TRUE(deletions[1].keep_checkpoints());
}

TEST(CheckpointsTest, ARefusalIsPassedOn) {
  FakeDaemon daemon;
  const auto client = Open(daemon);
  for (const absl::Status& refused :
       {client->Checkpoint("r").status(), client->ListCheckpoints("r").status(), client->Restore("r", 120).status()}) {
    EXPECT_EQ(refused.code(), absl::StatusCode::kFailedPrecondition);
    EXPECT_THAT(std::string(refused.message()), HasSubstr("no storage"));
  }
  for (const char* none : {"other", ""}) {
    const absl::Status missing = client->Checkpoint(none).status();
    EXPECT_EQ(missing.code(), absl::StatusCode::kNotFound);
    EXPECT_THAT(std::string(missing.message()), Not(HasSubstr("restarted")));
  }
}

TEST(CheckpointsTest, ARunThatWasReadBackFromTheDiskIsFollowedAsARewind) {
  FakeDaemon daemon;
  Trainer trainer(daemon.address());
  ASSERT_TRUE(trainer.Attach().ok());
  ASSERT_TRUE(trainer.Step().ok());
  daemon.ReadRunBack(120);
  const absl::Status told = trainer.Step().status();
  EXPECT_EQ(RewoundTo(told), 120u) << told;
  EXPECT_THAT(std::string(told.message()), HasSubstr("restarted and read run 'r' back from its disk"));
  ASSERT_TRUE(trainer.Attach().ok());
  const auto next = trainer.Step();
  ASSERT_TRUE(next.ok()) << next.status();
  EXPECT_EQ(next->result.step(), 121u);
}

TEST(CheckpointsTest, ADaemonThatIsRestartedBetweenAttachAndTheStreamHasRewoundTheRun) {
  FakeDaemon daemon;
  Trainer trainer(daemon.address());
  daemon.RestartAtTrain(120);
  const absl::Status told = trainer.Attach();
  EXPECT_EQ(RewoundTo(told), 120u) << told;
  ASSERT_TRUE(trainer.Attach().ok());
  EXPECT_TRUE(trainer.Step().ok());
}

// A daemon that is killed again as it comes back, by whoever restarts it too, has neither lost the run nor kept it.
TEST(CheckpointsTest, ADaemonThatIsGoneAgainBeforeItCanTellIsAskedAgain) {
  const FakeDaemon::Refusal gone{{grpc::StatusCode::UNAVAILABLE, "Connection reset by the test"}};
  for (const auto ask : {&FakeDaemon::RefuseGetServer, &FakeDaemon::RefuseListRuns}) {
    FakeDaemon daemon;
    Trainer trainer(daemon.address());
    ASSERT_TRUE(trainer.Attach().ok());
    daemon.ReadRunBack(120);
    (daemon.*ask)(gone);
    const absl::Status told = trainer.Step().status();
    EXPECT_EQ(RewoundTo(told), 120u) << told;
  }
}

TEST(CheckpointsTest, ACallToADaemonThatIsGoneAgainBeforeItCanTellIsUnavailable) {
  const FakeDaemon::Refusal gone{{grpc::StatusCode::UNAVAILABLE, "Connection reset by the test"}};
  for (const auto ask : {&FakeDaemon::RefuseGetServer, &FakeDaemon::RefuseListRuns}) {
    FakeDaemon daemon;
    Trainer trainer(daemon.address());
    ASSERT_TRUE(trainer.Attach().ok());
    daemon.ForgetRun();
    daemon.RefusePull({{grpc::StatusCode::NOT_FOUND, "no run 'r'"}});
    (daemon.*ask)(gone);
    const absl::Status told = trainer.client->Pull("r", {}, [](auto...) { return absl::OkStatus(); });
    EXPECT_EQ(told.code(), absl::StatusCode::kUnavailable) << told;
  }
}

TEST(CheckpointsTest, AnotherRunOfThatNameIsNotFollowed) {
  FakeDaemon daemon;
  Trainer trainer(daemon.address());
  ASSERT_TRUE(trainer.Attach().ok());
  daemon.ReadRunBack(120, /*restored=*/"");
  const absl::Status told = trainer.Step().status();
  EXPECT_EQ(told.code(), absl::StatusCode::kNotFound);
  EXPECT_THAT(std::string(told.message()), HasSubstr("restarted and no longer holds run 'r'"));
}

}  // namespace
}  // namespace ballast
