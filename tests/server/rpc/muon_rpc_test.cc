// Muon over RPC: the steps of its kernels, with the products of this machine, which a GPU's stand-in makes too.
#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include "kernels/matrix/newton_schulz.h"
#include "server/plan/plan.h"
#include "tests/server/rpc/rpc_fixture.h"

namespace ballast::testing {
namespace {

using ::testing::HasSubstr;

// Matrices of several shapes, one a convolution's; the rest by AdamW.
v1::RunSpec MuonSpec(const std::string& run_id) {
  v1::RunSpec spec =
      MakeSpec(run_id, {{"wide", {40, 300}}, {"tall", {300, 40}, "fp32"}, {"filters", {8, 3, 5, 5}}, {"b", {5}}});
  spec.mutable_groups(0)->set_rule("muon");
  spec.add_groups()->set_rule("adamw");
  spec.mutable_tensors(3)->set_group(1);
  return spec;
}

class MuonRpcTest : public RpcTest {
 protected:
  void SetUp() override { StartServer(); }
  void ExpectStepsAsTheReference(const v1::RunSpec& spec) {
    Trainer t = StartTrainer(spec);
    ExpectSteps(&t, 1, 4);
  }
};

TEST_F(MuonRpcTest, StepsGiveTheBitsOfTheKernels) {
  int number = 0;
  for (const char* master : {"split24", "split32", "fp32"}) {
    for (const char* state : {"companded8", "bf16", "fp32"}) {
      v1::RunSpec spec = MuonSpec("r" + std::to_string(++number));
      v1::GroupSpec* group = spec.mutable_groups(0);
      group->set_master(master);
      group->set_state(state);
      (*group->mutable_hyper())["match_rms"] = number % 2;
      (*group->mutable_hyper())["nesterov"] = number % 3 == 0 ? 0 : 1;
      SCOPED_TRACE(group->ShortDebugString());
      ASSERT_NO_FATAL_FAILURE(ExpectStepsAsTheReference(spec));
    }
  }
}

TEST_F(MuonRpcTest, AStagedStepIsTheSame) {
  v1::RunSpec spec = MuonSpec("r1");
  spec.set_commit(v1::COMMIT_MODE_STAGED);
  ExpectStepsAsTheReference(spec);
}

TEST_F(MuonRpcTest, AVectorIsRefusedByName) {
  v1::RunSpec spec = MuonSpec("r1");
  spec.mutable_tensors(3)->set_group(0);
  const absl::Status status = CreateRun(spec).status();
  EXPECT_EQ(status.code(), absl::StatusCode::kInvalidArgument);
  EXPECT_THAT(
      std::string(status.message()),
      HasSubstr("tensors[3] 'b'.shape is [5], and its group's rule, muon, is over matrices: give it a group with "
                "another rule"));
}

// The plan has what the largest matrix needs, once: 12,000 numbers, as many again, two of 40 x 40, and what aligns them.
TEST_F(MuonRpcTest, TheRoomOfTheLargestMatrixIsPlannedOnce) {
  const v1::RunSpec spec = MuonSpec("r1");
  v1::RunSpec other = spec;
  other.mutable_groups(0)->set_rule("lion");
  const auto staging = [](const v1::RunSpec& s) {
    return MakePlan(ToRunSpec(s, DefaultConfig().limits).value()).bytes.staging;
  };
  EXPECT_EQ(staging(spec) - staging(other),
            AlignUp((kernels::PaddedElements(12000) + 12000 + 2 * 40 * 40 + kernels::kRoomToAlign) * 4));
}

}  // namespace
}  // namespace ballast::testing
