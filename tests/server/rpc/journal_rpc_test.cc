// A daemon that goes on from what another one's journal has, on the device's own memory.
#include <gtest/gtest.h>

#include <algorithm>

#include "tests/server/rpc/amend_fixture.h"
#include "tests/server/rpc/stored_fixture.h"

namespace ballast::testing {
namespace {

class JournalRpcTest : public Stored<AmendRpcTest> {
 protected:
  // Steps of one rank, whose gradients are clipped to a norm of kMost where they are larger, if at all.
  void ExpectClipped(Team* team, uint64_t step, std::optional<double> most) {
    SendStep(team, step, {});
    const double norm = ExactNorm(*team, step, 1, 1);
    UpdateReference(team, step, 1, 1, most ? static_cast<float>(std::min(1.0, *most / (norm + 1e-6))) : 1);
    ExpectApplied(team);
  }
  void ExpectGoesOn(v1::RunSpec spec, std::optional<double> most) {
    spec.mutable_checkpoint()->set_durability(v1::DURABILITY_MODE_JOURNAL_SYNC);
    Team team = StartTeam(spec, 1);
    for (uint64_t step = 1; step <= 3; ++step) ExpectClipped(&team, step, most);
    Crash(&team);
    ASSERT_EQ(Status(spec.run_id()).step(), 3u);
    team.wires.resize(1);
    Attach(&team);
    OpenStreams(&team);
    for (uint64_t step = 4; step <= 5; ++step) ExpectClipped(&team, step, most);
  }
};

TEST_F(JournalRpcTest, StepsAreReplayedToTheBit) { ExpectGoesOn(SmallSpec(), std::nullopt); }

// The gradient was measured before its update when the step was made, and is not when it is replayed.
TEST_F(JournalRpcTest, SoAreStepsThatWereMeasuredBefore) {
  v1::RunSpec spec = StagedSpec();
  spec.set_max_grad_norm(0.2);
  ExpectGoesOn(spec, 0.2);
}

}  // namespace
}  // namespace ballast::testing
