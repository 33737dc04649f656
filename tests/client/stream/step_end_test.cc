// What travels with a step's end, and how it comes back.
#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include "tests/client/fake_daemon.h"
#include "tests/client/trainer.h"

namespace ballast {
namespace {

using ::testing::ElementsAre;
using ::testing::HasSubstr;

TEST(StepEndTest, StateTravelsWithTheStepsEndAndBackToWhoAttachesNext) {
  FakeOptions options;
  options.spec.set_commit(v1::COMMIT_MODE_STAGED);
  FakeDaemon daemon(options);
  const std::string state("\0epoch 3\xff", 9);
  {
    Trainer trainer(daemon.address());
    ASSERT_TRUE(trainer.Attach().ok());
    EXPECT_EQ(trainer.attachment->client_state, "");
    ASSERT_TRUE(trainer.client->BeginStep({}).ok());
    ASSERT_TRUE(trainer.client->EndStep(std::nullopt, {.client_state = state, .groups = {{.lr = 0.25}}}).get().ok());
  }
  ASSERT_EQ(daemon.seen().ends.size(), 1u);
  EXPECT_EQ(daemon.seen().ends[0].groups(0).lr(), 0.25);
  Trainer next(daemon.address());
  ASSERT_TRUE(next.Attach().ok());
  EXPECT_EQ(next.attachment->client_state, state);
  EXPECT_EQ(next.attachment->client_state_step, 1u);
}

TEST(StepEndTest, AnEndThatIsTooLargeIsRefusedAndTheStepGoesOn) {
  FakeDaemon daemon;
  Trainer trainer(daemon.address());
  ASSERT_TRUE(trainer.Attach().ok());
  ASSERT_TRUE(trainer.client->BeginStep({}).ok());
  const auto large = trainer.client->EndStep({}, {.client_state = std::string(kMostClientStateBytes + 1, 'x')}).get();
  EXPECT_EQ(large.status().code(), absl::StatusCode::kInvalidArgument);
  EXPECT_THAT(std::string(large.status().message()), HasSubstr("1048577 bytes, at most 1048576"));
  const auto many = trainer.client->EndStep({}, {.groups = {{}, {}}}).get();
  EXPECT_EQ(many.status(), absl::InvalidArgumentError("EndStep: got values of 2 groups, the run has 1"));
  EXPECT_TRUE(trainer.client->EndStep({}).get().ok());
}

// The daemon would end the session for them.
TEST(StepEndTest, ValuesThatNoDaemonTakesAreRefusedAndTheStepIsMadeAnyway) {
  FakeDaemon daemon;
  Trainer trainer(daemon.address());
  ASSERT_TRUE(trainer.Attach().ok());
  for (const StepValues& values :
       {StepValues{.groups = {{.lr = -1}}}, StepValues{.loss_scale = 0}, StepValues{.micro_batches = 2}}) {
    EXPECT_EQ(trainer.client->BeginStep(values).code(), absl::StatusCode::kInvalidArgument);
  }
  ASSERT_TRUE(trainer.client->BeginStep({}).ok());
  const auto late = trainer.client->EndStep({}, {.groups = {{.lr = 0.1}}}).get();
  EXPECT_EQ(late.status().code(), absl::StatusCode::kFailedPrecondition);
  EXPECT_TRUE(trainer.client->EndStep({}).get().ok());
  EXPECT_EQ(daemon.seen().attaches.size(), 1u);
}

// The daemon may not have heard of the step, and would begin an upload that leaves the run without weights.
TEST(StepEndTest, WeightsAndSpecAreNotReplacedWhileAStepIsOpen) {
  FakeDaemon daemon;
  Trainer trainer(daemon.address());
  ASSERT_TRUE(trainer.Attach().ok());
  ASSERT_TRUE(trainer.client->BeginStep({}).ok());
  for (const absl::Status& refused :
       {trainer.client->LoadWeights({}).status(), trainer.client->LoadWeights({}, /*replace=*/true).status(),
        trainer.client->AmendRun(FakeSpec()).status()}) {
    EXPECT_EQ(refused.code(), absl::StatusCode::kFailedPrecondition);
    EXPECT_THAT(std::string(refused.message()), HasSubstr(" while step 1 is open: call EndStep first"));
  }
  EXPECT_TRUE(trainer.client->EndStep({}).get().ok());
}

// They may come of what other ranks have pushed.
TEST(StepEndTest, WeightsThatMayBeOnTheirWayAreNotBoundElsewhere) {
  FakeDaemon daemon({.answers_step_end = false});
  Trainer trainer(daemon.address());
  ASSERT_TRUE(trainer.Attach().ok());
  ASSERT_TRUE(trainer.client->BeginStep({}).ok());
  ASSERT_TRUE(trainer.client->BindWeights(2, nullptr, 0).ok());
  const auto result = trainer.client->EndStep({});
  EXPECT_EQ(trainer.client->BindWeights(2, nullptr, 0).code(), absl::StatusCode::kFailedPrecondition);
}

// It would apply what is to be discarded.
TEST(StepEndTest, ADaemonThatKnowsNoMeasureIsNotAskedForOne) {
  FakeOptions options;
  options.spec.set_commit(v1::COMMIT_MODE_STAGED);
  FakeDaemon daemon(options);
  Trainer trainer(daemon.address());
  ASSERT_TRUE(trainer.Attach(options.spec).ok());
  const absl::Status open_ended = trainer.client->BeginStep({.micro_batches = 0});
  ASSERT_TRUE(trainer.client->BeginStep({}).ok());
  for (const absl::Status& refused : {open_ended, trainer.client->MeasureStep({}).get().status(),
                                      trainer.client->EndStep({}, {.max_grad_norm = 1}).get().status(),
                                      trainer.client->EndStep({}, {.discard = true}).get().status()}) {
    EXPECT_EQ(refused.code(), absl::StatusCode::kUnimplemented);
    EXPECT_THAT(std::string(refused.message()), HasSubstr("older than this client"));
  }
  EXPECT_TRUE(trainer.client->EndStep({}).get().ok());
}

TEST(StepEndTest, WeightsAreAwaitedTensorByTensor) {
  FakeDaemon daemon({.answers_step_end = false});
  Trainer trainer(daemon.address());
  ASSERT_TRUE(trainer.Attach().ok());
  EXPECT_EQ(trainer.client->AwaitWeights(1, 0).value(), true);  // no step is open
  ASSERT_TRUE(trainer.client->BeginStep({}).ok());
  ASSERT_TRUE(trainer.Push(1).ok());
  EXPECT_EQ(trainer.client->AwaitWeights(1, 0).status().code(), absl::StatusCode::kFailedPrecondition);
  const auto result = trainer.client->EndStep({});
  EXPECT_EQ(trainer.client->AwaitWeights(1, 10).value(), true);
  EXPECT_EQ(trainer.weights[1], Updated(trainer.Gradient(1, 1), 1));
  EXPECT_EQ(trainer.client->AwaitWeights(0, 0).value(), false);  // it gets none; the step is not closed
  EXPECT_EQ(trainer.client->AwaitWeights(4, 0).status().code(), absl::StatusCode::kInvalidArgument);
}

TEST(StepEndTest, ASkippedStepLeavesTheWeightsAndTheNextOneGoesOn) {
  FakeOptions options;
  options.result.set_outcome(v1::STEP_OUTCOME_SKIPPED);
  options.result.set_reason("overflow");
  FakeDaemon daemon(options);
  Trainer trainer(daemon.address());
  ASSERT_TRUE(trainer.Attach().ok());
  for (uint64_t step = 1; step <= 2; ++step) {
    const auto result = trainer.Step();
    ASSERT_TRUE(result.ok()) << result.status();
    EXPECT_EQ(result->result.step(), step);
    EXPECT_EQ(result->result.outcome(), v1::STEP_OUTCOME_SKIPPED);
    EXPECT_EQ(result->result.reason(), "overflow");
    EXPECT_THAT(result->received, ElementsAre());
  }
  EXPECT_EQ(trainer.weights[0], std::string(40, '?'));
}

}  // namespace
}  // namespace ballast
