#include "client/cpp/client.h"

#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include "proto/checksum.h"

#include "tests/client/fake_daemon.h"
#include "tests/client/trainer.h"

namespace ballast {
namespace {

using ::testing::ElementsAre;
using ::testing::HasSubstr;

std::string Kind(const v1::TrainRequest& request) {
  if (!request.has_gradient()) return request.GetDescriptor()->FindFieldByNumber(request.message_case())->name();
  return absl::StrCat(request.gradient().tensor(), ".", request.gradient().chunk());
}

std::vector<std::string> Kinds(const FakeDaemon::Seen& seen) {
  std::vector<std::string> kinds;
  for (const v1::TrainRequest& request : seen.requests) kinds.push_back(Kind(request));
  return kinds;
}

TEST(ClientTest, AStepIsSentInChunksInTheOrderOfThePushes) {
  FakeDaemon daemon;
  Trainer trainer(daemon.address());
  ASSERT_TRUE(trainer.Attach().ok());
  ASSERT_TRUE(trainer.Step({3, 1, 0, 2}).ok());
  EXPECT_THAT(Kinds(daemon.seen()), ElementsAre("open", "step_begin", "micro_begin", "3.0", "3.1", "1.0", "0.0", "0.1",
                                                "0.2", "2.0", "micro_end", "step_end"));
}

TEST(ClientTest, BeginAndEndCarryTheValuesOfTheStep) {
  FakeDaemon daemon;
  Trainer trainer(daemon.address());
  ASSERT_TRUE(trainer.Attach().ok());
  ASSERT_TRUE(trainer.Step({1}).ok());
  const auto requests = daemon.seen().requests;
  EXPECT_EQ(requests[1].step_begin().step(), 1u);
  EXPECT_EQ(requests[1].step_begin().groups(0).lr(), 0.5);
  EXPECT_FALSE(requests[1].step_begin().groups(0).has_beta1());
  EXPECT_TRUE(requests[2].micro_begin().last());
  EXPECT_EQ(requests[4].micro_end().absent(), std::string(1, 0b1101));
  EXPECT_EQ(requests[4].micro_end().loss(), 1.5);
}

TEST(ClientTest, WeightsReturnToTheirPlaceStepAfterStep) {
  FakeDaemon daemon;
  Trainer trainer(daemon.address());
  ASSERT_TRUE(trainer.Attach().ok());
  for (uint64_t step = 1; step <= 20; ++step) {
    ASSERT_EQ(trainer.client->step(), step);
    const auto result = trainer.Step();
    ASSERT_TRUE(result.ok()) << result.status();
    EXPECT_EQ(result->result.step(), step);
    for (uint32_t i = 0; i < 4; ++i) EXPECT_EQ(trainer.weights[i], Updated(trainer.Gradient(i, step), step));
  }
}

TEST(ClientTest, TimingCountsPayloadBothWays) {
  FakeDaemon daemon;
  Trainer trainer(daemon.address());
  ASSERT_TRUE(trainer.Attach().ok());
  const auto result = trainer.Step();
  ASSERT_TRUE(result.ok());
  EXPECT_EQ(result->timing.pushed_bytes, 40u + 16 + 4 + 12);
  EXPECT_EQ(result->timing.pulled_bytes, 40u + 16 + 4 + 12);
  EXPECT_LE(result->timing.pushed_bytes_in_backward, result->timing.pushed_bytes);
}

TEST(ClientTest, AnAbsentTensorKeepsItsWeights) {
  FakeDaemon daemon;
  Trainer trainer(daemon.address());
  ASSERT_TRUE(trainer.Attach().ok());
  ASSERT_TRUE(trainer.Step({0}).ok());
  EXPECT_EQ(trainer.weights[1], std::string(16, '?'));
}

TEST(ClientTest, AStepWithoutGradientsCloses) {
  FakeDaemon daemon;
  Trainer trainer(daemon.address());
  ASSERT_TRUE(trainer.Attach().ok());
  EXPECT_TRUE(trainer.Step({}).ok());
}

TEST(ClientTest, AnUnboundTensorIsDropped) {
  FakeDaemon daemon;
  Trainer trainer(daemon.address());
  ASSERT_TRUE(trainer.Attach().ok());
  ASSERT_TRUE(trainer.client->BindWeights(0, nullptr, 0).ok());
  ASSERT_TRUE(trainer.Step().ok());
  EXPECT_EQ(trainer.weights[0], std::string(40, '?'));
}

TEST(ClientTest, ASecondPushIsRefusedByNameAndTheStepGoesOn) {
  FakeDaemon daemon;
  Trainer trainer(daemon.address());
  ASSERT_TRUE(trainer.Attach().ok());
  ASSERT_TRUE(trainer.client->BeginStep({}).ok());
  ASSERT_TRUE(trainer.Push(1).ok());
  const absl::Status again = trainer.Push(1);
  EXPECT_EQ(again.code(), absl::StatusCode::kFailedPrecondition);
  EXPECT_THAT(std::string(again.message()), HasSubstr("tensor 1 'b'"));
  EXPECT_TRUE(trainer.client->EndStep(std::nullopt).get().ok());
}

TEST(ClientTest, AWrongSizeIsRefusedWithNameGotAndWanted) {
  FakeDaemon daemon;
  Trainer trainer(daemon.address());
  ASSERT_TRUE(trainer.Attach().ok());
  ASSERT_TRUE(trainer.client->BeginStep({}).ok());
  const absl::Status status = trainer.client->Push(3, BytesOf(std::string(10, 'x')));
  EXPECT_EQ(status.code(), absl::StatusCode::kInvalidArgument);
  EXPECT_EQ(status.message(), "gradient of tensor 3 'd': got 10 bytes, wanted 12 (6 x bf16)");
  EXPECT_EQ(trainer.client->Push(4, {}).code(), absl::StatusCode::kInvalidArgument);
  EXPECT_EQ(trainer.client->BindWeights(0, trainer.weights[0].data(), 39).code(), absl::StatusCode::kInvalidArgument);
}

TEST(ClientTest, CallsOutOfOrderAreRefused) {
  FakeDaemon daemon;
  Trainer trainer(daemon.address());
  const auto refused = [](const absl::Status& s) { return s.code() == absl::StatusCode::kFailedPrecondition; };
  EXPECT_TRUE(refused(trainer.client->BeginStep({})));
  EXPECT_TRUE(refused(trainer.client->EndStep({}).get().status()));
  ASSERT_TRUE(trainer.Attach().ok());
  EXPECT_TRUE(refused(trainer.client->Attach({.run_id = "r"}).status()));
  EXPECT_TRUE(refused(trainer.Push(0)));
  EXPECT_TRUE(refused(trainer.client->EndStep({}).get().status()));
  ASSERT_TRUE(trainer.client->BeginStep({}).ok());
  EXPECT_TRUE(refused(trainer.client->BeginStep({})));
  ASSERT_TRUE(trainer.Push(0).ok());
  EXPECT_TRUE(refused(trainer.client->BindWeights(0, trainer.weights[0].data(), 40)));
  EXPECT_TRUE(trainer.client->EndStep({}).get().ok());
}

TEST(ClientTest, TheCreditWindowIsFilledAndNeverExceeded) {
  FakeDaemon daemon({.credit_bytes = 32, .returns_credit_late = true});
  Trainer trainer(daemon.address());
  ASSERT_TRUE(trainer.Attach().ok());
  ASSERT_TRUE(trainer.Step({0, 1}).ok());
  EXPECT_EQ(daemon.seen().most_under_way, 32u);
}

TEST(ClientTest, ATensorManyTimesTheWindowGoesThrough) {
  FakeOptions options{.credit_bytes = 16};
  options.spec.mutable_tensors(0)->set_shape(0, 1000);
  FakeDaemon daemon(options);
  Trainer trainer(daemon.address());
  ASSERT_TRUE(trainer.Attach(options.spec).ok());
  ASSERT_TRUE(trainer.Step().ok());
  EXPECT_EQ(daemon.seen().most_under_way, 16u);
  EXPECT_EQ(trainer.weights[0], Updated(trainer.Gradient(0, 1), 1));
}

TEST(ClientTest, AChunkLargerThanTheWindowGoesAlone) {
  FakeDaemon daemon({.credit_bytes = 8});
  Trainer trainer(daemon.address());
  ASSERT_TRUE(trainer.Attach().ok());
  ASSERT_TRUE(trainer.Step().ok());
  EXPECT_EQ(daemon.seen().most_under_way, 16u);
}

TEST(ClientTest, AWantedChunkGoesWithoutCredit) {
  FakeDaemon daemon({.credit_bytes = 16, .returns_credit_late = true});
  Trainer trainer(daemon.address());
  ASSERT_TRUE(trainer.Attach().ok());
  v1::TrainResponse wanted;
  wanted.mutable_credit()->mutable_wanted()->set_tensor(0);
  wanted.mutable_credit()->mutable_wanted()->set_chunk(2);
  daemon.Inject(wanted);
  ASSERT_TRUE(trainer.Step({1, 0}).ok());
  EXPECT_EQ(trainer.weights[0], Updated(trainer.Gradient(0, 1), 1));
}

TEST(ClientTest, APartialStepIsAResult) {
  FakeOptions options;
  options.result.set_outcome(v1::STEP_OUTCOME_PARTIAL);
  options.result.set_reason("rank_lost");
  options.result.add_tensors_not_applied(1);
  FakeDaemon daemon(options);
  Trainer trainer(daemon.address());
  ASSERT_TRUE(trainer.Attach().ok());
  const auto result = trainer.Step();
  ASSERT_TRUE(result.ok()) << result.status();
  EXPECT_EQ(result->result.outcome(), v1::STEP_OUTCOME_PARTIAL);
  EXPECT_EQ(result->result.reason(), "rank_lost");
  EXPECT_EQ(trainer.weights[1], std::string(16, '?'));
  EXPECT_EQ(trainer.weights[0], Updated(trainer.Gradient(0, 1), 1));
}

TEST(ClientTest, AnAbortedStepIsAResultEvenBeforeItsEnd) {
  FakeOptions options;
  options.result.set_outcome(v1::STEP_OUTCOME_ABORTED);
  FakeDaemon daemon(options);
  Trainer trainer(daemon.address());
  ASSERT_TRUE(trainer.Attach().ok());
  const auto result = trainer.Step();
  ASSERT_TRUE(result.ok()) << result.status();
  EXPECT_EQ(result->result.outcome(), v1::STEP_OUTCOME_ABORTED);
  EXPECT_EQ(trainer.client->step(), 2u);
}

v1::TrainResponse WeightsOf(uint32_t tensor, uint64_t step, const std::string& data) {
  v1::TrainResponse response;
  v1::Weights* weights = response.mutable_weights();
  weights->set_step(step);
  weights->set_tensor(tensor);
  weights->set_format("fp32");
  weights->set_data(data);
  weights->set_crc32c(Crc32c(BytesOf(data)));
  return response;
}

TEST(ClientTest, WeightsBeforeThePushAreNotWritten) {
  FakeDaemon daemon;
  Trainer trainer(daemon.address());
  ASSERT_TRUE(trainer.Attach().ok());
  daemon.Inject(WeightsOf(1, 1, std::string(16, '!')));
  ASSERT_TRUE(trainer.client->BeginStep({}).ok());
  trainer.Push(0).IgnoreError();  // the weights may have ended the stream before it or after it
  daemon.AwaitStreamEnd();
  const auto result = trainer.client->EndStep({}).get();
  EXPECT_EQ(result.status().code(), absl::StatusCode::kInternal);
  EXPECT_THAT(std::string(result.status().message()), HasSubstr("tensor 1 'b'"));
  EXPECT_EQ(trainer.weights[1], std::string(16, '?'));
}

TEST(ClientTest, WeightsAfterTheEndAreNotWritten) {
  FakeDaemon daemon;
  Trainer trainer(daemon.address());
  ASSERT_TRUE(trainer.Attach().ok());
  ASSERT_TRUE(trainer.Step().ok());
  const std::string after_first = trainer.weights[1];
  daemon.Inject(WeightsOf(1, 1, std::string(16, '!')));
  ASSERT_TRUE(trainer.Step({0}).ok());
  EXPECT_EQ(trainer.weights[1], after_first);
}

TEST(ClientTest, WeightsOfTheWrongSizeAreNotWritten) {
  FakeDaemon daemon;
  Trainer trainer(daemon.address());
  ASSERT_TRUE(trainer.Attach().ok());
  ASSERT_TRUE(trainer.client->BeginStep({}).ok());
  ASSERT_TRUE(trainer.Push(1).ok());
  daemon.Inject(WeightsOf(1, 1, std::string(20, '!')));
  const auto result = trainer.client->EndStep({}).get();
  EXPECT_EQ(result.status().code(), absl::StatusCode::kInternal);
  EXPECT_NE(trainer.weights[1], std::string(16, '!'));
}

TEST(ClientTest, DamagedWeightsAreDataLoss) {
  FakeDaemon daemon({.damages_weights = true});
  Trainer trainer(daemon.address());
  ASSERT_TRUE(trainer.Attach().ok());
  const auto result = trainer.Step();
  EXPECT_EQ(result.status().code(), absl::StatusCode::kDataLoss);
  EXPECT_EQ(trainer.client->status(), result.status());
  EXPECT_EQ(trainer.client->BeginStep({}), result.status());
}

TEST(ClientTest, AResultWithoutItsWeightsIsAnError) {
  FakeOptions options;
  options.result.add_tensors_not_applied(0);
  FakeDaemon daemon(options);
  Trainer trainer(daemon.address());
  ASSERT_TRUE(trainer.Attach().ok());
  v1::TrainResponse early;
  early.mutable_step_result()->set_step(1);
  early.mutable_step_result()->set_outcome(v1::STEP_OUTCOME_APPLIED);
  ASSERT_TRUE(trainer.client->BeginStep({}).ok());
  ASSERT_TRUE(trainer.Push(0).ok());
  daemon.Inject(early);
  const auto result = trainer.client->EndStep({}).get();
  EXPECT_EQ(result.status().code(), absl::StatusCode::kInternal);
  EXPECT_THAT(std::string(result.status().message()), HasSubstr("'a'"));
}

TEST(ClientTest, UploadedWeightsArriveWholeAndTheirDigestsReturn) {
  FakeDaemon daemon;
  Trainer trainer(daemon.address());
  ASSERT_TRUE(trainer.Attach().ok());
  Upload(trainer, daemon);
}

TEST(ClientTest, AnUploadOfTheWrongSizeIsRefusedByName) {
  FakeDaemon daemon;
  Trainer trainer(daemon.address());
  ASSERT_TRUE(trainer.Attach().ok());
  const std::string a(20, 'x');
  const TensorView view{.tensor = 0, .format = "fp32", .bytes = BytesOf(a)};
  const auto digests = trainer.client->LoadWeights({&view, 1});
  EXPECT_EQ(digests.status().code(), absl::StatusCode::kInvalidArgument);
  EXPECT_THAT(std::string(digests.status().message()), HasSubstr("tensor 0 'a': got 20 bytes, wanted 40"));
}

TEST(ClientTest, PullDeliversWholeTensorsAndStopsWhenTheSinkRefuses) {
  FakeDaemon daemon;
  Trainer trainer(daemon.address());
  ASSERT_TRUE(trainer.Attach().ok());
  ASSERT_TRUE(trainer.Step().ok());
  std::map<uint32_t, std::string> pulled;
  const auto sink = [&](uint32_t tensor, uint64_t offset, absl::Span<const std::byte> piece, uint64_t step) {
    EXPECT_EQ(step, 1u);
    EXPECT_EQ(pulled[tensor].size(), offset);
    pulled[tensor].append(reinterpret_cast<const char*>(piece.data()), piece.size());
    return absl::OkStatus();
  };
  ASSERT_TRUE(trainer.client->Pull("r", {0u, 3u}, sink).ok());
  EXPECT_EQ(pulled, (std::map<uint32_t, std::string>{{0, trainer.weights[0]}, {3, trainer.weights[3]}}));
  const auto refuse = [](uint32_t, uint64_t, absl::Span<const std::byte>, uint64_t) {
    return absl::ResourceExhaustedError("enough");
  };
  EXPECT_EQ(trainer.client->Pull("r", {}, refuse).message(), "enough");
}

// It would send weights, whatever was asked for.
TEST(ClientTest, ADaemonThatDoesNotKnowSlotsIsNotTakenForOneThatDoes) {
  FakeDaemon daemon;
  Trainer trainer(daemon.address());
  ASSERT_TRUE(trainer.Attach().ok());
  ASSERT_TRUE(trainer.Step().ok());
  const std::vector<std::string> slots = {"master", "updates"};
  int pieces = 0;
  const auto sink = [&](const ServedPiece&) {
    ++pieces;
    return absl::OkStatus();
  };
  const absl::Status refused = trainer.client->PullState("r", {}, slots, sink);
  EXPECT_TRUE(absl::IsUnimplemented(refused)) << refused;
  EXPECT_THAT(std::string(refused.message()),
              HasSubstr("asked for master, updates, and got weights: this daemon is older than the client"));
  EXPECT_EQ(pieces, 0);
}

// It would cut its own part of a tensor out of a whole one, and land it in the wrong place.
TEST(ClientTest, ADaemonThatDoesNotKnowShardsIsNotTakenForOneThatDoes) {
  FakeDaemon daemon;
  Trainer trainer(daemon.address());
  ASSERT_TRUE(trainer.Attach().ok());
  ASSERT_TRUE(trainer.Step().ok());
  const auto sink = [](uint32_t, uint64_t, absl::Span<const std::byte>, uint64_t) {
    ADD_FAILURE() << "a piece came";
    return absl::OkStatus();
  };
  for (const Shard shard : {Shard{0, 3}, Shard{5, 9}}) {
    const absl::Status refused = trainer.client->Pull("r", {0u}, sink, 0, {}, {shard, {}, {}, {}});
    EXPECT_TRUE(absl::IsUnimplemented(refused)) << refused;
    EXPECT_THAT(std::string(refused.message()), HasSubstr("this daemon is older than the client"));
  }
  EXPECT_TRUE(trainer.client->Pull("r", {0u}, sink, 0, {}, {Shard{5, 5}, {}, {}, {}}).ok()) << "nothing is asked for";
  Trainer other(daemon.address());
  const absl::Status attached =
      other.client->Attach({.run_id = "r", .shards = {Shard{2, 7, false}, {}, {}, Shard{6, 6}}}).status();
  EXPECT_TRUE(absl::IsUnimplemented(attached)) << attached;
  const auto coverage = daemon.seen().attaches.back().coverage();
  ASSERT_EQ(coverage.size(), 2);
  EXPECT_EQ(coverage[0].ShortDebugString(), "receives { begin: 2 end: 7 }");
  EXPECT_EQ(coverage[1].ShortDebugString(), "tensor: 3");
}

TEST(ClientTest, ClosingBetweenStepsReleasesTheRank) {
  FakeDaemon daemon;
  {
    Trainer trainer(daemon.address());
    ASSERT_TRUE(trainer.Attach().ok());
    ASSERT_TRUE(trainer.Step().ok());
  }
  daemon.AwaitStreamEnd();
  EXPECT_EQ(daemon.seen().clean_ends, 1);
}

TEST(ClientTest, ClosingInAStepCancelsItAndCompletesItsFuture) {
  FakeDaemon daemon({.answers_step_end = false});
  std::future<absl::StatusOr<StepResult>> future;
  {
    Trainer trainer(daemon.address());
    ASSERT_TRUE(trainer.Attach().ok());
    ASSERT_TRUE(trainer.client->BeginStep({}).ok());
    future = trainer.client->EndStep({});
  }
  EXPECT_EQ(future.get().status().code(), absl::StatusCode::kCancelled);
  daemon.AwaitStreamEnd();
  EXPECT_EQ(daemon.seen().clean_ends, 0);
}

}  // namespace
}  // namespace ballast
