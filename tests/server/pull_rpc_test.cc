#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include "tests/server/rpc_fixture.h"

namespace ballast::testing {
namespace {

using ::testing::HasSubstr;

class PullRpcTest : public RpcTest {
 protected:
  void SetUp() override { StartServer(); }
  grpc::Status Pull(const v1::PullRequest& request, StepAnswer* answer) {
    grpc::ClientContext context;
    const auto reader = trainer_->Pull(&context, request);
    v1::Weights w;
    while (reader->Read(&w)) Take(w, answer);
    return reader->Finish();
  }
};

TEST_F(PullRpcTest, GivesTheLatestWeightsLabelledWithTheirStep) {
  Trainer t = StartTrainer(SmallSpec());
  v1::PullRequest request;
  request.set_run_id("r1");
  StepAnswer answer;
  ASSERT_TRUE(Pull(request, &answer).ok());
  for (uint32_t i = 0; i < 3; ++i) {
    EXPECT_TRUE(Equal(answer, *t.reference, i)) << i;
    EXPECT_EQ(answer.labels.at(i), 0u);
  }
  Step(&t, 1);
  Step(&t, 2);
  request.add_tensors(1);
  answer = {};
  ASSERT_TRUE(Pull(request, &answer).ok());
  EXPECT_EQ(answer.weights.size(), 1u);
  EXPECT_TRUE(Equal(answer, *t.reference, 1));
  EXPECT_EQ(answer.labels.at(1), 2u);
}

TEST_F(PullRpcTest, WeightsWithScalesComeWithThoseOfTheirStep) {
  v1::RunSpec spec = SmallSpec();
  spec.mutable_groups(0)->set_serving("int8-row");
  Trainer t = StartTrainer(spec);
  v1::PullRequest request;
  request.set_run_id("r1");
  for (uint64_t step = 0; step < 3; ++step) {
    if (step > 0) Step(&t, step);
    StepAnswer answer;
    ASSERT_TRUE(Pull(request, &answer).ok());
    for (uint32_t i = 0; i < 3; ++i) EXPECT_TRUE(Equal(answer, *t.reference, i)) << i << ", step " << step;
    EXPECT_EQ(t.reference->Scales(0).size(), 300u);
    EXPECT_EQ(t.reference->Scales(2).size(), 1u);
  }
}

TEST_F(PullRpcTest, EachTensorIsOfOneStepWhileTrainingGoesOn) {
  Trainer t = StartTrainer(MakeSpec("r1", {{"w", {400000}}}));
  std::map<uint64_t, std::string> of_step = {{0, t.reference->Serve(0)}};
  v1::PullRequest request;
  request.set_run_id("r1");
  grpc::ClientContext context;
  const auto reader = trainer_->Pull(&context, request);
  std::string pulled;
  uint64_t label = 0;
  v1::Weights w;
  uint64_t step = 0;
  while (reader->Read(&w)) {
    if (w.chunk() == 0) pulled.clear();
    if (w.chunk() > 0) {
      EXPECT_EQ(w.step(), label);
    }
    label = w.step();
    pulled += w.data();
    if (step < 3) {
      Step(&t, ++step);
      of_step[step] = t.reference->Serve(0);
    }
  }
  ASSERT_TRUE(reader->Finish().ok());
  EXPECT_EQ(pulled, of_step.at(label));
}

TEST_F(PullRpcTest, RefusesByName) {
  ASSERT_TRUE(CreateRun(SmallSpec()).ok());
  v1::PullRequest request;
  StepAnswer answer;
  request.set_run_id("no");
  EXPECT_EQ(Pull(request, &answer).error_code(), grpc::NOT_FOUND);
  request.set_run_id("r1");
  EXPECT_EQ(Pull(request, &answer).error_code(), grpc::FAILED_PRECONDITION);
  request.add_tensors(9);
  EXPECT_THAT(Pull(request, &answer).error_message(), HasSubstr("tensor 9: run 'r1' has 3 tensors"));
}

TEST_F(PullRpcTest, AReaderThatLeavesHarmsNothing) {
  Trainer t = StartTrainer(MakeSpec("r1", {{"w", {400000}}}));
  for (int i = 0; i < 20; ++i) {
    v1::PullRequest request;
    request.set_run_id("r1");
    grpc::ClientContext context;
    const auto reader = trainer_->Pull(&context, request);
    v1::Weights w;
    for (int k = 0; k < i % 5; ++k) reader->Read(&w);
    context.TryCancel();
    reader->Finish();
  }
  const StepAnswer answer = Step(&t, 1);
  EXPECT_TRUE(Equal(answer, *t.reference, 0));
}

}  // namespace
}  // namespace ballast::testing
