// Batches: many small messages in one, both ways.
#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include "proto/batch.h"

#include "tests/server/rpc/rpc_fixture.h"

namespace ballast::testing {
namespace {

using ::testing::HasSubstr;

constexpr uint32_t kTensors = 500;

void AddTensor(int64_t elements, const std::string& dtype, v1::RunSpec* spec) {
  v1::TensorSpec* t = spec->add_tensors();
  t->set_name(absl::StrCat("t", spec->tensors_size()));
  t->add_shape(elements);
  t->set_dtype(dtype);
}

v1::RunSpec ManySmallTensors() {
  v1::RunSpec spec = MakeSpec("many", {});
  for (uint32_t i = 0; i < kTensors; ++i) AddTensor(5 + i % 7, "bf16", &spec);
  return spec;
}

class BatchRpcTest : public RpcTest {
 protected:
  void SetUp() override { StartServer(); }
  // With a stream that takes batches.
  Trainer Start(const v1::RunSpec& spec) {
    Trainer t = StartTrainer(spec);
    t.wire = std::make_unique<Wire>(trainer_.get());
    v1::Open open;
    open.set_takes_batches(true);
    EXPECT_TRUE(t.wire->Open(t.token, open));
    return t;
  }
  static void ExpectWhole(const Trainer& t, const StepAnswer& answer) {
    ASSERT_TRUE(answer.result);
    EXPECT_TRUE(answer.checksums_right);
    for (uint32_t i = 0; i < t.spec.tensors.size(); ++i) EXPECT_TRUE(Equal(answer, *t.reference, i)) << i;
  }
};

// A stream of this transport alone: the other one's begins with a hello of its own.
TEST_F(BatchRpcTest, AStreamThatNeverSaysAnythingIsEnded) {
  server_.reset();
  Config config = DefaultConfig();
  config.limits.open_timeout_s = 0.2;
  StartServer(config);
  grpc::ClientContext context;
  const auto stream = trainer_->Train(&context);
  v1::TrainResponse response;
  EXPECT_FALSE(stream->Read(&response));
  const grpc::Status ended = stream->Finish();
  EXPECT_EQ(ended.error_code(), grpc::INVALID_ARGUMENT);
  EXPECT_THAT(ended.error_message(), HasSubstr("limits.open_timeout"));
}

TEST_F(BatchRpcTest, AStepInOneMessageIsTheStep) {
  Trainer t = Start(ManySmallTensors());
  for (const uint64_t step : {1, 2, 3}) {
    t.wire->Hold();
    t.wire->Begin(step);
    for (uint32_t i = 0; i < kTensors; ++i) {
      SendAll(t, i, step);
      t.reference->Update(i, step, Gradient(t.spec, i, step));
    }
    t.wire->EndStep();
    ASSERT_TRUE(t.wire->Release());
    ExpectWhole(t, ReadStep(t.wire.get()));
  }
}

// What waits while something is being written goes in one batch: on a busy machine, where little waits, not in each step.
TEST_F(BatchRpcTest, OnlyAClientThatTakesBatchesGetsThem) {
  constexpr uint64_t kMostSteps = 100;
  Trainer apart = StartTrainer(ManySmallTensors());
  ExpectWhole(apart, Step(&apart, 1));
  EXPECT_EQ(apart.wire->batches_read(), 0u);
  v1::RunSpec spec = ManySmallTensors();
  spec.set_run_id("together");
  Trainer t = Start(spec);
  for (uint64_t step = 1; step <= kMostSteps && t.wire->batches_read() == 0; ++step) ExpectWhole(t, Step(&t, step));
  EXPECT_GT(t.wire->batches_read(), 0u);
}

// Tensors on both sides of the bound keep their order, and large ones are not copied into company.
TEST_F(BatchRpcTest, LargeAndSmallTensorsTogether) {
  Config config = DefaultConfig();
  config.limits.chunk_bytes = 2 * kMostBatchedBytes;
  StartServer(config);
  v1::RunSpec spec = MakeSpec("mixed", {});
  for (uint32_t i = 0; i < 60; ++i)
    AddTensor(i % 3 == 0 ? 2 * kMostBatchedBytes : 100 + i, i % 2 == 0 ? "bf16" : "fp32", &spec);
  Trainer t = Start(spec);
  for (const uint64_t step : {1, 2}) ExpectWhole(t, Step(&t, step));
}

// The result of the last step is not lost with the end of the stream that follows it at once.
TEST_F(BatchRpcTest, GatheredMessagesAreSentBeforeTheStreamEnds) {
  Trainer t = Start(ManySmallTensors());
  t.wire->Begin(1);
  for (uint32_t i = 0; i < kTensors; ++i) {
    SendAll(t, i, 1);
    t.reference->Update(i, 1, Gradient(t.spec, i, 1));
  }
  t.wire->EndStep();
  t.wire->CloseInput();
  ExpectWhole(t, ReadStep(t.wire.get()));
  EXPECT_TRUE(t.wire->Finish().ok());
}

TEST_F(BatchRpcTest, ABadBatchEndsTheStream) {
  v1::TrainRequest inner, nested, open, long_one;
  inner.mutable_batch()->add_requests()->mutable_micro_begin();
  *nested.mutable_batch()->add_requests() = inner;
  open.mutable_batch()->add_requests()->mutable_open();
  for (int i = 0; i <= kMostBatchMessages; ++i) long_one.mutable_batch()->add_requests()->mutable_micro_begin();
  Trainer t = Start(SmallSpec());
  for (const auto& [request, says] :
       {std::pair(nested, "a batch in a batch"), {open, "Open came twice"}, {long_one, "wanted at most 1024"}}) {
    t.wire->Send(request);
    EXPECT_THAT(t.wire->Finish().error_message(), HasSubstr(says));
    t.wire = std::make_unique<Wire>(trainer_.get());
    ASSERT_TRUE(t.wire->Open(t.token));
  }
  // An empty one says nothing.
  v1::TrainRequest empty;
  empty.mutable_batch();
  t.wire->Send(empty);
  ExpectWhole(t, Step(&t, 1));
}

}  // namespace
}  // namespace ballast::testing
