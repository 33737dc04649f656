#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include <cmath>
#include <limits>
#include <set>

#include "proto/checksum.h"

#include "server/plan/plan.h"
#include "tests/server/rpc/rpc_fixture.h"

namespace ballast::testing {
namespace {

using ::testing::ElementsAre;
using ::testing::HasSubstr;
using ::testing::Not;

class TrainRpcTest : public RpcTest {
 protected:
  void SetUp() override { StartServer(); }

  // One whose pools are as small as their largest tensors allow.
  void StartServerWithLeastCredit() {
    server_.reset();
    Config config = DefaultConfig();
    config.limits.credit_bytes = 1;
    StartServer(config);
  }

  // "w0" to "w9" in bf16; elements: by number.
  static v1::RunSpec TenTensors(int (*elements)(int number)) {
    v1::RunSpec spec = MakeSpec("r1", {});
    for (int i = 0; i < 10; ++i) {
      v1::TensorSpec* tensor = spec.add_tensors();
      tensor->set_name("w" + std::to_string(i));
      tensor->add_shape(elements(i));
      tensor->set_dtype("bf16");
    }
    return spec;
  }

  // To the bit, all tensors.
  void ExpectThreeStepsAsTheReference(Trainer* t) {
    for (uint64_t step = 1; step <= 3; ++step) {
      const StepAnswer answer = Step(t, step);
      ASSERT_TRUE(answer.result) << t->wire->Finish().error_message();
      for (uint32_t i = 0; i < t->spec.tensors.size(); ++i) EXPECT_TRUE(Equal(answer, *t->reference, i)) << i;
    }
  }

  // Two steps, to the bit.
  void TrainAndDelete(const v1::RunSpec& spec) {
    Trainer t = StartTrainer(spec);
    for (uint64_t step = 1; step <= 2; ++step) {
      const StepAnswer answer = Step(&t, step);
      for (uint32_t i = 0; i < 3; ++i) ASSERT_TRUE(Equal(answer, *t.reference, i)) << "tensor " << i;
    }
    t.wire->Hang();
    grpc::ClientContext context;
    v1::DeleteRunRequest request;
    request.set_run_id(spec.run_id());
    request.set_force(true);
    v1::DeleteRunResponse response;
    ASSERT_TRUE(admin_->DeleteRun(&context, request, &response).ok());
  }
};

TEST_F(TrainRpcTest, StepsGiveTheBitsOfTheKernels) {
  Trainer t = StartTrainer(SmallSpec());
  for (uint64_t step = 1; step <= 12; ++step) {
    const StepAnswer answer = Step(&t, step, 1e-3 / static_cast<double>(step));
    ASSERT_TRUE(answer.result) << t.wire->Finish().error_message();
    EXPECT_EQ(answer.result->outcome(), v1::STEP_OUTCOME_APPLIED);
    EXPECT_EQ(answer.result->step(), step);
    EXPECT_TRUE(answer.checksums_right);
    double grad_sq = 0;
    for (uint32_t i = 0; i < 3; ++i) {
      EXPECT_TRUE(Equal(answer, *t.reference, i)) << "tensor " << i << ", step " << step;
      EXPECT_EQ(answer.labels.at(i), step);
      grad_sq += t.reference->statistics(i).grad_sq;
    }
    EXPECT_EQ(answer.result->grad_norm(), std::sqrt(grad_sq));
    EXPECT_EQ(answer.result->clip_coefficient(), 1);
    EXPECT_EQ(answer.credit, 30000u * 2 + 4096 * 4 + 5 * 2);
  }
}

// Every kernel with one format each way, every master with every serving format, every gradient format.
TEST_F(TrainRpcTest, EveryKernelRoundingAndFormatTrains) {
  std::vector<const char*> servings, gradients;
  for (const kernels::WireFormat& format : kernels::WireFormats()) {
    if (format.serving) servings.push_back(format.name);
    if (format.gradient) gradients.push_back(format.name);
  }
  std::set<std::string> masters;
  size_t n = 0;
  for (const kernels::Kernel& kernel : kernels::Kernels()) {
    if (kernel.fit != nullptr) continue;  // muon_rpc_test.cc
    const size_t times = masters.insert(kernel.master).second ? servings.size() : 1;
    for (size_t i = 0; i < times; ++i) {
      v1::RunSpec spec = SmallSpec();
      spec.set_run_id("r" + std::to_string(++n));
      v1::GroupSpec* group = spec.mutable_groups(0);
      group->set_rule(kernel.rule);
      group->set_master(kernel.master);
      group->set_state(kernel.state);
      group->set_serving(servings[n % servings.size()]);
      if (n % 3 != 0) group->set_gradient(gradients[n % gradients.size()]);
      if (n % 2 == 0) group->set_rounding("nearest");
      spec.mutable_tensors(0)->set_lr_scale(0.5);
      spec.mutable_tensors(1)->set_wd_scale(0);
      SCOPED_TRACE(group->ShortDebugString());
      ASSERT_NO_FATAL_FAILURE(TrainAndDelete(spec));
    }
  }
}

TEST_F(TrainRpcTest, DigestsCoverCodesAndScales) {
  for (const char* serving : {"int8-row", "int8-tensor", "fp8-e4m3"}) {
    v1::RunSpec spec = SmallSpec();
    spec.set_run_id(serving);
    spec.mutable_groups(0)->set_serving(serving);
    Trainer t = StartTrainer(spec);
    Step(&t, 1);
    v1::AttachRequest request;
    request.set_run_id(serving);
    request.set_takeover(true);
    request.set_want_digests(true);
    v1::AttachResponse response;
    ASSERT_TRUE(Attach(request, &response).ok());
    ASSERT_EQ(response.digests_size(), 3);
    for (uint32_t i = 0; i < 3; ++i)
      EXPECT_EQ(response.digests(static_cast<int>(i)), t.reference->Digest(i)) << serving;
  }
}

TEST_F(TrainRpcTest, ARuleWithoutASecondMomentHasNoRms) {
  v1::RunSpec spec = SmallSpec();
  spec.mutable_groups(0)->set_rule("lion");
  Trainer t = StartTrainer(spec);
  Step(&t, 1);
  const v1::RunStatus status = Status("r1");
  EXPECT_FALSE(status.has_rms_ratio_max());
  ASSERT_EQ(status.layers_size(), 2);
  for (const v1::LayerStatistics& layer : status.layers()) {
    EXPECT_FALSE(layer.has_rms_ratio()) << layer.layer();
    EXPECT_GT(layer.gradient_norm(), 0) << layer.layer();
  }
  EXPECT_THAT(metrics_.Serialize(), Not(HasSubstr("ballast_rms_ratio{")));
  EXPECT_THAT(metrics_.Serialize(), HasSubstr("ballast_rms_ratio_distribution_count{run_id=\"r1\"} 0"));
}

TEST_F(TrainRpcTest, WeightsOfTwoComponentsReportTheFirstAlone) {
  v1::RunSpec spec = SmallSpec();
  spec.mutable_groups(0)->set_rule("collage_plus");
  Trainer t = StartTrainer(spec);
  Step(&t, 1, 1e-5);
  const v1::RunStatus status = Status("r1");
  EXPECT_EQ(status.optimizer(), "collage_plus/mcf/mcf");
  for (const v1::LayerStatistics& layer : status.layers()) {
    EXPECT_TRUE(layer.has_hi_edq_ratio()) << layer.layer();
    EXPECT_GT(layer.hi_unchanged_ratio(), layer.unchanged_ratio()) << layer.layer();
  }
  EXPECT_THAT(metrics_.Serialize(), HasSubstr("ballast_hi_edq_ratio{"));
}

TEST_F(TrainRpcTest, InterleavedChunksInAnyOrderGiveTheSameBits) {
  Trainer t = StartTrainer(SmallSpec());
  t.wire->Begin(1);
  auto a = Chunks(t.spec, 0, Gradient(t.spec, 0, 1)), b = Chunks(t.spec, 1, Gradient(t.spec, 1, 1));
  ASSERT_GT(a.size(), 3u);
  t.wire->Chunk(a[3]);
  t.wire->Chunk(b[0]);
  SendAll(t, 2, 1);
  for (size_t k = a.size(); k-- > 0;) {
    if (k != 3) t.wire->Chunk(a[k]);
  }
  t.wire->EndStep();
  const StepAnswer answer = ReadStep(t.wire.get());
  for (uint32_t i = 0; i < 3; ++i) {
    t.reference->Update(i, 1, Gradient(t.spec, i, 1));
    EXPECT_TRUE(Equal(answer, *t.reference, i)) << i;
  }
}

TEST_F(TrainRpcTest, AnAbsentTensorIsUntouchedAndNotSent) {
  Trainer t = StartTrainer(SmallSpec());
  t.wire->Begin(1);
  SendAll(t, 1, 1);
  t.wire->EndStep("\x05");
  const StepAnswer first = ReadStep(t.wire.get());
  ASSERT_TRUE(first.result);
  EXPECT_EQ(first.result->outcome(), v1::STEP_OUTCOME_APPLIED);
  EXPECT_EQ(first.weights.size(), 1u);
  EXPECT_EQ(first.result->tensors_not_applied_size(), 0);
  t.reference->Update(1, 1, Gradient(t.spec, 1, 1));
  // Its t did not move: the next update of tensor 0 is its first.
  const StepAnswer second = Step(&t, 2);
  for (uint32_t i = 0; i < 3; ++i) EXPECT_TRUE(Equal(second, *t.reference, i)) << i;
}

TEST_F(TrainRpcTest, ANonFiniteGradientIsCountedAndPoisonsNothing) {
  Trainer t = StartTrainer(SmallSpec());
  std::string gradient = Gradient(t.spec, 1, 1);
  const float nan = std::numeric_limits<float>::quiet_NaN(), inf = std::numeric_limits<float>::infinity();
  std::memcpy(gradient.data() + 4 * 40, &nan, 4);
  std::memcpy(gradient.data() + 4 * 41, &inf, 4);
  std::memcpy(gradient.data() + 4 * 4000, &inf, 4);
  t.wire->Begin(1);
  for (const auto& chunk : Chunks(t.spec, 1, gradient)) t.wire->Chunk(chunk);
  t.wire->EndStep("\x05");
  const StepAnswer answer = ReadStep(t.wire.get());
  ASSERT_TRUE(answer.result);
  EXPECT_EQ(answer.result->nonfinite_tensors(), 1u);
  EXPECT_EQ(answer.result->rejected_blocks(), 2u);
  EXPECT_EQ(answer.result->warnings_size(), 1);
  t.reference->Update(1, 1, gradient);
  EXPECT_TRUE(Equal(answer, *t.reference, 1));
  EXPECT_TRUE(std::isfinite(answer.result->grad_norm()));
}

TEST_F(TrainRpcTest, ADuplicateIsAcknowledgedAndIgnored) {
  Trainer t = StartTrainer(SmallSpec());
  t.wire->Begin(1);
  const auto chunks = Chunks(t.spec, 0, Gradient(t.spec, 0, 1));
  t.wire->Chunk(chunks[0]);
  t.wire->Chunk(chunks[0]);
  SendAll(t, 0, 1);
  t.wire->Chunk(chunks[1]);  // after its update began
  t.wire->EndStep("\x06");
  const StepAnswer answer = ReadStep(t.wire.get());
  ASSERT_TRUE(answer.result);
  EXPECT_EQ(answer.credit, 60000u + 3 * 8192);
  t.reference->Update(0, 1, Gradient(t.spec, 0, 1));
  EXPECT_TRUE(Equal(answer, *t.reference, 0));
}

TEST_F(TrainRpcTest, OtherBytesUnderTheSameKeyEndTheSession) {
  Trainer t = StartTrainer(SmallSpec());
  t.wire->Begin(1);
  v1::Gradient chunk = Chunks(t.spec, 0, Gradient(t.spec, 0, 1))[0];
  t.wire->Chunk(chunk);
  (*chunk.mutable_data())[5] = static_cast<char>(chunk.data()[5] ^ 1);
  chunk.set_crc32c(Crc32c(Bytes(chunk.data())));
  t.wire->Chunk(chunk);
  const grpc::Status s = t.wire->Finish();
  EXPECT_EQ(s.error_code(), grpc::DATA_LOSS);
  EXPECT_THAT(s.error_message(), HasSubstr("embed.weight"));
  v1::AttachRequest request;
  request.set_run_id("r1");
  request.set_session_token(t.token);
  v1::AttachResponse response;
  EXPECT_EQ(Attach(request, &response).error_code(), grpc::ABORTED);
  EXPECT_EQ(AttachFresh("r1").last_result().outcome(), v1::STEP_OUTCOME_ABORTED);
}

TEST_F(TrainRpcTest, StepBeginAcknowledgesTheWeightsOfTheStepBefore) {
  Trainer t = StartTrainer(SmallSpec());
  Step(&t, 1);
  t.wire->Begin(2);
  SendAll(t, 2, 2);
  t.wire->EndStep("\x03");
  const StepAnswer second = ReadStep(t.wire.get());
  ASSERT_TRUE(second.result);
  EXPECT_EQ(second.result->step(), 2u);
  EXPECT_EQ(second.weights.size(), 1u);
}

TEST_F(TrainRpcTest, TheStatusTellsWhatHappened) {
  Trainer t = StartTrainer(SmallSpec());
  EXPECT_EQ(Status("r1").state(), v1::RUN_STATE_WAITING);
  Step(&t, 1);
  const v1::RunStatus status = Status("r1");
  EXPECT_EQ(status.state(), v1::RUN_STATE_TRAINING);
  EXPECT_EQ(status.step(), 1u);
  EXPECT_EQ(status.loss(), 1.5);
  EXPECT_EQ(status.steps_applied(), 1u);
  EXPECT_EQ(status.parameters(), 34101u);
  EXPECT_EQ(status.optimizer(), "adamw/split24/companded8");
  EXPECT_EQ(status.received_bytes(), 30000u * 2 + 4096 * 4 + 5 * 2);
  EXPECT_EQ(status.sent_bytes(), status.received_bytes());
  EXPECT_GT(status.grad_norm(), 0);
  EXPECT_GT(status.rms_ratio_max(), 0);
  ASSERT_EQ(status.layers_size(), 2);
  for (const v1::LayerStatistics& layer : status.layers()) {
    EXPECT_GT(layer.gradient_norm(), 0) << layer.layer();
    EXPECT_GT(layer.update_to_weight_ratio(), 0) << layer.layer();
    EXPECT_NEAR(layer.edq_ratio(), 1, 0.3) << layer.layer();
  }
  EXPECT_THAT(status.ranks(), ElementsAre(HasSubstr("connected")));
}

TEST_F(TrainRpcTest, RunsDoNotDisturbEachOther) {
  v1::RunSpec other = SmallSpec();
  other.set_run_id("r2");
  Trainer a = StartTrainer(SmallSpec()), b = StartTrainer(other);
  a.wire->Begin(1);
  a.wire->Chunk(Chunks(a.spec, 0, Gradient(a.spec, 0, 1))[0]);
  const StepAnswer answer = Step(&b, 1);
  for (uint32_t i = 0; i < 3; ++i) EXPECT_TRUE(Equal(answer, *b.reference, i)) << i;
  a.wire->Hang();
  const StepAnswer second = Step(&b, 2);
  for (uint32_t i = 0; i < 3; ++i) EXPECT_TRUE(Equal(second, *b.reference, i)) << i;
}

// A pool of two gradients, three half sent: the daemon names what it waits for, and takes it beyond the credit.
TEST_F(TrainRpcTest, APoolFullOfHalfSentTensorsNamesTheChunkItWants) {
  StartServerWithLeastCredit();
  Trainer t = StartTrainer(MakeSpec("r1", {{"a", {8192}}, {"b", {8192}}, {"c", {8192}}}));
  t.wire->Begin(1);
  for (uint32_t i = 0; i < 3; ++i) t.wire->Chunk(Chunks(t.spec, i, Gradient(t.spec, i, 1))[0]);
  std::optional<v1::TrainResponse> answer;
  do {
    answer = t.wire->Read();
    ASSERT_TRUE(answer) << t.wire->Finish().error_message();
  } while (!answer->credit().has_wanted());
  EXPECT_EQ(answer->credit().wanted().tensor(), 0u);
  EXPECT_EQ(answer->credit().wanted().chunk(), 1u);
  for (uint32_t i = 0; i < 3; ++i) {
    t.wire->Chunk(Chunks(t.spec, i, Gradient(t.spec, i, 1))[1]);
    t.reference->Update(i, 1, Gradient(t.spec, i, 1));
  }
  t.wire->EndStep();
  const StepAnswer step = ReadStep(t.wire.get());
  for (uint32_t i = 0; i < 3; ++i) EXPECT_TRUE(Equal(step, *t.reference, i)) << i;
}

// A client that ignores the wanted chunk, and sends more than is taken, gets an error and does not hang.
TEST_F(TrainRpcTest, WhoSendsWithoutCreditAroundTheWantedChunkIsRefused) {
  StartServerWithLeastCredit();
  Trainer t = StartTrainer(MakeSpec("r1", {{"a", {100000}}, {"b", {100000}}, {"c", {100000}}}));
  t.wire->Begin(1);
  for (uint32_t i = 0; i < 2; ++i) t.wire->Chunk(Chunks(t.spec, i, Gradient(t.spec, i, 1))[0]);
  SendAll(t, 2, 1);
  const grpc::Status s = t.wire->Finish();
  EXPECT_EQ(s.error_code(), grpc::RESOURCE_EXHAUSTED);
  EXPECT_THAT(s.error_message(), HasSubstr("chunk 1 of tensor 'a'"));
  const v1::AttachResponse resumed = Resume("r1", t.token);
  EXPECT_TRUE(resumed.step_open());
  EXPECT_EQ(resumed.held_size(), 3);
  EXPECT_GT(resumed.credit_held(), 0u);
}

// Ten tensors, each a third of a pool that holds two, sent as fast as the wire takes them: parked, never refused.
TEST_F(TrainRpcTest, AFullPoolParksWhatComesUntilUpdatesFreeIt) {
  StartServerWithLeastCredit();
  const v1::RunSpec spec = TenTensors([](int i) { return 50000 + i; });
  Trainer t = StartTrainer(spec);
  ExpectThreeStepsAsTheReference(&t);
}

// The pool has room for the largest tensor with two small ones: sent last, it waits until all of theirs are read.
TEST_F(TrainRpcTest, ATensorThatFillsThePoolWaitsForTheSmallOnes) {
  StartServerWithLeastCredit();
  const v1::RunSpec spec = TenTensors([](int i) { return i < 9 ? 20000 : 100000; });
  Trainer t = StartTrainer(spec);
  const Plan plan = MakePlan(t.spec);
  ASSERT_LT(plan.shards[0].pool_bytes, plan.push_bytes);
  ASSERT_LT(plan.shards[0].pool_bytes, 2 * SlabBytes(t.spec, t.spec.tensors[9]));
  ExpectThreeStepsAsTheReference(&t);
}

}  // namespace
}  // namespace ballast::testing
