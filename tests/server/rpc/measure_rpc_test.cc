// Staged steps that are measured before they end, whose clipping comes with the end, that are discarded, and whose
// number of micro-batches nobody announces.
#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include <cmath>
#include <limits>

#include "proto/bitmap.h"

#include "tests/server/rpc/team_fixture.h"

namespace ballast::testing {
namespace {

using ::testing::HasSubstr;

constexpr uint32_t kWorlds[] = {1, 2, 8};

v1::TrainRequest MeasureRequest() {
  v1::TrainRequest request;
  request.mutable_step_measure();
  return request;
}

v1::TrainRequest EndRequest(const v1::StepEnd& end = {}) {
  v1::TrainRequest request;
  *request.mutable_step_end() = end;
  return request;
}

v1::TrainRequest ClipRequest(double max_grad_norm) {
  v1::StepEnd end;
  end.set_max_grad_norm(max_grad_norm);
  return EndRequest(end);
}

v1::TrainRequest DiscardRequest(const std::string& client_state = "") {
  v1::StepEnd end;
  end.set_discard(true);
  end.set_client_state(client_state);
  return EndRequest(end);
}

// What answers a StepMeasure; a default one, with step 0, where the stream ends or the step closes first.
v1::StepMeasured ReadMeasured(Wire* wire) {
  while (const auto response = wire->Read()) {
    if (response->has_step_measured()) return response->step_measured();
    if (response->has_step_result()) break;
  }
  return {};
}

class MeasureRpcTest : public TeamRpcTest {
 protected:
  // A team of a run of its own, of steps of at most so many micro-batches.
  Team StartStaged(uint32_t world, uint32_t micros) {
    v1::RunSpec spec = StagedSpec("r" + std::to_string(10 * world + micros));
    spec.set_accumulation(micros);
    return StartTeam(spec, world);
  }
  static void SendAll(Team* team, const v1::TrainRequest& request) {
    for (const auto& wire : team->wires) wire->Send(request);
  }
  void SendGradients(const Team& team, uint32_t rank, uint64_t step, uint32_t micro, uint32_t tensors) {
    for (uint32_t i = 0; i < tensors; ++i) {
      for (v1::Gradient chunk : Chunks(team.spec, i, GradientOf(team, i, step, rank, micro))) {
        chunk.set_micro(micro);
        team.wires[rank]->Chunk(chunk);
      }
    }
  }
  static void ExpectDiscarded(Team* team, uint64_t step, const std::string& who) {
    for (const auto& wire : team->wires) {
      const StepAnswer answer = ReadStep(wire.get());
      ASSERT_TRUE(answer.result) << wire->Finish().error_message();
      EXPECT_EQ(answer.result->step(), step);
      EXPECT_EQ(answer.result->outcome(), v1::STEP_OUTCOME_SKIPPED);
      EXPECT_EQ(answer.result->reason(), "discarded");
      EXPECT_EQ(answer.result->detail(), who + " discarded it (StepEnd.discard)");
      EXPECT_EQ(answer.result->spikes_size(), 0);
      EXPECT_TRUE(answer.weights.empty());
    }
  }
  static void ExpectDisagreement(Team* team, const std::string& about) {
    for (const auto& wire : team->wires) {
      const StepAnswer answer = ReadStep(wire.get());
      ASSERT_TRUE(answer.result);
      EXPECT_EQ(answer.result->outcome(), v1::STEP_OUTCOME_ABORTED);
      EXPECT_EQ(answer.result->reason(), "disagreement");
      EXPECT_THAT(answer.result->detail(), HasSubstr(about));
    }
  }
  // The run's next step has the bits of a first update: nothing has changed, nothing was counted.
  void ExpectFirstUpdate(Team* team, uint64_t step) {
    SendStep(team, step, {});
    const auto scale = static_cast<float>(1.0 / static_cast<double>(team->wires.size()));
    UpdateReference(team, step, 1, scale);
    ExpectApplied(team);
  }
};

TEST_F(MeasureRpcTest, TheNormIsKnownBeforeTheEndWhichClipsByIt) {
  constexpr double kMost = 0.02;
  for (const uint32_t world : kWorlds) {
    for (const uint32_t micros : {1u, 3u}) {
      SCOPED_TRACE(std::to_string(world) + " ranks, " + std::to_string(micros) + " micro-batches");
      Team team = StartStaged(world, micros);
      const auto scale = static_cast<float>(1.0 / (4 * world));
      for (uint64_t step = 1; step <= 2; ++step) {
        SendStep(&team, step, {.micros = micros, .loss_scale = 4, .open_ended = true, .ends = false});
        SendAll(&team, MeasureRequest());
        const double norm = ExactNorm(team, step, micros, scale);
        for (const auto& wire : team.wires) {
          const v1::StepMeasured measured = ReadMeasured(wire.get());
          EXPECT_EQ(measured.step(), step);
          EXPECT_EQ(measured.grad_norm(), norm);
          EXPECT_EQ(measured.nonfinite_tensors(), 0u);
          EXPECT_FALSE(measured.discarded());
        }
        const bool clips = step == 1;
        const auto clip = clips ? static_cast<float>(kMost / (norm + 1e-6)) : 1.0f;
        SendAll(&team, clips ? ClipRequest(kMost) : EndRequest());
        UpdateReference(&team, step, micros, scale, clip);
        const StepAnswer answer = ExpectApplied(&team);
        ASSERT_TRUE(answer.result);
        EXPECT_GT(norm, kMost);
        EXPECT_EQ(answer.result->grad_norm(), norm);
        EXPECT_EQ(answer.result->clip_coefficient(), static_cast<double>(clip));
      }
    }
  }
}

// The step's own wins over the run's, also where nobody has asked for the norm; and it is of one step.
TEST_F(MeasureRpcTest, TheStepsClippingWinsOverTheRuns) {
  for (const bool of_run : {false, true}) {
    v1::RunSpec spec = StagedSpec(of_run ? "clips" : "does-not");
    if (of_run) spec.set_max_grad_norm(0.3);
    Team team = StartTeam(spec, 2);
    for (uint64_t step = 1; step <= 2; ++step) {
      SendStep(&team, step, {.ends = false});
      SendAll(&team, step == 1 ? ClipRequest(0.1) : EndRequest());
      const double norm = ExactNorm(team, step, 1, 0.5f), most = step == 1 ? 0.1 : 0.3;
      const bool clips = step == 1 || of_run;
      const auto clip = clips ? static_cast<float>(std::min(1.0, most / (norm + 1e-6))) : 1.0f;
      UpdateReference(&team, step, 1, 0.5f, clip);
      const StepAnswer answer = ExpectApplied(&team);
      ASSERT_TRUE(answer.result);
      EXPECT_EQ(answer.result->clip_coefficient(), static_cast<double>(clip));
      EXPECT_EQ(answer.result->grad_norm(), norm);
    }
  }
}

TEST_F(MeasureRpcTest, WhatIsNotFiniteIsToldBeforeTheEnd) {
  Team team = StartStaged(2, 1);
  team.poisoned = {{1, 1}};
  SendStep(&team, 1, {.ends = false});
  SendAll(&team, MeasureRequest());
  const double norm = ExactNorm(team, 1, 1, 0.5f);
  for (const auto& wire : team.wires) {
    const v1::StepMeasured measured = ReadMeasured(wire.get());
    EXPECT_EQ(measured.nonfinite_tensors(), 1u);
    EXPECT_EQ(measured.grad_norm(), norm);
  }
  SendAll(&team, DiscardRequest());
  ExpectDiscarded(&team, 1, "ranks 0, 1");
  ExpectFirstUpdate(&team, 2);
  EXPECT_THAT(metrics_.Serialize(), HasSubstr("ballast_gradients_nonfinite_total{run_id=\"r21\"} 0"));
}

TEST_F(MeasureRpcTest, AStreamThatResumesIsToldAgainToTheBit) {
  Team team = StartStaged(2, 2);
  SendStep(&team, 1, {.micros = 2, .open_ended = true, .ends = false});
  SendAll(&team, MeasureRequest());
  std::vector<std::string> told;
  for (const auto& wire : team.wires) told.push_back(ReadMeasured(wire.get()).SerializeAsString());
  EXPECT_EQ(told[0], told[1]);
  team.wires[1]->Hang();
  const v1::AttachResponse again = Resume(team.spec.run_id, team.tokens[1], 1, 2);
  EXPECT_TRUE(again.step_open());
  team.wires[1] = std::make_unique<Wire>(team.stubs[1].get());
  ASSERT_TRUE(team.wires[1]->Open(again.session_token()));
  team.wires[1]->Begin(1);
  for (const uint32_t micro : {0u, 1u}) {
    team.wires[1]->BeginMicro(micro, /*last=*/false);
    team.wires[1]->EndMicro(micro);
  }
  team.wires[1]->Send(MeasureRequest());
  EXPECT_EQ(ReadMeasured(team.wires[1].get()).SerializeAsString(), told[1]);
  SendAll(&team, EndRequest());
  UpdateReference(&team, 1, 2, 0.5f);
  ExpectApplied(&team);
}

// One rank in the middle of its first micro-batch of two, the others in whatever they do.
TEST_F(MeasureRpcTest, ADiscardedStepChangesNothing) {
  for (const uint32_t world : kWorlds) {
    SCOPED_TRACE(std::to_string(world) + " ranks");
    Team team = StartStaged(world, 2);
    for (uint32_t rank = 0; rank < world; ++rank) {
      team.wires[rank]->Begin(1);
      team.wires[rank]->BeginMicro(0, /*last=*/false);
      SendGradients(team, rank, 1, 0, rank == 0 ? 1 : 3);
      if (rank > 0) team.wires[rank]->EndMicro(0, "", std::numeric_limits<double>::infinity());
    }
    team.wires[0]->Send(DiscardRequest("at 1"));
    for (uint32_t rank = 1; rank < world; ++rank) {
      team.wires[rank]->BeginMicro(1, /*last=*/true);
      SendGradients(team, rank, 1, 1, 3);
      team.wires[rank]->EndMicro(1);
      if (rank > 1) continue;
      // Answered when the discard is there, before which two others may disagree.
      team.wires[1]->Send(MeasureRequest());
      EXPECT_TRUE(ReadMeasured(team.wires[1].get()).discarded());
    }
    for (uint32_t rank = 1; rank < world; ++rank) team.wires[rank]->Send(ClipRequest(rank));  // whatever it says
    ExpectDiscarded(&team, 1, "rank 0");
    ExpectFirstUpdate(&team, 2);
    const v1::RunStatus status = Status(team.spec.run_id);
    EXPECT_EQ(status.steps_skipped(), 1u);
    EXPECT_EQ(status.steps_applied(), 1u);
    const std::string label = "{reason=\"discarded\",run_id=\"" + team.spec.run_id + "\"} 1";
    EXPECT_THAT(metrics_.Serialize(), HasSubstr("ballast_steps_skipped_total" + label));
    const v1::AttachResponse next = AttachFresh(team.spec.run_id, /*takeover=*/true, 0, world);
    EXPECT_EQ(next.client_state(), "at 1");
    EXPECT_EQ(next.client_state_step(), 1u);
  }
}

// A rank that waits for the norm hears that there is none; it does not wait for the rank that discards.
TEST_F(MeasureRpcTest, WhoAsksForTheNormOfADiscardedStepIsTold) {
  Team team = StartStaged(2, 1);
  team.wires[1]->Begin(1);
  team.wires[1]->BeginMicro(0, /*last=*/false);
  SendGradients(team, 1, 1, 0, 3);
  team.wires[1]->EndMicro(0);
  team.wires[1]->Send(MeasureRequest());
  team.wires[0]->Begin(1);
  team.wires[0]->Send(DiscardRequest());
  const v1::StepMeasured measured = ReadMeasured(team.wires[1].get());
  EXPECT_EQ(measured.step(), 1u);
  EXPECT_TRUE(measured.discarded());
  EXPECT_TRUE(std::isnan(measured.grad_norm()));
  team.wires[1]->Send(EndRequest());
  ExpectDiscarded(&team, 1, "rank 0");
  ExpectFirstUpdate(&team, 2);
}

// What was acknowledged and is dropped is not asked for again.
TEST_F(MeasureRpcTest, WhoResumesADiscardedStepNeedsNoneOfItsGradients) {
  Team team = StartStaged(2, 1);
  team.wires[1]->Begin(1);
  SendGradients(team, 1, 1, 0, 2);
  team.wires[0]->Begin(1);
  team.wires[0]->Send(DiscardRequest());
  uint64_t returned = 0;
  while (returned < GradientBytes(team.spec.tensors[0]) + GradientBytes(team.spec.tensors[1])) {
    const auto answer = team.wires[1]->Read();
    ASSERT_TRUE(answer && answer->has_credit());
    returned += answer->credit().bytes();
  }
  team.wires[1]->Hang();
  const v1::AttachResponse again = Resume(team.spec.run_id, team.tokens[1], 1, 2);
  EXPECT_TRUE(again.step_open());
  EXPECT_EQ(UnpackBits(again.tensors_applied(), 3), std::vector<bool>(3, true));
  team.wires[1] = std::make_unique<Wire>(team.stubs[1].get());
  ASSERT_TRUE(team.wires[1]->Open(again.session_token()));
  team.wires[1]->Begin(1);
  team.wires[1]->EndStep();
  ExpectDiscarded(&team, 1, "rank 0");
}

TEST_F(MeasureRpcTest, RanksThatEndWithOtherClippingHaveTheStepAborted) {
  Team team = StartStaged(2, 1);
  SendStep(&team, 1, {.ends = false});
  team.wires[0]->Send(ClipRequest(1));
  team.wires[1]->Send(ClipRequest(1 + 0x1p-52));
  ExpectDisagreement(&team, "max_grad_norm = 1");
}

TEST_F(MeasureRpcTest, RanksWithOtherNumbersOfMicroBatchesHaveTheStepAborted) {
  Team team = StartStaged(2, 3);
  for (const uint32_t rank : {0u, 1u}) {
    team.wires[rank]->Begin(1);
    for (uint32_t micro = 0; micro <= rank; ++micro) {
      team.wires[rank]->BeginMicro(micro, /*last=*/false);
      SendGradients(team, rank, 1, micro, 3);
      team.wires[rank]->EndMicro(micro);
    }
    team.wires[rank]->Send(EndRequest());
  }
  ExpectDisagreement(&team, "micro-batches differ");
}

// The loss that comes with the end, and the mean over micro-batches and ranks.
TEST_F(MeasureRpcTest, ALossMayComeWithTheEnd) {
  Team team = StartStaged(1, 2);
  team.wires[0]->Begin(1);
  for (const uint32_t micro : {0u, 1u}) {
    team.wires[0]->BeginMicro(micro, /*last=*/false);
    SendGradients(team, 0, 1, micro, 3);
    team.wires[0]->EndMicro(micro, "", micro == 0 ? std::optional<double>(1) : std::nullopt);
  }
  team.wires[0]->Send(MeasureRequest());
  EXPECT_EQ(ReadMeasured(team.wires[0].get()).step(), 1u);
  v1::StepEnd end;
  end.set_loss(4);
  team.wires[0]->Send(EndRequest(end));
  UpdateReference(&team, 1, 2, 1);
  ExpectApplied(&team);
  EXPECT_EQ(Status(team.spec.run_id).loss(), 2.5);
}

TEST_F(MeasureRpcTest, WhatAStepMayNotSayIsRefusedByName) {
  v1::RunSpec clipped = StagedSpec("clipped");
  clipped.mutable_tensor_clip();
  struct Case {
    v1::RunSpec spec;
    v1::TrainRequest request;
    grpc::StatusCode code;
    std::vector<std::string> said;
  };
  const auto invalid = grpc::StatusCode::INVALID_ARGUMENT, precondition = grpc::StatusCode::FAILED_PRECONDITION;
  const v1::RunSpec release = SmallSpec(), staged = StagedSpec("staged");
  const Case cases[] = {
      {release, MeasureRequest(), precondition, {"StepMeasure", "commit is release", "commit = staged"}},
      {release, DiscardRequest(), precondition, {"discards it", "commit is release", "commit = staged"}},
      {release, ClipRequest(1), precondition, {"max_grad_norm", "commit is release", "commit = staged"}},
      {staged, ClipRequest(0), invalid, {"StepEnd.max_grad_norm is 0", "finite number above 0"}},
      {staged, ClipRequest(-1), invalid, {"StepEnd.max_grad_norm is -1"}},
      {staged, ClipRequest(std::numeric_limits<double>::infinity()), invalid, {"max_grad_norm is inf"}},
      {staged, ClipRequest(std::nan("")), invalid, {"max_grad_norm is nan"}},
      {clipped, ClipRequest(1), invalid, {"StepEnd.max_grad_norm", "tensor_clip"}},
  };
  int number = 0;
  for (const Case& c : cases) {
    SCOPED_TRACE(c.said[0]);
    v1::RunSpec spec = c.spec;
    spec.set_run_id("refused-" + std::to_string(++number));
    Team team = StartTeam(spec, 1);
    SendStep(&team, 1, {.ends = false});
    team.wires[0]->Send(c.request);
    const grpc::Status refused = team.wires[0]->Finish();
    EXPECT_EQ(refused.error_code(), c.code);
    for (const std::string& said : c.said) EXPECT_THAT(refused.error_message(), HasSubstr(said));
  }
}

}  // namespace
}  // namespace ballast::testing
