#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include <functional>
#include <thread>

#include "proto/checksum.h"

#include "tests/server/rpc/rpc_fixture.h"

namespace ballast::testing {
namespace {

using ::testing::HasSubstr;

struct BadChunk {
  std::string name;
  std::function<void(v1::Gradient&)> spoil;
  grpc::StatusCode code;
  std::string says;
};

void Seal(v1::Gradient* g) { g->set_crc32c(Crc32c(Bytes(g->data()))); }

class BadChunkRpcTest : public RpcTest, public ::testing::WithParamInterface<BadChunk> {
 protected:
  void SetUp() override { StartServer(); }
};

TEST_P(BadChunkRpcTest, ABadChunkEndsOnlyItsOwnStreamAndIsNamed) {
  v1::RunSpec other_spec = SmallSpec();
  other_spec.set_run_id("r2");
  Trainer t = StartTrainer(SmallSpec()), other = StartTrainer(other_spec);
  t.wire->Begin(1);
  v1::Gradient chunk = Chunks(t.spec, 0, Gradient(t.spec, 0, 1))[1];
  GetParam().spoil(chunk);
  t.wire->Chunk(chunk);
  const grpc::Status s = t.wire->Finish();
  EXPECT_EQ(s.error_code(), GetParam().code) << s.error_message();
  EXPECT_THAT(s.error_message(), HasSubstr(GetParam().says));
  const StepAnswer answer = Step(&other, 1);
  EXPECT_TRUE(Equal(answer, *other.reference, 0));
  // Its own step goes on too, once it sends what is right.
  t.wire = std::make_unique<Wire>(trainer_.get());
  ASSERT_TRUE(t.wire->Open(t.token));
  const StepAnswer fixed = Step(&t, 1);
  for (uint32_t i = 0; i < 3; ++i) EXPECT_TRUE(Equal(fixed, *t.reference, i)) << i;
}

INSTANTIATE_TEST_SUITE_P(
    Gradient, BadChunkRpcTest,
    ::testing::Values(
        BadChunk{"Tensor", [](auto& g) { g.set_tensor(7); }, grpc::INVALID_ARGUMENT, "tensor 7: the run has 3"},
        BadChunk{"Chunk", [](auto& g) { g.set_chunk(99); }, grpc::INVALID_ARGUMENT, "'embed.weight': it has 8 chunks"},
        BadChunk{"HugeChunk", [](auto& g) { g.set_chunk(~uint64_t{0}); }, grpc::INVALID_ARGUMENT, "it has 8 chunks"},
        BadChunk{"Micro", [](auto& g) { g.set_micro(1); }, grpc::INVALID_ARGUMENT, "micro-batch 1"},
        BadChunk{"Format", [](auto& g) { g.set_format("fp32"); }, grpc::INVALID_ARGUMENT, "wanted: bf16"},
        BadChunk{"Scale", [](auto& g) { g.set_scale(2); }, grpc::INVALID_ARGUMENT, "the scale 2"},
        BadChunk{"Short",
                 [](auto& g) {
                   g.mutable_data()->pop_back();
                   Seal(&g);
                 },
                 grpc::INVALID_ARGUMENT, "has 8191 bytes; wanted: 8192"},
        BadChunk{"Empty",
                 [](auto& g) {
                   g.clear_data();
                   Seal(&g);
                 },
                 grpc::INVALID_ARGUMENT, "has 0 bytes"},
        BadChunk{"Checksum", [](auto& g) { g.set_crc32c(g.crc32c() + 1); }, grpc::DATA_LOSS, "crc32c"},
        BadChunk{"Oversized", [](auto& g) { g.mutable_data()->resize(3 << 20); }, grpc::RESOURCE_EXHAUSTED, "larger"}),
    [](const auto& row) { return row.param.name; });

class BadStreamRpcTest : public RpcTest {
 protected:
  void SetUp() override { StartServer(); }
};

TEST_F(BadStreamRpcTest, AChunkBeforeStepBegin) {
  Trainer t = StartTrainer(SmallSpec());
  SendAll(t, 1, 1);
  const grpc::Status s = t.wire->Finish();
  EXPECT_EQ(s.error_code(), grpc::FAILED_PRECONDITION);
  EXPECT_THAT(s.error_message(), HasSubstr("StepBegin"));
}

TEST_F(BadStreamRpcTest, AnythingButOpenFirst) {
  Wire wire(trainer_.get());
  wire.Begin(1);
  const grpc::Status s = wire.Finish();
  EXPECT_EQ(s.error_code(), grpc::FAILED_PRECONDITION);
  EXPECT_THAT(s.error_message(), HasSubstr("must be Open"));
}

TEST_F(BadStreamRpcTest, ATokenOfNobody) {
  for (const std::string& token : {std::string(), std::string("x"), std::string(100000, 'x')}) {
    Wire wire(trainer_.get());
    EXPECT_FALSE(wire.Open(token));
    EXPECT_EQ(wire.Finish().error_code(), grpc::NOT_FOUND);
  }
}

TEST_F(BadStreamRpcTest, OpenTwice) {
  Trainer t = StartTrainer(SmallSpec());
  v1::TrainRequest request;
  request.mutable_open()->set_session_token(t.token);
  t.wire->Send(request);
  EXPECT_THAT(t.wire->Finish().error_message(), HasSubstr("Open came twice"));
}

TEST_F(BadStreamRpcTest, AnEmptyMessage) {
  Trainer t = StartTrainer(SmallSpec());
  t.wire->Send({});
  EXPECT_EQ(t.wire->Finish().error_code(), grpc::INVALID_ARGUMENT);
}

TEST_F(BadStreamRpcTest, AnEmptyStream) {
  Wire wire(trainer_.get());
  wire.CloseInput();
  EXPECT_EQ(wire.Finish().error_code(), grpc::INVALID_ARGUMENT);
}

TEST_F(BadStreamRpcTest, HalfClosedWithAStepOpen) {
  Trainer t = StartTrainer(SmallSpec());
  t.wire->Begin(1);
  SendAll(t, 1, 1);
  t.wire->CloseInput();
  const grpc::Status s = t.wire->Finish();
  EXPECT_EQ(s.error_code(), grpc::FAILED_PRECONDITION);
  EXPECT_THAT(s.error_message(), HasSubstr("with step 1 open"));
  EXPECT_TRUE(Resume("r1", t.token).step_open());
}

TEST_F(BadStreamRpcTest, HalfClosedAfterStepEndStillGetsAllItIsOwed) {
  Trainer t = StartTrainer(SmallSpec());
  t.wire->Begin(1);
  SendAll(t, 0, 1);
  t.wire->EndStep("\x06");
  t.wire->CloseInput();
  const StepAnswer answer = ReadStep(t.wire.get());
  ASSERT_TRUE(answer.result);
  t.reference->Update(0, 1, Gradient(t.spec, 0, 1));
  EXPECT_TRUE(Equal(answer, *t.reference, 0));
  EXPECT_TRUE(t.wire->Finish().ok());
}

TEST_F(BadStreamRpcTest, AStepEndWithTensorsMissing) {
  Trainer t = StartTrainer(SmallSpec());
  t.wire->Begin(1);
  SendAll(t, 1, 1);
  t.wire->EndStep("\x01");
  const grpc::Status s = t.wire->Finish();
  EXPECT_EQ(s.error_code(), grpc::INVALID_ARGUMENT);
  EXPECT_THAT(s.error_message(), HasSubstr("layers.0.b"));
}

TEST_F(BadStreamRpcTest, BitsPastTheTensors) {
  Trainer t = StartTrainer(SmallSpec());
  t.wire->Begin(1);
  t.wire->EndStep("\x0f");
  EXPECT_THAT(t.wire->Finish().error_message(), HasSubstr("bit 3"));
}

TEST_F(BadStreamRpcTest, CancelledAtAnyPoint) {
  Trainer t = StartTrainer(SmallSpec());
  t.wire->Hang();
  for (int i = 0; i < 40; ++i) {
    Wire wire(trainer_.get());
    if (i % 4 == 0) {
      v1::TrainRequest request;
      request.mutable_open()->set_session_token(t.token);
      wire.Send(request);  // and gone before the answer
    } else {
      wire.Open(t.token);
      wire.Begin(1);
      for (int k = 0; k < i % 4; ++k) wire.Chunk(Chunks(t.spec, 0, Gradient(t.spec, 0, 1))[static_cast<size_t>(k)]);
    }
    wire.Hang();
  }
  t.wire = std::make_unique<Wire>(trainer_.get());
  ASSERT_TRUE(t.wire->Open(t.token));
  const StepAnswer answer = Step(&t, 1);
  for (uint32_t i = 0; i < 3; ++i) EXPECT_TRUE(Equal(answer, *t.reference, i)) << i;
}

// The run is deleted under a trainer that is sending all it can.
TEST_F(BadStreamRpcTest, DeletedWhileSending) {
  Trainer t = StartTrainer(MakeSpec("r1", {{"w", {400000}}}));
  t.wire->Begin(1);
  std::thread sender([&] {
    for (const auto& chunk : Chunks(t.spec, 0, Gradient(t.spec, 0, 1))) {
      if (!t.wire->Chunk(chunk)) return;
    }
  });
  grpc::ClientContext context;
  v1::DeleteRunRequest request;
  request.set_run_id("r1");
  request.set_force(true);
  v1::DeleteRunResponse response;
  EXPECT_TRUE(admin_->DeleteRun(&context, request, &response).ok());
  EXPECT_GT(response.freed_bytes(), 400000u * 5);
  sender.join();
  EXPECT_EQ(t.wire->Finish().error_code(), grpc::NOT_FOUND);
}

}  // namespace
}  // namespace ballast::testing
