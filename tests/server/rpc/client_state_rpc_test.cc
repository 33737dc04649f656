// What a trainer entrusts to the daemon with StepEnd, and who gets it back; and what a resume repeats.
#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include "absl/strings/str_cat.h"

#include "server/convert/convert.h"
#include "tests/server/rpc/rpc_fixture.h"

namespace ballast::testing {
namespace {

using ::testing::HasSubstr;

class ClientStateRpcTest : public RpcTest {
 protected:
  void SetUp() override { StartServer(); }

  // All gradients, and MicroEnd; not StepEnd.
  void SendMicro(const Trainer& t, uint64_t step, std::optional<double> loss = std::nullopt) {
    t.wire->Begin(step);
    for (uint32_t i = 0; i < t.spec.tensors.size(); ++i) SendAll(t, i, step);
    t.wire->EndMicro(0, "", loss);
  }
  static void End(Wire* wire, const std::string& state) {
    v1::TrainRequest end;
    end.mutable_step_end()->set_client_state(state);
    wire->Send(end);
  }
};

TEST_F(ClientStateRpcTest, TheNextProcessGetsWhatCameWithTheLastClosedStep) {
  Trainer t = StartTrainer(SmallSpec());
  SendMicro(t, 1);
  End(t.wire.get(), "after batch 1");
  ASSERT_TRUE(ReadStep(t.wire.get()).result);
  SendMicro(t, 2);
  End(t.wire.get(), "");  // none: that of step 1 stays the last
  ASSERT_TRUE(ReadStep(t.wire.get()).result);
  const v1::AttachResponse next = AttachFresh("r1", /*takeover=*/true);
  EXPECT_EQ(next.client_state(), "after batch 1");
  EXPECT_EQ(next.client_state_step(), 1u);
  EXPECT_EQ(next.resume_step(), 3u);
}

TEST_F(ClientStateRpcTest, ARunWithoutStateSaysSo) {
  const Trainer t = StartTrainer(SmallSpec());
  const v1::AttachResponse next = AttachFresh("r1", /*takeover=*/true);
  EXPECT_EQ(next.client_state(), "");
  EXPECT_EQ(next.client_state_step(), 0u);
}

TEST_F(ClientStateRpcTest, EachRankHasItsOwnAndTheOneOfAnOpenStepIsNotYetGiven) {
  v1::RunSpec spec = SmallSpec();
  spec.set_ranks(2);
  ASSERT_TRUE(CreateRun(spec).ok());
  std::vector<std::string> tokens;
  std::vector<std::unique_ptr<Wire>> wires;
  for (const uint32_t rank : {0, 1}) tokens.push_back(AttachFresh("r1", false, rank, 2).session_token());
  Trainer t{.spec = ToRunSpec(spec, config_.limits).value(), .token = tokens[0], .wire = nullptr, .reference = nullptr};
  v1::LoadStateResponse loaded;
  ASSERT_TRUE(LoadAll(t.spec, tokens[0], &loaded).ok());
  for (const std::string& token : tokens) {
    wires.push_back(std::make_unique<Wire>(trainer_.get()));
    ASSERT_TRUE(wires.back()->Open(token));
  }
  for (const uint32_t rank : {0, 1}) {
    t.wire = std::move(wires[rank]);
    SendMicro(t, 1);
    End(t.wire.get(), absl::StrCat("state of rank ", rank));
    wires[rank] = std::move(t.wire);
  }
  for (const auto& wire : wires) ASSERT_TRUE(ReadStep(wire.get()).result);
  t.wire = std::move(wires[1]);
  SendMicro(t, 2);
  End(t.wire.get(), "of step 2, which rank 0 has not begun");
  EXPECT_EQ(Resume("r1", tokens[1], /*rank=*/1, /*world=*/2).client_state(), "state of rank 1");
  const v1::AttachResponse zero = AttachFresh("r1", /*takeover=*/true, 0, 2);
  EXPECT_EQ(zero.client_state(), "state of rank 0");
  EXPECT_EQ(zero.client_state_step(), 1u);
}

TEST_F(ClientStateRpcTest, AClientStateThatIsTooLargeIsRefusedAndNotKept) {
  Trainer t = StartTrainer(SmallSpec());
  SendMicro(t, 1);
  End(t.wire.get(), std::string((1 << 20) + 1, 'x'));
  const grpc::Status s = t.wire->Finish();
  EXPECT_EQ(s.error_code(), grpc::INVALID_ARGUMENT);
  EXPECT_THAT(s.error_message(), HasSubstr("StepEnd.client_state has 1048577 bytes; wanted: at most 1048576"));
  EXPECT_EQ(Resume("r1", t.token).client_state_step(), 0u);
}

TEST_F(ClientStateRpcTest, ALossThatIsSaidAgainAfterAResumeCountsOnce) {
  v1::RunSpec spec = SmallSpec();
  spec.set_accumulation(2);
  Trainer t = StartTrainer(spec);
  t.wire->Begin(1);
  t.wire->BeginMicro(0, false);
  t.wire->EndMicro(0, std::string(1, '\7'), 1.0);
  t.wire->BeginMicro(1, true);
  for (const v1::Gradient& chunk : Chunks(t.spec, 0, Gradient(t.spec, 0, 1))) {
    v1::Gradient second = chunk;
    second.set_micro(1);
    t.wire->Chunk(second);
  }
  while (!t.wire->Read()->has_credit()) {  // what came before it is in, too
  }
  t.wire->Hang();
  Resume("r1", t.token);
  Wire wire(trainer_.get());
  ASSERT_TRUE(wire.Open(t.token));
  wire.Begin(1);
  wire.BeginMicro(0, false);
  wire.EndMicro(0, std::string(1, '\7'), 1.0);
  wire.BeginMicro(1, true);
  for (v1::Gradient chunk : Chunks(t.spec, 0, Gradient(t.spec, 0, 1))) {
    chunk.set_micro(1);
    wire.Chunk(chunk);
  }
  wire.EndStep(std::string(1, '\6'), 4.0, 1);
  ASSERT_TRUE(ReadStep(&wire).result);
  EXPECT_EQ(Status("r1").loss(), 2.5);
}

TEST_F(ClientStateRpcTest, ATokenOfAnEarlierGenerationIsRefusedWithTheRunsStep) {
  server_.reset();
  Config config = DefaultConfig();
  config.limits.lease_s = 0;
  StartServer(config);
  v1::RunSpec spec = SmallSpec();
  spec.set_ranks(2);
  Trainer t = StartTrainer(spec);
  ASSERT_TRUE(Step(&t, 1).result);
  EXPECT_EQ(Status("r1").generation(), 1u);
  t.wire->Hang();
  v1::AttachRequest request;
  request.set_run_id("r1");
  request.set_rank(1);
  request.set_world(2);
  v1::AttachResponse two;
  grpc::Status s;
  do {  // until the daemon has seen that the connection is gone
    s = Attach(request, &two);
  } while (s.error_code() == grpc::FAILED_PRECONDITION);
  ASSERT_TRUE(s.ok()) << s.error_message();
  EXPECT_EQ(two.generation(), 2u);
  EXPECT_EQ(two.resume_step(), 2u);
  EXPECT_EQ(Status("r1").generation(), 2u);
  request.set_rank(0);
  request.set_session_token(t.token);
  s = Attach(request, &two);
  EXPECT_EQ(s.error_code(), grpc::FAILED_PRECONDITION);
  EXPECT_THAT(s.error_message(), HasSubstr("of generation 1 of the run, which is at generation 2, step 2"));
  Wire old(trainer_.get());
  EXPECT_FALSE(old.Open(t.token));
  EXPECT_EQ(old.Finish().error_code(), grpc::FAILED_PRECONDITION);
}

}  // namespace
}  // namespace ballast::testing
