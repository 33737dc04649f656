// A trainer that is between a rewind and its next call: its run is not taken for one that nobody trains.
#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include "tests/eventually.h"
#include "tests/server/rpc/rpc_fixture.h"

namespace ballast::testing {
namespace {

using ::testing::AllOf;
using ::testing::ContainsRegex;
using ::testing::HasSubstr;
using ::testing::Not;

class ReturningRpcTest : public RpcTest {
 protected:
  void StartRewound(double lease_s) {
    Config config = DefaultConfig();
    config.limits.lease_s = lease_s;
    StartServer(config);
    v1::RunSpec spec = SmallSpec();
    spec.mutable_rewind()->set_snapshots(1);
    spec.mutable_rewind()->set_every(1);
    rank_ = StartTrainer(spec);
    ExpectSteps(&rank_, 1, 2);
    ASSERT_TRUE(RewindTo(2).ok());
    EXPECT_EQ(rank_.wire->Finish().error_code(), grpc::FAILED_PRECONDITION);
  }
  grpc::Status Delete() {
    grpc::ClientContext context;
    v1::DeleteRunRequest request;
    request.set_run_id("r1");
    v1::DeleteRunResponse response;
    return admin_->DeleteRun(&context, request, &response);
  }
  grpc::Status KeepAlive(const std::string& token) {
    v1::AttachRequest request;
    request.set_run_id("r1");
    request.set_world(1);
    request.set_protocol_min(1);
    request.set_protocol_max(1);
    request.set_session_token(token);
    request.set_keepalive(true);
    v1::AttachResponse response;
    return Attach(request, &response);
  }

  Trainer rank_;
};

TEST_F(ReturningRpcTest, DeleteIsRefusedUntilItIsBackAndGone) {
  StartRewound(/*lease_s=*/1000);
  const grpc::Status refused = Delete();
  EXPECT_EQ(refused.error_code(), grpc::FAILED_PRECONDITION);
  EXPECT_THAT(refused.error_message(), AllOf(ContainsRegex("run 'r1': rank 0 \\(.+\\) has not come back since the "
                                                           "rewind [0-9]+ s ago; stop it first, or delete with force"),
                                             Not(HasSubstr("attached"))));
  EXPECT_EQ(Status("r1").state(), v1::RUN_STATE_TRAINING);
  EXPECT_TRUE(KeepAlive(rank_.token).ok());
  const v1::AttachResponse back = AttachFresh("r1");
  EXPECT_TRUE(back.takes_keepalives());
  EXPECT_EQ(KeepAlive(rank_.token).error_code(), grpc::FAILED_PRECONDITION) << "the rank is another session's";
  EXPECT_THAT(Delete().error_message(), HasSubstr("run 'r1' has a trainer attached ("));
  Wire wire(trainer_.get());
  ASSERT_TRUE(wire.Open(back.session_token()));
  wire.CloseInput();
  EXPECT_TRUE(wire.Finish().ok());
  EXPECT_TRUE(Delete().ok());
}

TEST_F(ReturningRpcTest, OneOfWhichNothingIsHeardForALeaseIsLost) {
  StartRewound(/*lease_s=*/0.1);
  EXPECT_SOON(Status("r1").state(), v1::RUN_STATE_WAITING);
  // It was stopped, and goes on.
  EXPECT_SOON((KeepAlive(rank_.token), Status("r1").state()), v1::RUN_STATE_TRAINING);
  EXPECT_SOON(Delete().error_code(), grpc::OK);
  EXPECT_EQ(KeepAlive(rank_.token).error_code(), grpc::NOT_FOUND);
}

TEST_F(ReturningRpcTest, AKeepaliveIsOfASession) {
  StartRewound(/*lease_s=*/1000);
  EXPECT_EQ(KeepAlive("").error_code(), grpc::INVALID_ARGUMENT);
  EXPECT_EQ(KeepAlive("0123456789abcdef").error_code(), grpc::NOT_FOUND);
}

}  // namespace
}  // namespace ballast::testing
