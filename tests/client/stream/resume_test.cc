// A lost connection at every message of a step, both ways: the step ends as if nothing had happened, and no chunk that
// the daemon holds is sent again.
#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include "absl/strings/str_cat.h"
#include "absl/time/clock.h"
#include "proto/session_over.h"

#include "tests/client/fake_daemon.h"
#include "tests/client/trainer.h"

namespace ballast {
namespace {

using ::testing::AllOf;
using ::testing::ElementsAre;
using ::testing::HasSubstr;

constexpr uint64_t kSteps = 2;

// put_off: how often, once the stream has been open.
void TrainAndCheck(const FakeOptions& options, int put_off = 0) {
  FakeDaemon daemon(options);
  Trainer trainer(daemon.address());
  ASSERT_TRUE(trainer.Attach().ok());
  for (int i = 0; i < put_off; ++i) daemon.RefuseTrain({{grpc::StatusCode::RESOURCE_EXHAUSTED, "too many calls"}, 1});
  for (uint64_t step = 1; step <= kSteps; ++step) {
    const auto result = trainer.Step();
    ASSERT_TRUE(result.ok()) << result.status();
    ASSERT_EQ(result->result.step(), step);
    for (uint32_t i = 0; i < 4; ++i) ASSERT_EQ(trainer.weights[i], Updated(trainer.Gradient(i, step), step));
  }
  EXPECT_EQ(daemon.seen().duplicates, 0);
}

FakeDaemon::Seen Uncut() {
  FakeDaemon daemon;
  Trainer trainer(daemon.address());
  EXPECT_TRUE(trainer.Attach().ok());
  for (uint64_t step = 1; step <= kSteps; ++step) EXPECT_TRUE(trainer.Step().ok());
  return daemon.seen();
}

TEST(ResumeTest, ACutAtAnyMessageReceivedIsInvisible) {
  const int messages = Uncut().received;
  ASSERT_GT(messages, 20);
  for (int i = 0; i < messages; ++i) {
    SCOPED_TRACE(absl::StrCat("cut at received message ", i));
    TrainAndCheck({.cut_at_received = i});
  }
}

TEST(ResumeTest, ACutAtAnyMessageSentIsInvisible) {
  const int messages = Uncut().sent;
  ASSERT_GT(messages, 20);
  for (int i = 0; i < messages; ++i) {
    SCOPED_TRACE(absl::StrCat("cut at sent message ", i));
    TrainAndCheck({.cut_at_sent = i});
  }
}

TEST(ResumeTest, ACutAfterWhichTheStreamIsPutOffIsInvisible) {
  const int messages = Uncut().received;
  for (int i = 1; i < messages; ++i) {
    SCOPED_TRACE(absl::StrCat("cut at received message ", i));
    TrainAndCheck({.cut_at_received = i}, /*put_off=*/2);
  }
}

TEST(ResumeTest, ACutWithATinyWindowIsInvisible) {
  for (int i = 1; i < 12; ++i) {
    SCOPED_TRACE(absl::StrCat("cut at received message ", i));
    TrainAndCheck({.credit_bytes = 16, .cut_at_received = i, .cut_at_sent = 9});
  }
}

TEST(ResumeTest, LossAndRecoveryAreOneLineEach) {
  FakeDaemon daemon({.cut_at_received = 6});
  Trainer trainer(daemon.address());
  ASSERT_TRUE(trainer.Attach().ok());
  ASSERT_TRUE(trainer.Step().ok());
  EXPECT_THAT(trainer.Lines(),
              ElementsAre(AllOf(HasSubstr("lost the daemon at " + daemon.address()), HasSubstr("connection reset")),
                          HasSubstr("again after")));
}

TEST(ResumeTest, AResumeShowsTheSessionsToken) {
  FakeDaemon daemon({.cut_at_received = 6});
  Trainer trainer(daemon.address());
  ASSERT_TRUE(trainer.Attach().ok());
  ASSERT_TRUE(trainer.Step().ok());
  const auto attaches = daemon.seen().attaches;
  ASSERT_EQ(attaches.size(), 2u);
  EXPECT_EQ(attaches[1].session_token(), "token");
  EXPECT_FALSE(attaches[1].takeover());
}

TEST(ResumeTest, RefusalsThatMayPassAreTriedAgain) {
  FakeDaemon daemon({.cut_at_received = 6});
  Trainer trainer(daemon.address());
  ASSERT_TRUE(trainer.Attach().ok());
  for (int i = 0; i < 3; ++i) daemon.RefuseAttach({grpc::Status(grpc::StatusCode::UNAVAILABLE, "draining")});
  EXPECT_TRUE(trainer.Step().ok());
  EXPECT_EQ(daemon.seen().attaches.size(), 5u);
}

TEST(ResumeTest, AFencedSessionIsNotTriedAgain) {
  FakeDaemon daemon({.cut_at_received = 6});
  Trainer trainer(daemon.address());
  ASSERT_TRUE(trainer.Attach().ok());
  daemon.RefuseAttach({grpc::Status(grpc::StatusCode::ABORTED, "another process took this rank over")});
  const auto result = trainer.Step();
  EXPECT_EQ(result.status(), absl::AbortedError("another process took this rank over"));
  EXPECT_EQ(trainer.client->Push(0, {}).code(), absl::StatusCode::kInvalidArgument);
  EXPECT_EQ(trainer.client->BeginStep({}), result.status());
}

TEST(ResumeTest, ALostDaemonIsNamedWithinTheReconnectTimeout) {
  FakeDaemon daemon;
  Trainer trainer(daemon.address(), /*reconnect_timeout_s=*/1);
  ASSERT_TRUE(trainer.Attach().ok());
  ASSERT_TRUE(trainer.client->BeginStep({}).ok());
  ASSERT_TRUE(trainer.Push(0).ok());
  daemon.AwaitReceived(4);
  daemon.Shutdown();
  const absl::Time began = absl::Now();
  const auto result = trainer.client->EndStep({}).get();
  EXPECT_LT(absl::Now() - began, absl::Seconds(20)) << "1 s, and what a busy machine adds";
  EXPECT_EQ(result.status().code(), absl::StatusCode::kUnavailable);
  EXPECT_THAT(std::string(result.status().message()),
              AllOf(HasSubstr(daemon.address()), HasSubstr("step 1"), HasSubstr("within 1 s (connection refused)")));
  EXPECT_EQ(trainer.client->BeginStep({}), result.status());
  EXPECT_EQ(trainer.client->EndStep({}).get().status(), result.status());
}

TEST(ResumeTest, ADaemonThatStartedAnewIsSaidToBeSo) {
  FakeDaemon daemon;
  Trainer trainer(daemon.address());
  ASSERT_TRUE(trainer.Attach().ok());
  daemon.ForgetRun();
  const auto result = trainer.Step();
  EXPECT_EQ(result.status().code(), absl::StatusCode::kNotFound);
  EXPECT_THAT(std::string(result.status().message()),
              AllOf(HasSubstr("restarted and no longer holds run 'r'"), HasSubstr("in memory only")));
}

// While this rank was away, steps may have closed for the other ranks.
TEST(ResumeTest, ADaemonThatIsStepsAheadIsFollowed) {
  FakeDaemon daemon;
  Trainer trainer(daemon.address());
  ASSERT_TRUE(trainer.Attach().ok());
  ASSERT_TRUE(trainer.client->BeginStep({}).ok());
  ASSERT_TRUE(trainer.Push(1).ok());
  daemon.AwaitReceived(4);
  daemon.SetStep(9);
  daemon.CutNow();
  const auto result = trainer.client->EndStep({}).get();
  ASSERT_TRUE(result.ok()) << result.status();
  EXPECT_EQ(result->result.step(), 1u);
  EXPECT_EQ(result->result.outcome(), v1::STEP_OUTCOME_ABORTED);
  EXPECT_EQ(trainer.client->step(), 9u);
  EXPECT_THAT(trainer.Lines().back(), HasSubstr("steps 1 to 8 closed meanwhile"));
  const auto next = trainer.Step();
  ASSERT_TRUE(next.ok()) << next.status();
  EXPECT_EQ(next->result.step(), 9u);
  EXPECT_EQ(trainer.weights[0], Updated(trainer.Gradient(0, 9), 9));
}

TEST(ResumeTest, ADaemonThatIsAStepBehindIsNotFollowed) {
  FakeDaemon daemon;
  Trainer trainer(daemon.address());
  ASSERT_TRUE(trainer.Attach().ok());
  ASSERT_TRUE(trainer.Step().ok());
  ASSERT_TRUE(trainer.client->BeginStep({}).ok());
  daemon.SetBack(1);
  daemon.CutNow();
  const auto result = trainer.client->EndStep({}).get();
  EXPECT_EQ(result.status().code(), absl::StatusCode::kFailedPrecondition);
  EXPECT_THAT(std::string(result.status().message()), HasSubstr("step 2 is open here, but the daemon is at step 1"));
}

// The step closed so long ago that the daemon no longer keeps its result.
TEST(ResumeTest, AStepWhoseResultIsGoneIsNotAwaited) {
  FakeDaemon daemon;
  Trainer trainer(daemon.address());
  ASSERT_TRUE(trainer.Attach().ok());
  ASSERT_TRUE(trainer.client->BeginStep({}).ok());
  daemon.SetStep(9);
  daemon.ForgetMissed();
  daemon.CutNow();
  const auto result = trainer.client->EndStep({}).get();
  EXPECT_EQ(result.status().code(), absl::StatusCode::kUnavailable);
  EXPECT_THAT(std::string(result.status().message()), HasSubstr("keeps no result of step 1"));
}

TEST(ResumeTest, ARankThatWasAwayForTooLongIsToldToStartAnew) {
  FakeDaemon daemon({.cut_at_received = 6});
  Trainer trainer(daemon.address());
  ASSERT_TRUE(trainer.Attach().ok());
  const absl::Status over = SessionOverError();
  daemon.RefuseAttach({grpc::Status(static_cast<grpc::StatusCode>(over.code()), std::string(over.message()))});
  const auto result = trainer.Step();
  EXPECT_EQ(result.status().code(), absl::StatusCode::kUnavailable);
  EXPECT_THAT(std::string(result.status().message()),
              AllOf(HasSubstr("rank 0 of run 'r' was away from the daemon at " + daemon.address()),
                    HasSubstr("rank_timeout"), HasSubstr("start this trainer again")));
  EXPECT_EQ(trainer.client->BeginStep({}), result.status());
}

TEST(ResumeTest, ALossBetweenStepsAcknowledgesTheWeightsOfTheLastOne) {
  FakeDaemon daemon;
  Trainer trainer(daemon.address());
  ASSERT_TRUE(trainer.Attach().ok());
  ASSERT_TRUE(trainer.Step().ok());
  const int received = daemon.seen().received;
  daemon.CutNow();
  daemon.AwaitReceived(received + 1);
  const v1::Open open = daemon.seen().requests.back().open();
  EXPECT_EQ(open.weights_step(), 1u);
  EXPECT_EQ(open.weights_received(), std::string(1, 0b1111));
  ASSERT_TRUE(trainer.Step().ok());
  EXPECT_EQ(trainer.weights[0], Updated(trainer.Gradient(0, 2), 2));
}

TEST(ResumeTest, ALossWhileIdleFailsTheNextCall) {
  FakeDaemon daemon;
  Trainer trainer(daemon.address(), /*reconnect_timeout_s=*/0);
  ASSERT_TRUE(trainer.Attach().ok());
  daemon.CutNow();
  const auto result = trainer.Step();  // before or after the loss is seen
  EXPECT_EQ(result.status().code(), absl::StatusCode::kUnavailable);
  EXPECT_THAT(std::string(result.status().message()), HasSubstr(daemon.address()));
}

TEST(ResumeTest, AnOpenThatIsNeverAnsweredIsGivenUp) {
  FakeDaemon daemon({.answers_open = false});
  Trainer trainer(daemon.address(), /*reconnect_timeout_s=*/0.05, /*connect_timeout_s=*/1);
  EXPECT_EQ(trainer.Attach().code(), absl::StatusCode::kUnavailable);
}

TEST(ResumeTest, ClosingWhileTheDaemonIsAwayDoesNotWaitForIt) {
  FakeDaemon daemon;
  Trainer trainer(daemon.address(), /*reconnect_timeout_s=*/60);
  ASSERT_TRUE(trainer.Attach().ok());
  ASSERT_TRUE(trainer.client->BeginStep({}).ok());
  daemon.Shutdown();
  const absl::Time began = absl::Now();
  trainer.client.reset();
  EXPECT_LT(absl::Now() - began, absl::Seconds(30)) << "half of what it would wait for";
}

}  // namespace
}  // namespace ballast
