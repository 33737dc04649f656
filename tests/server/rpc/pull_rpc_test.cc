#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include "server/store/pulls.h"
#include "tests/server/rpc/rpc_fixture.h"

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
  std::map<uint64_t, std::string> of_step = {{0, t.reference->EncodeWeights(0)}};
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
      of_step[step] = t.reference->EncodeWeights(0);
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

// Snapshots are pulled between pulls of the latest weights, in formats whose scales belong to the weights served.
TEST_F(PullRpcTest, ASnapshotsWeightsAreThoseOfItsStep) {
  for (const char* serving : {"fp32", "int8-row", "int8-tensor"}) {
    SCOPED_TRACE(serving);
    v1::RunSpec spec = SmallSpec();
    spec.set_run_id(serving);
    spec.mutable_groups(0)->set_serving(serving);
    spec.mutable_rewind()->set_snapshots(2);
    spec.mutable_rewind()->set_every(2);
    Trainer t = StartTrainer(spec);
    std::map<uint64_t, StepAnswer> of_step;
    for (uint64_t step = 1; step <= 6; ++step) {
      of_step[step] = Step(&t, step);
      for (const uint64_t kept : {step, step - 2}) {
        if (kept % 2 != 0 || kept == 0 || kept > step) continue;
        v1::PullRequest request;
        request.set_run_id(serving);
        StepAnswer latest, snapshot;
        ASSERT_TRUE(Pull(request, &latest).ok());
        request.set_step(kept);
        ASSERT_TRUE(Pull(request, &snapshot).ok());
        EXPECT_EQ(latest.weights, of_step[step].weights) << step;
        EXPECT_EQ(latest.scales, of_step[step].scales) << step;
        EXPECT_EQ(snapshot.weights, of_step[kept].weights) << kept << " at " << step;
        EXPECT_EQ(snapshot.scales, of_step[kept].scales) << kept << " at " << step;
        EXPECT_EQ(snapshot.labels, of_step[kept].labels) << kept << " at " << step;
      }
    }
  }
}

TEST_F(PullRpcTest, AStepWithoutASnapshotIsRefusedAndTheKeptAreNamed) {
  v1::RunSpec spec = SmallSpec();
  spec.mutable_rewind()->set_snapshots(2);
  spec.mutable_rewind()->set_every(1);
  Trainer t = StartTrainer(spec);
  for (uint64_t step = 1; step <= 3; ++step) Step(&t, step);
  v1::PullRequest request;
  request.set_run_id("r1");
  for (const uint64_t step : {1u, 4u}) {
    request.set_step(step);
    StepAnswer answer;
    const grpc::Status refused = Pull(request, &answer);
    EXPECT_EQ(refused.error_code(), grpc::FAILED_PRECONDITION);
    EXPECT_THAT(refused.error_message(), HasSubstr("kept are those of steps 2, 3"));
    EXPECT_TRUE(answer.weights.empty());
  }
}

TEST_F(PullRpcTest, ASnapshotThatGoesWhileItIsPulledEndsThePull) {
  v1::RunSpec spec = MakeSpec("r1", {{"w", {2500000}, "fp32"}});
  spec.mutable_rewind()->set_snapshots(1);
  spec.mutable_rewind()->set_every(1);
  Trainer t = StartTrainer(spec);
  Step(&t, 1);
  v1::PullRequest request;
  request.set_run_id("r1");
  request.set_step(1);
  grpc::ClientContext context;
  const auto reader = trainer_->Pull(&context, request);
  v1::Weights w;
  ASSERT_TRUE(reader->Read(&w));
  EXPECT_EQ(w.step(), 1u);
  Step(&t, 2);  // more than the transport holds was not read
  while (reader->Read(&w)) EXPECT_EQ(w.step(), 1u);
  const grpc::Status ended = reader->Finish();
  EXPECT_EQ(ended.error_code(), grpc::FAILED_PRECONDITION);
  EXPECT_THAT(ended.error_message(), HasSubstr("is kept no longer"));
}

TEST_F(PullRpcTest, TensorsThatTheReaderHasAreNotSent) {
  v1::RunSpec spec = SmallSpec();
  spec.mutable_groups(0)->set_serving("int8-row");
  Trainer t = StartTrainer(spec);
  for (uint64_t step = 1; step <= 2; ++step) {
    v1::PullRequest request;
    request.set_run_id("r1");
    for (const uint32_t tensor : {2u, 0u, 1u}) {
      request.add_tensors(tensor);
      request.add_digests(t.reference->Digest(tensor) + (tensor == 0 ? 1 : 0));
    }
    StepAnswer answer;
    ASSERT_TRUE(Pull(request, &answer).ok());
    EXPECT_EQ(answer.weights.size(), 1u);
    EXPECT_TRUE(Equal(answer, *t.reference, 0));
    Step(&t, step);
    answer = {};
    ASSERT_TRUE(Pull(request, &answer).ok());
    EXPECT_EQ(answer.weights.size(), 3u);
    for (uint32_t i = 0; i < 3; ++i) EXPECT_TRUE(Equal(answer, *t.reference, i)) << i;
  }
}

TEST_F(PullRpcTest, DigestsThatCannotBeComparedAreRefused) {
  Trainer t = StartTrainer(SmallSpec());
  v1::PullRequest request;
  StepAnswer answer;
  request.set_run_id("r1");
  request.add_digests(1);
  EXPECT_THAT(Pull(request, &answer).error_message(), HasSubstr("1 digests for 3 tensors"));
  request.add_tensors(0);
  request.set_step(1);
  EXPECT_EQ(Pull(request, &answer).error_code(), grpc::INVALID_ARGUMENT);
}

// A run of one rank with more weights than the transport holds.
class StalledPullRpcTest : public RpcTest {
 protected:
  static constexpr size_t kMost = 1 + kMoreReaders;
  // One that has read its first chunk, and reads no more by itself.
  struct Reader {
    std::unique_ptr<grpc::ClientContext> context = std::make_unique<grpc::ClientContext>();
    std::unique_ptr<grpc::ClientReader<v1::Weights>> stream;
  };

  void Start(double pull_timeout_s) {
    Config config = DefaultConfig();
    config.limits.pull_timeout_s = pull_timeout_s;
    StartServer(config);
    training_ = StartTrainer(MakeSpec("r1", {{"w", {2500000}, "fp32"}, {"v", {5000}, "fp32"}}));
  }
  Reader Begin(uint32_t tensor = 0) {
    v1::PullRequest request;
    request.set_run_id("r1");
    request.add_tensors(tensor);
    Reader reader;
    reader.stream = trainer_->Pull(reader.context.get(), request);
    return reader;
  }
  std::vector<Reader> Stall(size_t count) {
    std::vector<Reader> readers;
    v1::Weights w;
    for (size_t i = 0; i < count; ++i) {
      readers.push_back(Begin());
      EXPECT_TRUE(readers[i].stream->Read(&w));
    }
    return readers;
  }
  static grpc::Status ReadOn(Reader* reader) {
    v1::Weights w;
    while (reader->stream->Read(&w)) continue;
    return reader->stream->Finish();
  }

  Trainer training_;
};

TEST_F(StalledPullRpcTest, AsManyAsRanksAndSomeMoreAreServedAndTheNextIsToldWhenToAskAgain) {
  Start(3600);
  std::vector<Reader> readers = Stall(kMost);
  Reader beyond = Begin(1);
  const grpc::Status refused = ReadOn(&beyond);
  EXPECT_EQ(refused.error_code(), grpc::RESOURCE_EXHAUSTED);
  EXPECT_EQ(beyond.context->GetServerTrailingMetadata().count("ballast-retry-after-ms"), 1u);
  readers.back().context->TryCancel();
  EXPECT_EQ(ReadOn(&readers.back()).error_code(), grpc::CANCELLED);
  readers.pop_back();
  for (grpc::Status s = refused; !s.ok();) {  // until the daemon has heard of it
    beyond = Begin(1);
    s = ReadOn(&beyond);
    ASSERT_TRUE(s.ok() || s.error_code() == grpc::RESOURCE_EXHAUSTED) << s.error_message();
  }
  for (Reader& reader : readers) EXPECT_TRUE(ReadOn(&reader).ok());
}

TEST_F(StalledPullRpcTest, AReaderThatTakesNothingLosesItsPull) {
  Start(0.1);
  std::vector<Reader> readers = Stall(kMost);
  for (grpc::Status s(grpc::RESOURCE_EXHAUSTED, ""); !s.ok();) {  // until their time is up
    Reader another = Begin(1);
    s = ReadOn(&another);
    ASSERT_TRUE(s.ok() || s.error_code() == grpc::RESOURCE_EXHAUSTED) << s.error_message();
  }
  EXPECT_TRUE(Equal(Step(&training_, 1), *training_.reference, 1));
  int lost = 0;
  for (Reader& reader : readers) {
    const grpc::Status s = ReadOn(&reader);
    if (s.ok()) continue;  // the first to lose its place made room; this one's time was not up
    ++lost;
    if (s.error_code() == grpc::CANCELLED) continue;  // it came back too late to be told more
    EXPECT_EQ(s.error_code(), grpc::UNAVAILABLE);
    EXPECT_THAT(s.error_message(), HasSubstr("limits.pull_timeout"));
  }
  EXPECT_GT(lost, 0);
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
