// What room an amended run needs, to the byte: no weight is there twice.
#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include "absl/strings/str_cat.h"

#include "tests/server/rpc/rpc_fixture.h"

namespace ballast::testing {
namespace {

using ::testing::AllOf;
using ::testing::HasSubstr;

class AmendRoomRpcTest : public RpcTest {
 protected:
  grpc::Status Amend(const std::string& token, const v1::RunSpec& spec) {
    grpc::ClientContext context;
    v1::AmendRunRequest request;
    request.set_session_token(token);
    *request.mutable_spec() = spec;
    v1::AmendRunResponse response;
    return trainer_->AmendRun(&context, request, &response);
  }
};

TEST_F(AmendRoomRpcTest, TheNewPlanButForThePlanesThatStayMustFitBesideTheOldOne) {
  const v1::RunSpec spec = MakeSpec("r1", {{"w", {400, 1000}, "fp32"}});
  v1::RunSpec grown = spec;
  grown.add_tensors()->set_name("added");
  grown.mutable_tensors(1)->set_dtype("fp32");
  grown.mutable_tensors(1)->add_shape(70'000);
  const PlanBytes is = MakePlan(ToRunSpec(spec, DefaultConfig().limits).value()).bytes;
  const PlanBytes wanted = MakePlan(ToRunSpec(grown, DefaultConfig().limits).value()).bytes;
  const uint64_t beside = wanted.total() - is.stored();
  for (const bool fits : {false, true}) {
    SCOPED_TRACE(fits);
    Config config = DefaultConfig();
    config.memory_limit = is.total() + beside - (fits ? 0 : 1);
    StartServer(config);
    Trainer t = StartTrainer(spec);
    ASSERT_TRUE(Step(&t, 1).result);
    const grpc::Status s = Amend(t.token, grown);
    if (fits) {
      EXPECT_TRUE(s.ok()) << s.error_message();
      EXPECT_EQ(Status("r1").bytes().weights(), wanted.weights);
    } else {
      EXPECT_EQ(s.error_code(), grpc::RESOURCE_EXHAUSTED);
      EXPECT_THAT(s.error_message(),
                  AllOf(HasSubstr(absl::StrCat("needs ", wanted.total(), " bytes")),
                        HasSubstr(absl::StrCat("while it is amended ", beside, " beside the ", is.total())),
                        HasSubstr(absl::StrCat(beside - 1, " of ", config.memory_limit, " free"))));
      EXPECT_TRUE(Equal(Step(&t, 2), *t.reference, 0));
    }
    t.wire.reset();
    server_.reset();
  }
}

// While they are converted, planes are there as they were and as they will be: also those that lie beside them.
TEST_F(AmendRoomRpcTest, WhatIsConvertedMustFitTwice) {
  const v1::RunSpec spec = MakeSpec("r1", {{"w", {400, 1000}, "fp32"}, {"b", {400}, "fp32"}});
  v1::RunSpec narrow = spec;
  *narrow.add_groups() = narrow.groups(0);
  narrow.mutable_groups(1)->set_state("bf16");
  narrow.mutable_tensors(1)->set_group(1);
  const PlanBytes is = MakePlan(ToRunSpec(spec, DefaultConfig().limits).value()).bytes;
  const PlanBytes wanted = MakePlan(ToRunSpec(narrow, DefaultConfig().limits).value()).bytes;
  for (const bool fits : {false, true}) {
    Config config = DefaultConfig();
    config.memory_limit = is.total() + wanted.total() - (fits ? 0 : 1);
    StartServer(config);
    Trainer t = StartTrainer(spec);
    ASSERT_TRUE(Step(&t, 1).result);
    const grpc::Status s = Amend(t.token, narrow);
    if (fits) {
      EXPECT_TRUE(s.ok()) << s.error_message();
      EXPECT_EQ(Status("r1").bytes().variance(), wanted.variance);
    } else {
      EXPECT_THAT(s.error_message(), HasSubstr(absl::StrCat("while it is amended ", wanted.total(), " beside the ")));
      EXPECT_TRUE(Equal(Step(&t, 2), *t.reference, 0));
    }
    t.wire.reset();
    server_.reset();
  }
}

}  // namespace
}  // namespace ballast::testing
