// What one rank may cost the others and the daemon: one that does not read, one that does not come back, one that sends
// what is not due.
#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include <chrono>

#include "absl/strings/match.h"
#include "absl/strings/numbers.h"
#include "absl/strings/str_cat.h"
#include "absl/strings/str_split.h"

#include "server/convert/convert.h"
#include "tests/eventually.h"
#include "tests/server/rpc/rpc_fixture.h"

namespace ballast::testing {
namespace {

using ::testing::AllOf;
using ::testing::ElementsAre;
using ::testing::Eq;
using ::testing::HasSubstr;
using ::testing::IsEmpty;

class SlowRankRpcTest : public RpcTest {
 protected:
  struct Rank {
    std::string token;
    std::unique_ptr<Wire> wire;
  };

  // Two ranks of the run, with weights and streams.
  void Start(v1::RunSpec wire_spec, double lease_s) {
    Config config = DefaultConfig();
    config.limits.lease_s = lease_s;
    StartServer(config);
    wire_spec.set_ranks(2);
    ASSERT_TRUE(CreateRun(wire_spec).ok());
    spec_ = ToRunSpec(wire_spec, config_.limits).value();
    for (uint32_t rank = 0; rank < 2; ++rank) {
      ranks_[rank].token = AttachFresh(spec_.run_id, false, rank, 2).session_token();
      Open(rank);
    }
    v1::LoadStateResponse loaded;
    ASSERT_TRUE(LoadAll(spec_, ranks_[0].token, &loaded).ok());
  }
  void Open(uint32_t rank) {
    ranks_[rank].wire = std::make_unique<Wire>(trainer_.get());
    ASSERT_TRUE(ranks_[rank].wire->Open(ranks_[rank].token));
  }
  void Send(uint32_t rank, uint32_t tensor, uint64_t step) {
    for (const v1::Gradient& chunk : Chunks(spec_, tensor, Gradient(spec_, tensor, step))) {
      ranks_[rank].wire->Chunk(chunk);
    }
  }
  void SendStep(uint32_t rank, uint64_t step) {
    ranks_[rank].wire->Begin(step);
    for (uint32_t i = 0; i < spec_.tensors.size(); ++i) Send(rank, i, step);
    ranks_[rank].wire->EndStep();
  }
  void ExpectApplied(uint32_t rank, uint64_t step, size_t tensors) {
    const StepAnswer answer = ReadStep(ranks_[rank].wire.get());
    ASSERT_TRUE(answer.result) << ranks_[rank].wire->Finish().error_message();
    EXPECT_EQ(answer.result->step(), step);
    EXPECT_EQ(answer.result->outcome(), v1::STEP_OUTCOME_APPLIED);
    EXPECT_EQ(answer.weights.size(), tensors);
    EXPECT_TRUE(answer.checksums_right);
  }
  // The step ends for rank 0 although the other keeps away, within half a minute of what the policy allows it.
  v1::StepResult ExpectToldOfLoss() {
    const auto before = std::chrono::steady_clock::now();
    const StepAnswer answer = ReadStep(ranks_[0].wire.get());
    EXPECT_LT(std::chrono::steady_clock::now() - before, std::chrono::seconds(30));
    EXPECT_TRUE(answer.result);
    return answer.result.value_or(v1::StepResult());
  }
  // By the open step.
  std::vector<std::string> Awaited() {
    std::vector<std::string> awaited;
    const v1::RunStatus status = Status(spec_.run_id);
    for (const v1::AwaitedRank& rank : status.awaited()) {
      awaited.push_back(absl::StrCat(rank.rank(), rank.connected() ? " " : " away ", rank.what()));
    }
    return awaited;
  }
  double SentBytes() const {
    const std::string series = absl::StrCat("ballast_sent_bytes_total{run_id=\"", spec_.run_id, "\"");
    double sum = 0;  // over the transports
    for (const absl::string_view line : absl::StrSplit(metrics_.Serialize(), '\n')) {
      double bytes = 0;
      if (!absl::StartsWith(line, series)) continue;
      EXPECT_TRUE(absl::SimpleAtod(line.substr(line.rfind(' ') + 1), &bytes)) << line;
      sum += bytes;
    }
    return sum;
  }

  RunSpec spec_;
  Rank ranks_[2];
};

TEST_F(SlowRankRpcTest, ARankThatDoesNotReadCostsTheOthersNothingAndTheDaemonLittle) {
  constexpr double kWeights = 9e6, kUnderWay = 8e6;  // send slots, and the 4 MiB that the transport takes
  v1::RunSpec spec = MakeSpec("r1", {{"w", {1500, 1500}, "fp32"}});
  spec.mutable_groups(0)->set_gradient("fp8-e5m2");  // fewer bytes than the credit, which this client does not heed
  // Made before: a rank that has not read for eight seconds is lost, over shared memory.
  const RunSpec made = ToRunSpec(spec, DefaultConfig().limits).value();
  const std::vector<v1::Gradient> chunks[] = {Chunks(made, 0, Gradient(made, 0, 1)),
                                              Chunks(made, 0, Gradient(made, 0, 2))};
  const auto send = [&](uint32_t rank, uint64_t step) {
    ranks_[rank].wire->Begin(step);
    for (const v1::Gradient& chunk : chunks[step - 1]) ranks_[rank].wire->Chunk(chunk);
    ranks_[rank].wire->EndStep();
  };
  Start(spec, /*lease_s=*/10);
  send(0, 1);
  send(1, 1);
  ExpectApplied(0, 1, 1);  // rank 1 has read nothing yet
  EXPECT_GE(SentBytes(), kWeights);
  EXPECT_LT(SentBytes(), kWeights + kUnderWay);
  EXPECT_EQ(Status("r1").bytes().SerializeAsString(), Status("r1").plan().server().SerializeAsString());
  send(0, 2);
  EXPECT_LT(SentBytes(), kWeights + kUnderWay);
  ExpectApplied(1, 1, 1);
  send(1, 2);
  ExpectApplied(0, 2, 1);
  ExpectApplied(1, 2, 1);
  EXPECT_EQ(SentBytes(), 4 * kWeights);
}

TEST_F(SlowRankRpcTest, ARankThatNeverComesBackEndsTheStepForTheOthers) {
  v1::RunSpec spec = SmallSpec();
  spec.set_rank_timeout_s(0.5);
  Start(spec, /*lease_s=*/0.5);
  ranks_[0].wire->Begin(1);
  ranks_[1].wire->Begin(1);
  Send(0, 2, 1);
  Send(1, 2, 1);
  ASSERT_TRUE(ranks_[0].wire->AwaitWeights());
  ranks_[1].wire->Hang();
  const v1::StepResult result = ExpectToldOfLoss();
  EXPECT_EQ(result.outcome(), v1::STEP_OUTCOME_PARTIAL);
  EXPECT_THAT(result.tensors_not_applied(), ElementsAre(0, 1));
  EXPECT_THAT(absl::StrCat(result.reason(), " ", result.detail()), HasSubstr("rank 1"));
  ranks_[1].wire = std::make_unique<Wire>(trainer_.get());
  EXPECT_FALSE(ranks_[1].wire->Open(ranks_[1].token));  // it may no more resume
}

TEST_F(SlowRankRpcTest, ARankThatNeverCameEndsTheStepForTheOthers) {
  v1::RunSpec spec = SmallSpec();
  spec.set_rank_timeout_s(0.5);
  Start(spec, /*lease_s=*/0.5);
  ranks_[1].wire->CloseInput();  // it leaves before the step
  EXPECT_TRUE(ranks_[1].wire->Finish().ok());
  SendStep(0, 1);
  const v1::StepResult result = ExpectToldOfLoss();
  EXPECT_EQ(result.outcome(), v1::STEP_OUTCOME_ABORTED);
  EXPECT_THAT(absl::StrCat(result.reason(), " ", result.detail()), HasSubstr("rank 1"));
  ranks_[1].token = AttachFresh("r1", false, 1, 2).session_token();
  Open(1);
  SendStep(0, 2);
  SendStep(1, 2);
  ExpectApplied(0, 2, 3);
  ExpectApplied(1, 2, 3);
}

TEST_F(SlowRankRpcTest, TheStepsGoOnWithoutARankThatIsLostWhereTheRunSaysSo) {
  v1::RunSpec spec = SmallSpec();
  spec.set_rank_timeout_s(0.5);
  spec.set_on_lost_rank(v1::LOST_RANK_POLICY_CONTINUE);
  Start(spec, /*lease_s=*/0.5);
  ranks_[1].wire->Begin(1);
  ranks_[1].wire->Hang();
  for (const uint64_t step : {1, 2}) {
    SendStep(0, step);
    const StepAnswer answer = ReadStep(ranks_[0].wire.get());
    ASSERT_TRUE(answer.result);
    EXPECT_EQ(answer.result->outcome(), v1::STEP_OUTCOME_APPLIED);
    EXPECT_THAT(answer.result->ranks_left_out(), ElementsAre(1));
  }
  ranks_[1].token = AttachFresh("r1", false, 1, 2).session_token();
  Open(1);
  SendStep(0, 3);
  SendStep(1, 3);
  ExpectApplied(0, 3, 3);
  ExpectApplied(1, 3, 3);
}

TEST_F(SlowRankRpcTest, ARunThatWentOnWithoutALostRankIsFinishedWhenTheOthersHaveLeft) {
  v1::RunSpec spec = SmallSpec();
  spec.set_rank_timeout_s(0.5);
  spec.set_on_lost_rank(v1::LOST_RANK_POLICY_CONTINUE);
  Start(spec, /*lease_s=*/0.5);
  ranks_[1].wire->Hang();
  SendStep(0, 1);
  ASSERT_TRUE(ReadStep(ranks_[0].wire.get()).result);
  ranks_[0].wire->CloseInput();
  EXPECT_TRUE(ranks_[0].wire->Finish().ok());
  EXPECT_SOON(Status("r1").state(), Eq(v1::RUN_STATE_FINISHED));
}

TEST_F(SlowRankRpcTest, ARankThatSaysNothingEndsTheStepAndIsNamed) {
  v1::RunSpec spec = SmallSpec();
  spec.set_step_timeout_s(0.5);
  Start(spec, /*lease_s=*/10);
  SendStep(0, 1);
  ranks_[1].wire->Begin(1);
  Send(1, 2, 1);
  const v1::StepResult result = ExpectToldOfLoss();
  EXPECT_EQ(result.outcome(), v1::STEP_OUTCOME_PARTIAL);
  EXPECT_EQ(result.reason(), "timeout");
  EXPECT_THAT(result.detail(),
              AllOf(HasSubstr("rank 1 lacks 2 of 3 tensors in micro-batch 0, the first tensor 0 'embed"),
                    HasSubstr("step_timeout"), ::testing::Not(HasSubstr("rank 0"))));
  const StepAnswer silent = ReadStep(ranks_[1].wire.get());
  ASSERT_TRUE(silent.result);
  EXPECT_EQ(silent.result->reason(), "timeout");
  SendStep(0, 2);  // nobody's session has ended
  SendStep(1, 2);
  ExpectApplied(0, 2, 3);
  ExpectApplied(1, 2, 3);
}

TEST_F(SlowRankRpcTest, TheStatusNamesTheRankThatAStepAwaitsAndWhatFor) {
  Start(SmallSpec(), /*lease_s=*/10);
  EXPECT_THAT(Awaited(), IsEmpty());
  SendStep(0, 1);
  EXPECT_SOON(Awaited(), ElementsAre("1 has not begun it"));
  EXPECT_GE(Status("r1").awaited(0).seconds(), 1);
  ranks_[1].wire->Begin(1);
  Send(1, 2, 1);
  EXPECT_SOON(Awaited(), ElementsAre(HasSubstr("1 lacks 2 of 3 tensors in micro-batch 0, the first tensor 0 'embed")));
  Send(1, 0, 1);
  Send(1, 1, 1);
  ranks_[1].wire->EndStep();
  ExpectApplied(0, 1, 3);
  ExpectApplied(1, 1, 3);
  EXPECT_THAT(Awaited(), IsEmpty());
}

TEST_F(SlowRankRpcTest, ARankThatHasLeftOrIsCutOffIsAwaitedLikewise) {
  Start(SmallSpec(), /*lease_s=*/10);
  SendStep(0, 1);
  ranks_[1].wire->Begin(1);
  EXPECT_SOON(Awaited(), ElementsAre("1 has sent nothing but StepBegin"));
  ranks_[1].wire->Hang();
  EXPECT_SOON(Awaited(), ElementsAre("1 away has sent nothing but StepBegin"));
  ranks_[1].token = AttachFresh("r1", /*takeover=*/true, 1, 2).session_token();
  Open(1);
  ranks_[1].wire->CloseInput();
  EXPECT_TRUE(ranks_[1].wire->Finish().ok());
  EXPECT_SOON(Awaited(), ElementsAre("1 away has no process any more"));
}

TEST_F(SlowRankRpcTest, AStepBeginOutOfTurnIsRefusedAndHarmsNoOtherRank) {
  Start(SmallSpec(), /*lease_s=*/10);
  for (const uint64_t step : {0u, 2u, 77u}) {
    ranks_[1].wire->Begin(step);
    const grpc::Status refused = ranks_[1].wire->Finish();
    EXPECT_EQ(refused.error_code(), grpc::FAILED_PRECONDITION);
    EXPECT_THAT(refused.error_message(), AllOf(HasSubstr(absl::StrCat("step ", step)), HasSubstr("1")));
    Open(1);
  }
  SendStep(0, 1);
  SendStep(1, 1);
  ExpectApplied(0, 1, 3);
  ExpectApplied(1, 1, 3);
  ranks_[0].wire->Begin(1);  // closed
  EXPECT_EQ(ranks_[0].wire->Finish().error_code(), grpc::FAILED_PRECONDITION);
}

TEST_F(SlowRankRpcTest, AMicroBatchTooManyIsNamed) {
  v1::RunSpec spec = SmallSpec();
  spec.set_accumulation(2);
  Start(spec, /*lease_s=*/10);
  ranks_[0].wire->Begin(1);
  ranks_[0].wire->BeginMicro(2, true);
  const grpc::Status refused = ranks_[0].wire->Finish();
  EXPECT_EQ(refused.error_code(), grpc::INVALID_ARGUMENT);
  EXPECT_THAT(refused.error_message(), HasSubstr("2"));
}

TEST_F(SlowRankRpcTest, ATensorNeitherSentNorAbsentIsNamedBeforeTheStepEnds) {
  Start(SmallSpec(), /*lease_s=*/10);
  ranks_[0].wire->Begin(1);
  Send(0, 1, 1);
  ranks_[0].wire->EndStep("\x01");  // bit 0: the first alone is absent
  const grpc::Status refused = ranks_[0].wire->Finish();
  EXPECT_EQ(refused.error_code(), grpc::INVALID_ARGUMENT);
  EXPECT_THAT(refused.error_message(), HasSubstr("layers.0.b"));
  Open(0);
  ranks_[0].wire->Begin(1);
  Send(0, 1, 1);
  Send(0, 2, 1);  // what was missing
  ranks_[0].wire->EndStep("\x01");
  SendStep(1, 1);
  ExpectApplied(0, 1, 3);
}

}  // namespace
}  // namespace ballast::testing
