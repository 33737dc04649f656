#include "client/cpp/stream/open_step.h"

#include "tests/client/stream/open_step_fixture.h"

namespace ballast {
namespace {

using ::testing::ElementsAre;

TEST_F(OpenStepTest, SendsWhatThereIsAndTheEndLast) {
  Push(1);
  EXPECT_THAT(Drain(&credit_), ElementsAre("step_begin", "micro_begin", "1.0"));
  End(std::nullopt);
  EXPECT_THAT(Drain(&credit_), ElementsAre("micro_end", "step_end"));
}

// As the caller of Client::Push sees it, one gradient was pushed, whatever happens between its portions.
TEST_F(OpenStepTest, AGradientLeavesInThePortionsThatItComesIn) {
  Push(0, 0, 2);
  EXPECT_THAT(Drain(&credit_), ElementsAre("step_begin", "micro_begin", "0.0", "0.1"));
  v1::Open open;
  ASSERT_TRUE(step_->Resume(Holding(0, {true, false, false}), &open).ok());
  Push(0, 2, 3);
  EXPECT_TRUE(absl::IsFailedPrecondition(step_->MayPush(0)));
  End(std::nullopt);
  EXPECT_THAT(Drain(&credit_), ElementsAre("step_begin", "micro_begin", "0.1", "0.2", "micro_end", "step_end"));
}

TEST_F(OpenStepTest, StopsWithoutCredit) {
  CreditWindow credit(32);
  Push(0);
  EXPECT_THAT(Drain(&credit), ElementsAre("step_begin", "micro_begin", "0.0", "0.1"));
  credit.Return(16);
  EXPECT_THAT(Drain(&credit), ElementsAre("0.2"));
}

// The other ranks' credit may wait for the list of absent tensors.
TEST_F(OpenStepTest, TheEndGoesBeforeWhatWaitsForCredit) {
  CreditWindow credit(16);
  Push(0);
  End(std::nullopt);
  EXPECT_THAT(Drain(&credit), ElementsAre("step_begin", "micro_begin", "0.0", "micro_end"));
  credit.Return(16);
  EXPECT_THAT(Drain(&credit), ElementsAre("0.1"));
  credit.Return(16);
  EXPECT_THAT(Drain(&credit), ElementsAre("0.2", "step_end"));
}

// The wanted chunk counts against the window, and its credit returns as well.
TEST_F(OpenStepTest, AWantedChunkIsSentWithoutCredit) {
  CreditWindow credit(16);
  Push(0);
  EXPECT_THAT(Drain(&credit), ElementsAre("step_begin", "micro_begin", "0.0"));
  step_->Want({.tensor = 0, .chunk = 2});
  EXPECT_THAT(Drain(&credit), ElementsAre("0.2"));
  credit.Return(8);
  EXPECT_THAT(Drain(&credit), ElementsAre());
}

// A later "wanted" replaces an earlier one, for which nobody waits any more. A chunk that has left is not sent again.
TEST_F(OpenStepTest, AWantedChunkHoldsUntilItIsSentOrReplaced) {
  CreditWindow credit(16);
  Push(0);
  EXPECT_THAT(Drain(&credit), ElementsAre("step_begin", "micro_begin", "0.0"));
  step_->Want({.tensor = 1, .chunk = 0});  // not pushed yet
  EXPECT_THAT(Drain(&credit), ElementsAre());
  step_->Want({.tensor = 0, .chunk = 2});
  EXPECT_THAT(Drain(&credit), ElementsAre("0.2"));
  step_->Want({.tensor = 0, .chunk = 0});
  EXPECT_THAT(Drain(&credit), ElementsAre());
  Push(1);
  EXPECT_THAT(Drain(&credit), ElementsAre());  // wanted once, but no more
  step_->Want({.tensor = 0, .chunk = 1});
  EXPECT_THAT(Drain(&credit), ElementsAre("0.1"));
}

TEST_F(OpenStepTest, ResumeLeavesOutChunksHeldAndTensorsApplied) {
  for (const uint32_t tensor : {0u, 1u, 3u}) Push(tensor);
  Drain(&credit_);
  v1::AttachResponse grant;
  grant.set_resume_step(7);
  grant.set_step_open(true);
  v1::ChunksHeld* held = grant.add_held();
  held->set_tensor(0);
  held->set_chunks(PackBits({true, false, true}));
  grant.set_tensors_applied(PackBits({false, true, false, false}));
  v1::Open open;
  ASSERT_TRUE(step_->Resume(grant, &open).ok());
  EXPECT_THAT(Drain(&credit_), ElementsAre("step_begin", "micro_begin", "0.1", "3.0", "3.1"));
  EXPECT_EQ(open.weights_step(), 7u);
}

TEST_F(OpenStepTest, AcknowledgedChunksAreFreedInTheOrderSent) {
  Push(0);
  Push(1);
  CreditWindow credit(1 << 20);
  credit.Spend(4);  // the stream's first gradient was of the step before
  credit.Return(4);
  Drain(&credit);
  EXPECT_EQ(Acknowledge(1), 0u);
  EXPECT_EQ(Acknowledge(3), 32u);
  EXPECT_EQ(Acknowledge(3), 0u);
  EXPECT_EQ(Acknowledge(5), 8u + 16);
}

TEST_F(OpenStepTest, AChunkAcknowledgedWhileBeingWrittenIsFreedByTheWriter) {
  Push(1);
  v1::TrainRequest request;
  for (int i = 0; i < 3; ++i) step_->NextRequest(&credit_, &request);
  ASSERT_EQ(request.gradient().data().size(), 16u);
  EXPECT_EQ(Acknowledge(1), 0u);
  step_->Sent(&request);
  EXPECT_EQ(request.gradient().data().size(), 16u);
}

TEST_F(OpenStepTest, ResumeSendsNothingThatWasAcknowledged) {
  Push(0);
  Drain(&credit_);
  Acknowledge(2);
  v1::Open open;
  ASSERT_TRUE(step_->Resume(Holding(0, {true, true, false}), &open).ok());
  EXPECT_EQ(Acknowledge(2), 0u);  // of the stream before
  EXPECT_THAT(Drain(&credit_), ElementsAre("step_begin", "micro_begin", "0.2"));
}

TEST_F(OpenStepTest, ResumeFailsWhenTheDaemonLostAnAcknowledgedChunk) {
  Push(0);
  Drain(&credit_);
  Acknowledge(2);
  v1::Open open;
  const absl::Status lost = step_->Resume(Holding(0, {true, false, false}), &open);
  EXPECT_EQ(lost,
            absl::InternalError("chunk 1 of tensor 0 'a' in step 7: the daemon acknowledged it and now lacks it"));
}

TEST_F(OpenStepTest, TheResultTellsTheMostBytesBuffered) {
  Push(0);
  Drain(&credit_);
  Acknowledge(3);
  Push(1);
  End(std::nullopt);
  v1::StepResult skipped;
  skipped.set_outcome(v1::STEP_OUTCOME_SKIPPED);
  Freed freed;
  ASSERT_TRUE(step_->SetResult(skipped, &freed).ok());
  EXPECT_EQ(Bytes(freed.chunks), 16u);
  EXPECT_EQ(step_->result(absl::UnixEpoch()).timing.buffered_bytes_most, 40u);
}

TEST_F(OpenStepTest, TheEndIsSentAgainAsItWas) {
  v1::StepEnd end;
  end.set_client_state("epoch 3");
  End(std::nullopt, end);
  for (int i = 0; i < 2; ++i) {
    v1::TrainRequest request;
    while (step_->HasRequest(credit_)) step_->NextRequest(&credit_, &request);
    EXPECT_EQ(request.step_end().client_state(), "epoch 3");
    v1::Open open;
    ASSERT_TRUE(step_->Resume(Holding(0, {}), &open).ok());
  }
}

TEST_F(OpenStepTest, SmallGradientsMayWaitForOthersWhileThoseAreMade) {
  Push(1);
  EXPECT_FALSE(step_->MayGather());  // the step's begin goes at once
  EXPECT_THAT(Drain(&credit_), ElementsAre("step_begin", "micro_begin", "1.0"));
  Push(3);
  EXPECT_TRUE(step_->MayGather());
  step_->Want({.tensor = 3, .chunk = 1});
  EXPECT_FALSE(step_->MayGather());
  EXPECT_THAT(Drain(&credit_), ElementsAre("3.0", "3.1"));
  Push(0);
  EXPECT_TRUE(step_->MayGather());
  End(std::nullopt);
  EXPECT_FALSE(step_->MayGather());
}

TEST_F(OpenStepTest, AfterALostConnectionWhatIsQueuedAgainMayGatherToo) {
  Push(1);
  Drain(&credit_);
  v1::Open open;
  ASSERT_TRUE(step_->Resume(Holding(0, {}), &open).ok());
  v1::TrainRequest begin;
  step_->NextRequest(&credit_, &begin);
  step_->NextRequest(&credit_, &begin);
  EXPECT_TRUE(step_->MayGather());
}

TEST(GatherTest, MuchIsNotKeptWaiting) {
  v1::RunSpec spec = FakeSpec();
  spec.mutable_tensors(0)->set_shape(0, 16 << 10);
  const TensorTable tensors = TensorTable::Create(spec, 4096).value();
  v1::StepBegin begin;
  begin.set_step(7);
  OpenStep step(tensors, begin, /*micros=*/1, absl::UnixEpoch());
  CreditWindow credit(1 << 20);
  ChunkMemory memory;
  const std::string gradient(tensors[0].gradient_bytes(), 'g');
  const auto push = [&](uint64_t first, uint64_t last) {
    Freed freed;
    step.Push(0, CutIntoChunks(tensors, 0, first, last, BytesOf(gradient), &memory), &freed);
  };
  v1::TrainRequest request;
  push(0, 3);
  step.NextRequest(&credit, &request);
  step.NextRequest(&credit, &request);
  EXPECT_TRUE(step.MayGather());
  push(3, 4);
  EXPECT_FALSE(step.MayGather());
  step.NextRequest(&credit, &request);
  EXPECT_TRUE(step.MayGather());
}

class MicroBatchesTest : public OpenStepTest {
 protected:
  MicroBatchesTest() {
    v1::StepBegin begin;
    begin.set_step(7);
    step_ = std::make_unique<OpenStep>(tensors_, begin, /*micros=*/2, absl::UnixEpoch());
  }
  // In the second micro-batch the daemon holds the middle chunk of tensor 0; for all else `grant` says what it holds.
  void ExpectSendsTheRest(v1::AttachResponse grant) {
    grant.set_resume_step(7);
    grant.set_step_open(true);
    v1::ChunksHeld* held = grant.add_held();
    held->set_micro(1);
    held->set_chunks(PackBits({false, true, false}));
    v1::Open open;
    ASSERT_TRUE(step_->Resume(grant, &open).ok());
    EXPECT_THAT(Drain(&credit_), ElementsAre("step_begin", "micro_begin", "micro_end", "micro_begin", "0.0", "0.2",
                                             "micro_end", "step_end"));
  }
};

TEST_F(MicroBatchesTest, EachMicroBatchIsSentWholeBeforeTheNext) {
  Push(1);
  EXPECT_THAT(Drain(&credit_), ElementsAre("step_begin", "micro_begin", "1.0"));
  EXPECT_EQ(step_->MayEnd(/*discard=*/false).code(), absl::StatusCode::kFailedPrecondition);
  ASSERT_TRUE(step_->MayEndMicro().ok());
  step_->EndMicro(0.5);
  Push(1);
  Push(3);
  EXPECT_EQ(step_->MayPush(1).code(), absl::StatusCode::kFailedPrecondition);
  EXPECT_EQ(step_->MayEndMicro().code(), absl::StatusCode::kFailedPrecondition);
  EXPECT_FALSE(step_->MayGather());  // the first micro-batch is over: others may wait for its end
  EXPECT_THAT(Drain(&credit_), ElementsAre("micro_end", "micro_begin", "1.0", "3.0", "3.1"));
  ASSERT_TRUE(step_->MayEnd(/*discard=*/false).ok());
  End(1.5);
  EXPECT_THAT(Drain(&credit_), ElementsAre("micro_end", "step_end"));
}

TEST_F(MicroBatchesTest, AStepMayEndWithFewer) {
  v1::StepBegin begin;
  begin.set_step(7);
  step_ = std::make_unique<OpenStep>(tensors_, begin, /*micros=*/5, absl::UnixEpoch());
  step_->EndMicro(0.5);
  step_->EndMicro(0.5, /*next_is_last=*/true);
  EXPECT_EQ(step_->MayEndMicro().code(), absl::StatusCode::kFailedPrecondition);
  ASSERT_TRUE(step_->MayEnd(/*discard=*/false).ok());
  End(1.5);
  std::vector<bool> last;
  std::vector<double> losses;
  while (step_->HasRequest(credit_)) {
    v1::TrainRequest request;
    step_->NextRequest(&credit_, &request);
    if (request.has_micro_begin()) last.push_back(request.micro_begin().last());
    if (request.has_micro_end()) losses.push_back(request.micro_end().loss());
  }
  EXPECT_THAT(last, ElementsAre(false, false, true));
  EXPECT_THAT(losses, ElementsAre(0.5, 0.5, 1.5));
}

TEST_F(MicroBatchesTest, ResumeLeavesOutWhatIsHeldOfEach) {
  Push(0);
  step_->EndMicro(std::nullopt);
  Push(0);
  End(std::nullopt);
  Drain(&credit_);
  v1::AttachResponse grant;
  grant.add_held()->set_chunks(PackBits({true, true, true}));
  ExpectSendsTheRest(grant);
}

TEST_F(MicroBatchesTest, ResumeLeavesOutWhatIsHeldAsAWhole) {
  Push(0);
  Push(3);
  step_->EndMicro(std::nullopt);
  Push(0);
  Push(1);
  Push(3);
  End(std::nullopt);
  Drain(&credit_);
  v1::AttachResponse grant;
  grant.add_held()->set_whole_micros(1);
  v1::ChunksHeld* held = grant.add_held();
  held->set_micro(1);
  held->set_whole_tensors(PackBits({false, true, false, true}));
  ExpectSendsTheRest(grant);
}

TEST_F(OpenStepTest, ResumeOfAClosedStepSendsNothing) {
  Push(1);
  End(std::nullopt);
  Drain(&credit_);
  v1::AttachResponse grant;
  grant.set_resume_step(8);
  v1::Open open;
  ASSERT_TRUE(step_->Resume(grant, &open).ok());
  EXPECT_THAT(Drain(&credit_), ElementsAre());
}

TEST_F(OpenStepTest, ResumeAtAnEarlierStepIsRefused) {
  v1::Open open;
  v1::AttachResponse grant;
  grant.set_resume_step(6);
  EXPECT_EQ(step_->Resume(grant, &open).code(), absl::StatusCode::kFailedPrecondition);
}

TEST_F(OpenStepTest, ResumeAtALaterStepAwaitsTheResultAndSendsNothing) {
  for (const uint64_t step : {8, 9, 300}) {
    v1::Open open;
    v1::AttachResponse grant;
    grant.set_resume_step(step);
    EXPECT_TRUE(step_->Resume(grant, &open).ok()) << step;
    EXPECT_EQ(open.weights_step(), 7u);
    EXPECT_FALSE(step_->HasRequest(CreditWindow(1 << 20, 0)));
    EXPECT_FALSE(step_->has_result());
  }
}

TEST_F(OpenStepTest, AResultBeforeTheEndStopsTheSendingAndIsKept) {
  Push(0);
  v1::StepResult aborted;
  aborted.set_step(7);
  aborted.set_outcome(v1::STEP_OUTCOME_ABORTED);
  Freed freed;
  ASSERT_TRUE(step_->SetResult(aborted, &freed).ok());
  EXPECT_EQ(Bytes(freed.chunks), 40u);
  EXPECT_FALSE(step_->done());
  Push(1);
  EXPECT_FALSE(step_->HasRequest(credit_));
  End(std::nullopt, {}, absl::UnixEpoch() + absl::Seconds(2));
  EXPECT_TRUE(step_->done());
  EXPECT_EQ(step_->result(absl::UnixEpoch() + absl::Seconds(3)).timing.backward_s, 2);
  EXPECT_EQ(step_->result(absl::UnixEpoch() + absl::Seconds(3)).timing.wait_s, 1);
}

TEST(TensorTableTest, CountsElementsChunksAndFormats) {
  v1::RunSpec spec = FakeSpec();
  spec.mutable_groups(0)->set_serving("bf16");
  const TensorTable tensors = TensorTable::Create(spec, 4).value();
  EXPECT_EQ(tensors[0].chunks, 3u);
  EXPECT_EQ(tensors[2].elements, 1u);
  EXPECT_EQ(tensors[0].gradient_bytes(), 40u);
  EXPECT_EQ(tensors[0].weight_bytes(), 20u);
  EXPECT_EQ(tensors.Name(3), "tensor 3 'd'");
}

TEST(TensorTableTest, AFormatFromTheFutureIsNamed) {
  v1::RunSpec spec = FakeSpec();
  spec.mutable_tensors(1)->set_dtype("fp8");
  EXPECT_EQ(TensorTable::Create(spec, 4).status().code(), absl::StatusCode::kUnimplemented);
}

}  // namespace
}  // namespace ballast
