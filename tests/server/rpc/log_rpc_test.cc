// What goes wrong with a run is a line of the daemon's log.
#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include <limits>

#include "tests/server/captured_log.h"
#include "tests/server/rpc/rpc_fixture.h"

namespace ballast::testing {
namespace {

using ::testing::AllOf;
using ::testing::HasSubstr;

class LogRpcTest : public RpcTest {
 protected:
  // A step that has begun, with part of its gradients.
  Trainer InStep() {
    Trainer t = StartTrainer(SmallSpec());
    t.wire->Begin(1);
    t.wire->Chunk(Chunks(t.spec, 0, Gradient(t.spec, 0, 1))[0]);
    while (!t.wire->Read()->has_credit()) continue;  // the daemon has it
    return t;
  }
  CapturedLog log_;
};

TEST_F(LogRpcTest, ALostConnectionAndAnExpiredLeaseAreLines) {
  Config config = DefaultConfig();
  config.limits.lease_s = 0.1;
  StartServer(config);
  Trainer t = InStep();
  t.wire->Hang();
  EXPECT_THAT(log_.Await({"stream_ended:"}),
              AllOf(HasSubstr("warn"), HasSubstr("run_id=r1 rank=0 step=1 reason=CANCELLED peer="),
                    HasSubstr("the connection was lost")));
  EXPECT_THAT(log_.Await({"lease_expired:"}), AllOf(HasSubstr("warn"), HasSubstr("run_id=r1 rank=0 step=1")));
}

TEST_F(LogRpcTest, AStepThatIsTornIsALine) {
  StartServer();
  const Trainer t = InStep();
  AttachFresh("r1", /*takeover=*/true);
  EXPECT_THAT(log_.Await({"step_torn:"}), AllOf(HasSubstr("warn"), HasSubstr("run_id=r1 step=1 reason=restarted"),
                                                HasSubstr("outcome=aborted"), HasSubstr("err=")));
  EXPECT_THAT(log_.Await({"stream_ended:"}), HasSubstr("reason=ABORTED"));
}

TEST_F(LogRpcTest, LostDataIsALine) {
  StartServer();
  Trainer t = InStep();
  v1::Gradient other = Chunks(t.spec, 0, Gradient(t.spec, 0, 2))[0];
  t.wire->Chunk(other);
  EXPECT_EQ(t.wire->Finish().error_code(), grpc::DATA_LOSS);
  EXPECT_THAT(log_.Await({"stream_ended:", "DATA_LOSS"}), AllOf(HasSubstr("error"), HasSubstr("run_id=r1 rank=0")));
}

TEST_F(LogRpcTest, ARefusedRequestIsALine) {
  StartServer();
  ASSERT_TRUE(CreateRun(SmallSpec()).ok());
  v1::AttachRequest request;
  request.set_run_id("r1");
  request.set_world(5);
  v1::AttachResponse response;
  EXPECT_FALSE(Attach(request, &response).ok());
  EXPECT_THAT(log_.Await({"refused:", "method=Attach"}),
              AllOf(HasSubstr("warn"), HasSubstr("run_id=r1 reason=INVALID_ARGUMENT peer="),
                    HasSubstr("the run was created for 1 to 1 ranks")));
  Wire wire(trainer_.get());
  EXPECT_FALSE(wire.Open("no such token"));
  wire.Finish();
  EXPECT_THAT(log_.Await({"refused:", "method=Train"}), HasSubstr("NOT_FOUND"));
  v1::RunSpec spec = SmallSpec();
  spec.mutable_groups(0)->set_rule("nonsense");
  EXPECT_FALSE(CreateRun(spec).ok());
  EXPECT_THAT(log_.Await({"refused:", "method=CreateRun"}), AllOf(HasSubstr("run_id=r1"), HasSubstr("nonsense")));
}

TEST_F(LogRpcTest, SpikeEventsAreALineAKindAndMinute) {
  StartServer();
  Trainer t = StartTrainer(SmallSpec());
  for (uint64_t step = 1; step <= 5; ++step) {
    t.wire->Begin(step);
    for (uint32_t i = 0; i < t.spec.tensors.size(); ++i) {
      const std::string bytes(Gradient(t.spec, i, step).size(), '\xff');  // NaN in every format
      for (const v1::Gradient& chunk : Chunks(t.spec, i, bytes)) t.wire->Chunk(chunk);
    }
    t.wire->EndStep("", std::numeric_limits<double>::quiet_NaN());
    EXPECT_TRUE(ReadStep(t.wire.get()).result.has_value());
  }
  EXPECT_THAT(log_.Await({"spike:", "step=1", "not finite"}), HasSubstr("run_id=r1"));
  EXPECT_NE(log_.Find({"spike:", "step=1", "the loss is not finite"}), "");
  EXPECT_EQ(log_.Find({"spike:", "step=2"}), "");
  EXPECT_EQ(log_.Find({"spike:", "step=5"}), "");
}

TEST_F(LogRpcTest, AChangeOfTheRunsStateIsALine) {
  StartServer();
  Trainer t = StartTrainer(SmallSpec());
  EXPECT_TRUE(Step(&t, 1).result.has_value());
  t.wire->CloseInput();
  EXPECT_TRUE(t.wire->Finish().ok());
  EXPECT_THAT(log_.Await({"run_state:", "state=training"}), HasSubstr("run_id=r1"));
  EXPECT_THAT(log_.Await({"run_state:", "state=finished"}), AllOf(HasSubstr("info"), HasSubstr("step=1")));
}

TEST_F(LogRpcTest, ACleanEndWritesNoLine) {
  StartServer();
  Trainer t = StartTrainer(SmallSpec());
  EXPECT_TRUE(Step(&t, 1).result.has_value());
  t.wire->CloseInput();
  EXPECT_TRUE(t.wire->Finish().ok());
  server_.reset();
  for (const char* event : {"stream_ended:", "lease_expired:", "step_torn:", "refused:"}) {
    EXPECT_EQ(log_.Find({event}), "");
  }
}

}  // namespace
}  // namespace ballast::testing
