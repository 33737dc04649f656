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
  static PlanBytes BytesOf(const v1::RunSpec& spec) {
    return MakePlan(ToRunSpec(spec, DefaultConfig().limits).value()).bytes;
  }
  // Beside the run as it is, an amended one needs so many bytes: with one less it is refused, and trains on.
  void ExpectNeeds(const v1::RunSpec& spec, const v1::RunSpec& amended, uint64_t beside) {
    const PlanBytes is = BytesOf(spec), wanted = BytesOf(amended);
    for (const bool fits : {false, true}) {
      SCOPED_TRACE(fits);
      Config config = DefaultConfig();
      config.memory_limit = is.total() + beside - (fits ? 0 : 1);
      StartServer(config);
      Trainer t = StartTrainer(spec);
      ASSERT_TRUE(Step(&t, 1).result);
      const grpc::Status s = Amend(t.token, amended);
      if (fits) {
        EXPECT_TRUE(s.ok()) << s.error_message();
        EXPECT_EQ(Status("r1").bytes().weights(), wanted.weights);
        EXPECT_EQ(Status("r1").bytes().variance(), wanted.variance);
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
};

TEST_F(AmendRoomRpcTest, TheNewPlanButForThePlanesThatStayMustFitBesideTheOldOne) {
  const v1::RunSpec spec = MakeSpec("r1", {{"w", {400, 1000}, "fp32"}});
  v1::RunSpec grown = spec;
  grown.add_tensors()->set_name("added");
  grown.mutable_tensors(1)->set_dtype("fp32");
  grown.mutable_tensors(1)->add_shape(70'000);
  ExpectNeeds(spec, grown, BytesOf(grown).total() - BytesOf(spec).stored());
}

// While they are converted, planes are there as they were and as they will be: also those that lie beside them.
TEST_F(AmendRoomRpcTest, WhatIsConvertedMustFitTwice) {
  const v1::RunSpec spec = MakeSpec("r1", {{"w", {400, 1000}, "fp32"}, {"b", {400}, "fp32"}});
  v1::RunSpec narrow = spec;
  *narrow.add_groups() = narrow.groups(0);
  narrow.mutable_groups(1)->set_state("bf16");
  narrow.mutable_tensors(1)->set_group(1);
  ExpectNeeds(spec, narrow, BytesOf(narrow).total());
}

}  // namespace
}  // namespace ballast::testing
