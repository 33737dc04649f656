#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include "server/convert/convert.h"
#include "tests/server/rpc/rpc_fixture.h"

namespace ballast::testing {
namespace {

using ::testing::ElementsAre;
using ::testing::HasSubstr;

class ResumeRpcTest : public RpcTest {
 protected:
  void SetUp() override { StartServer(); }
};

bool Bit(const std::string& bits, size_t i) {
  return i / 8 < bits.size() && ((static_cast<unsigned char>(bits[i / 8]) >> (i % 8)) & 1) != 0;
}

TEST_F(ResumeRpcTest, AfterACutOnlyMissingChunksAreSent) {
  Trainer t = StartTrainer(SmallSpec());
  t.wire->Begin(1);
  SendAll(t, 2, 1);
  const auto chunks = Chunks(t.spec, 0, Gradient(t.spec, 0, 1));
  t.wire->Chunk(chunks[0]);
  t.wire->Chunk(chunks[4]);
  // The weights of tensor 2 are out and both chunks are acknowledged: all that was sent has arrived.
  uint64_t credit = 0;
  while (credit < 10 + 2 * 8192) credit += t.wire->Read()->credit().bytes();
  t.wire->Hang();

  const v1::AttachResponse resumed = Resume("r1", t.token);
  EXPECT_EQ(resumed.session_token(), t.token);
  EXPECT_EQ(resumed.resume_step(), 1u);
  ASSERT_TRUE(resumed.step_open());
  EXPECT_TRUE(Bit(resumed.tensors_applied(), 2));
  EXPECT_FALSE(Bit(resumed.tensors_applied(), 0));
  Wire wire(trainer_.get());
  ASSERT_TRUE(wire.Open(t.token));
  wire.Begin(1);
  int sent = 0;
  for (const v1::Gradient& chunk : chunks) {
    const bool held = chunk.chunk() == 0 || chunk.chunk() == 4;
    for (const v1::ChunksHeld& h : resumed.held()) {
      if (h.tensor() == 0) {
        EXPECT_EQ(Bit(h.chunks(), chunk.chunk()), held);
      }
    }
    if (!held) sent += wire.Chunk(chunk) ? 1 : 0;
  }
  EXPECT_EQ(sent, static_cast<int>(chunks.size()) - 2);
  for (const v1::Gradient& chunk : Chunks(t.spec, 1, Gradient(t.spec, 1, 1))) wire.Chunk(chunk);
  wire.EndStep();
  const StepAnswer answer = ReadStep(&wire);
  ASSERT_TRUE(answer.result);
  EXPECT_EQ(answer.result->outcome(), v1::STEP_OUTCOME_APPLIED);
  for (uint32_t i = 0; i < 3; ++i) {
    t.reference->Update(i, 1, Gradient(t.spec, i, 1));
    EXPECT_TRUE(Equal(answer, *t.reference, i)) << i;
  }
}

// Gradients that wait to be summed, and those that are not needed, are acknowledged, too.
TEST_F(ResumeRpcTest, GradientsAreAcknowledgedByTheirCountOnTheStream) {
  v1::RunSpec spec = SmallSpec();
  spec.set_ranks(2);
  ASSERT_TRUE(CreateRun(spec).ok());
  const RunSpec plain = ToRunSpec(spec, config_.limits).value();
  const std::string token = AttachFresh("r1", false, 0, 2).session_token();
  v1::LoadStateResponse loaded;
  ASSERT_TRUE(LoadAll(plain, token, &loaded).ok());
  const auto chunks = Chunks(plain, 0, Gradient(plain, 0, 1));
  for (const uint64_t resent : {0, 2}) {  // the second stream sends one chunk again
    Wire wire(trainer_.get());
    ASSERT_TRUE(wire.Open(token));
    wire.Begin(1);
    for (uint64_t k = 0; k < 3; ++k) wire.Chunk(chunks[k + resent]);
    uint64_t acknowledged = 0, credit = 0;
    while (acknowledged < 3) {
      const auto response = wire.Read();
      ASSERT_TRUE(response && response->has_credit());
      EXPECT_GT(response->credit().acknowledged(), acknowledged);
      acknowledged = response->credit().acknowledged();
      credit += response->credit().bytes();
    }
    EXPECT_EQ(acknowledged, 3u);
    EXPECT_EQ(credit, resent == 0 ? 0 : chunks[2].data().size());
    wire.Hang();
    EXPECT_EQ(Resume("r1", token).step_open(), true);
  }
}

// Otherwise the answer grows with tensors x micro-batches, beyond what fits into a message.
TEST_F(ResumeRpcTest, HeldTensorsAreToldWholeToAClientThatKnowsThat) {
  constexpr uint32_t kMicros = 40;
  v1::RunSpec spec = SmallSpec();
  spec.set_accumulation(kMicros + 1);
  Trainer t = StartTrainer(spec);
  t.wire->Begin(1);
  uint64_t credit = 0, sent = 0;
  for (uint32_t micro = 0; micro <= kMicros; ++micro) {
    t.wire->BeginMicro(micro, micro == kMicros);
    for (uint32_t i = 0; i < 3; ++i) {
      auto chunks = Chunks(t.spec, i, Gradient(t.spec, i, 1));
      if (micro == kMicros && i == 0) chunks.resize(2);
      for (v1::Gradient& chunk : chunks) {
        chunk.set_micro(micro);
        sent += chunk.data().size();
        t.wire->Chunk(chunk);
      }
    }
    if (micro < kMicros) t.wire->EndMicro(micro);
    while (credit < sent) credit += t.wire->Read()->credit().bytes();
  }
  t.wire->Hang();

  EXPECT_EQ(Resume("r1", t.token).held_size(), 3 * static_cast<int>(kMicros + 1));
  v1::AttachRequest request;
  request.set_run_id("r1");
  request.set_session_token(t.token);
  request.add_features("held_whole");
  v1::AttachResponse knowing;
  ASSERT_TRUE(Attach(request, &knowing).ok());
  ASSERT_EQ(knowing.held_size(), 3);
  EXPECT_EQ(knowing.held(0).whole_micros(), kMicros);
  EXPECT_EQ(knowing.held(1).micro(), kMicros);
  EXPECT_EQ(knowing.held(1).whole_tensors(), std::string(1, 0b110));
  EXPECT_EQ(knowing.held(2).micro(), kMicros);
  EXPECT_EQ(knowing.held(2).tensor(), 0u);
  EXPECT_EQ(knowing.held(2).chunks(), std::string(1, 0b11));
}

TEST_F(ResumeRpcTest, WeightsAndResultComeAgainAfterTheStepClosed) {
  Trainer t = StartTrainer(SmallSpec());
  Step(&t, 1);
  t.wire->Hang();
  const v1::AttachResponse resumed = Resume("r1", t.token);
  EXPECT_EQ(resumed.resume_step(), 2u);
  EXPECT_FALSE(resumed.step_open());
  v1::Open rest;
  rest.set_weights_step(1);
  rest.set_weights_received("\x01");
  Wire wire(trainer_.get());
  ASSERT_TRUE(wire.Open(t.token, rest));
  const StepAnswer answer = ReadStep(&wire);
  ASSERT_TRUE(answer.result);
  EXPECT_EQ(answer.result->step(), 1u);
  EXPECT_EQ(answer.weights.count(0), 0u);
  EXPECT_TRUE(Equal(answer, *t.reference, 1));
  EXPECT_TRUE(Equal(answer, *t.reference, 2));
}

TEST_F(ResumeRpcTest, ARestartedTrainerFindsTheStepPartialAndItsTensorsNamed) {
  Trainer t = StartTrainer(SmallSpec());
  t.wire->Begin(1);
  SendAll(t, 1, 1);
  t.wire->Chunk(Chunks(t.spec, 0, Gradient(t.spec, 0, 1))[0]);
  uint64_t credit = 0;
  while (credit < 4096 * 4 + 8192) credit += t.wire->Read()->credit().bytes();
  const v1::AttachResponse fresh = AttachFresh("r1", /*takeover=*/true);
  EXPECT_EQ(fresh.resume_step(), 2u);
  EXPECT_EQ(fresh.last_result().outcome(), v1::STEP_OUTCOME_PARTIAL);
  EXPECT_EQ(fresh.last_result().reason(), "restarted");
  EXPECT_THAT(fresh.last_result().tensors_not_applied(), ElementsAre(0, 2));
  EXPECT_EQ(t.wire->Finish().error_code(), grpc::ABORTED);
  // The tensor that was whole was updated, the other kept its weights.
  t.reference->Update(1, 1, Gradient(t.spec, 1, 1));
  t.token = fresh.session_token();
  t.wire = std::make_unique<Wire>(trainer_.get());
  ASSERT_TRUE(t.wire->Open(t.token));
  const StepAnswer answer = Step(&t, 2);
  for (uint32_t i = 0; i < 3; ++i) EXPECT_TRUE(Equal(answer, *t.reference, i)) << i;
}

TEST_F(ResumeRpcTest, AStepOfWhichNothingArrivedIsSentAgain) {
  Trainer t = StartTrainer(SmallSpec());
  t.wire->Begin(1);
  const v1::AttachResponse fresh = AttachFresh("r1", /*takeover=*/true);
  EXPECT_EQ(fresh.resume_step(), 1u);
  EXPECT_FALSE(fresh.has_last_result());
}

TEST_F(ResumeRpcTest, AResumedStepBeginMustBeTheSame) {
  Trainer t = StartTrainer(SmallSpec());
  t.wire->Begin(1, 0.5);
  t.wire->Chunk(Chunks(t.spec, 0, Gradient(t.spec, 0, 1))[0]);
  while (!t.wire->Read()->has_credit()) {
  }
  t.wire->Hang();
  Resume("r1", t.token);
  Wire wire(trainer_.get());
  ASSERT_TRUE(wire.Open(t.token));
  wire.Begin(1, 0.25);
  const grpc::Status s = wire.Finish();
  EXPECT_EQ(s.error_code(), grpc::FAILED_PRECONDITION);
  EXPECT_THAT(s.error_message(), HasSubstr("other values"));
}

TEST_F(ResumeRpcTest, ANewStreamOfTheSessionReplacesTheOld) {
  Trainer t = StartTrainer(SmallSpec());
  Step(&t, 1);
  Resume("r1", t.token);
  auto second = std::make_unique<Wire>(trainer_.get());
  v1::Open rest;
  rest.set_weights_step(1);
  rest.set_weights_received("\x07");
  ASSERT_TRUE(second->Open(t.token, rest));
  EXPECT_FALSE(t.wire->Finish().ok());
  t.wire = std::move(second);
  EXPECT_EQ(ReadStep(t.wire.get()).result->step(), 1u);
  const StepAnswer answer = Step(&t, 2);
  for (uint32_t i = 0; i < 3; ++i) EXPECT_TRUE(Equal(answer, *t.reference, i)) << i;
}

// Cut at every message of a step, at any point of its travel: resumed, the step gives the same bits.
TEST_F(ResumeRpcTest, CutsAnywhereNeverChangeTheBits) {
  Trainer t = StartTrainer(SmallSpec());
  for (uint64_t step = 1; step <= 12; ++step) {
    SCOPED_TRACE(step);
    std::vector<v1::Gradient> all;
    for (uint32_t i = 0; i < 3; ++i) {
      for (auto& chunk : Chunks(t.spec, i, Gradient(t.spec, i, step))) all.push_back(std::move(chunk));
      t.reference->Update(i, step, Gradient(t.spec, i, step));
    }
    t.wire->Begin(step);
    for (size_t k = 0; k < step && k < all.size(); ++k) t.wire->Chunk(all[k]);
    t.wire->Hang();
    Resume("r1", t.token);
    t.wire = std::make_unique<Wire>(trainer_.get());
    ASSERT_TRUE(t.wire->Open(t.token));
    t.wire->Begin(step);
    for (const auto& chunk : all) t.wire->Chunk(chunk);
    t.wire->EndStep();
    StepAnswer answer = ReadStep(t.wire.get());
    // Where not even StepBegin arrived, the step before is told again first.
    if (answer.result && answer.result->step() + 1 == step) answer = ReadStep(t.wire.get());
    ASSERT_TRUE(answer.result);
    ASSERT_EQ(answer.result->step(), step);
    for (uint32_t i = 0; i < 3; ++i) ASSERT_TRUE(Equal(answer, *t.reference, i)) << i;
  }
}

}  // namespace
}  // namespace ballast::testing
