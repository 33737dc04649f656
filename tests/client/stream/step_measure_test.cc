// Steps whose last micro-batch is not announced, that are measured before they end, or discarded.
#include <cmath>

#include "tests/client/stream/open_step_fixture.h"

namespace ballast {
namespace {

using ::testing::ElementsAre;

class StepMeasureTest : public OpenStepTest {
 protected:
  void Begin(uint32_t micros) {
    v1::StepBegin begin;
    begin.set_step(7);
    step_ = std::make_unique<OpenStep>(tensors_, begin, micros, absl::UnixEpoch());
  }
};

// Whichever micro-batch the step is ended in is its last; none is announced, at a resume neither.
TEST_F(StepMeasureTest, AStepWhoseNumberIsNotKnownAnnouncesNone) {
  Begin(/*micros=*/0);
  Push(1);
  ASSERT_TRUE(step_->MayEndMicro().ok());
  step_->EndMicro(0.5);
  EXPECT_THAT(Drain(&credit_), ElementsAre("step_begin", "micro_begin", "1.0", "micro_end", "micro_begin"));
  Push(1);
  EXPECT_EQ(step_->MayPush(1).code(), absl::StatusCode::kFailedPrecondition);
  ASSERT_TRUE(step_->MayEnd(/*discard=*/false).ok());
  End(1.5);
  EXPECT_EQ(step_->MayEndMicro().code(), absl::StatusCode::kFailedPrecondition);
  EXPECT_THAT(Drain(&credit_), ElementsAre("1.0", "micro_end", "step_end"));
  v1::Open open;
  ASSERT_TRUE(step_->Resume(Holding(1, {true}), &open).ok());
  std::vector<bool> last;
  while (step_->HasRequest(credit_)) {
    v1::TrainRequest request;
    step_->NextRequest(&credit_, &request);
    if (request.has_micro_begin()) last.push_back(request.micro_begin().last());
    step_->Sent(&request);
  }
  EXPECT_THAT(last, ElementsAre(false, false));
}

// The answer comes on each stream that asks, and counts once.
TEST_F(StepMeasureTest, AMeasureFollowsTheLastMicroBatchAndIsSaidAgain) {
  Begin(/*micros=*/2);
  step_->EndMicro(0.5);
  Push(3);
  auto measured = step_->Measure(std::nullopt, absl::UnixEpoch() + absl::Seconds(1));
  EXPECT_EQ(step_->MayPush(1).code(), absl::StatusCode::kFailedPrecondition);
  EXPECT_EQ(step_->MayMeasure().code(), absl::StatusCode::kFailedPrecondition);
  EXPECT_EQ(step_->MayEndMicro().code(), absl::StatusCode::kFailedPrecondition);
  EXPECT_THAT(Drain(&credit_), ElementsAre("step_begin", "micro_begin", "micro_end", "micro_begin", "3.0", "3.1",
                                           "micro_end", "step_measure"));
  v1::StepMeasured answer;
  answer.set_step(7);
  answer.set_grad_norm(0.25);
  answer.set_nonfinite_tensors(1);
  step_->SetMeasured(answer);
  answer.set_grad_norm(9);
  step_->SetMeasured(answer);
  const absl::StatusOr<MeasuredStep> heard = measured.get();
  ASSERT_TRUE(heard.ok());
  EXPECT_EQ(heard->grad_norm, 0.25);
  EXPECT_EQ(heard->nonfinite_tensors, 1u);
  EXPECT_TRUE(heard->measured);
  End(1.5, {}, absl::UnixEpoch() + absl::Seconds(5));
  v1::TrainRequest request;
  step_->NextRequest(&credit_, &request);
  EXPECT_EQ(request.step_end().loss(), 1.5);  // the measure had none
  v1::Open open;
  v1::AttachResponse grant = Holding(3, {true, true});
  grant.mutable_held(0)->set_micro(1);
  ASSERT_TRUE(step_->Resume(grant, &open).ok());
  EXPECT_THAT(Drain(&credit_), ElementsAre("step_begin", "micro_begin", "micro_end", "micro_begin", "micro_end",
                                           "step_measure", "step_end"));
  v1::StepResult skipped;
  skipped.set_outcome(v1::STEP_OUTCOME_SKIPPED);
  Freed freed;
  ASSERT_TRUE(step_->SetResult(skipped, &freed).ok());
  EXPECT_EQ(step_->result(absl::UnixEpoch() + absl::Seconds(8)).timing.backward_s, 1);
  EXPECT_EQ(step_->result(absl::UnixEpoch() + absl::Seconds(8)).timing.wait_s, 3);
}

TEST_F(StepMeasureTest, AStepThatClosesOrIsDiscardedIsNotMeasured) {
  for (const bool discarded : {false, true}) {
    Begin(/*micros=*/1);
    auto measured = step_->Measure(0.5, absl::UnixEpoch());
    v1::StepMeasured answer;
    answer.set_step(7);
    answer.set_discarded(true);
    v1::StepResult aborted;
    aborted.set_outcome(v1::STEP_OUTCOME_ABORTED);
    Freed freed;
    if (discarded) step_->SetMeasured(answer);
    ASSERT_TRUE(step_->SetResult(aborted, &freed).ok());
    const MeasuredStep heard = measured.get().value();
    EXPECT_FALSE(heard.measured);
    EXPECT_TRUE(std::isnan(heard.grad_norm));
  }
}

// What is queued is dropped, in whatever micro-batch, and at a resume nothing of it is missed.
TEST_F(StepMeasureTest, ADiscardDropsWhatIsNotSentAndGoesNext) {
  Begin(/*micros=*/2);
  CreditWindow credit(16);
  Push(0);
  EXPECT_THAT(Drain(&credit), ElementsAre("step_begin", "micro_begin", "0.0"));
  v1::StepEnd end;
  end.set_discard(true);
  EXPECT_EQ(step_->MayEnd(/*discard=*/false).code(), absl::StatusCode::kFailedPrecondition);
  ASSERT_TRUE(step_->MayEnd(/*discard=*/true).ok());
  EXPECT_EQ(Bytes(End(std::nullopt, end)), 40u);
  EXPECT_THAT(Drain(&credit), ElementsAre("step_end"));
  EXPECT_EQ(Acknowledge(1), 0u);
  v1::Open open;
  ASSERT_TRUE(step_->Resume(Holding(0, {false, false, false}), &open).ok());
  EXPECT_THAT(Drain(&credit), ElementsAre("step_begin", "step_end"));
}

}  // namespace
}  // namespace ballast
