// Several ranks of one run, and what their steps must give: helpers for tests that train with a team.
#pragma once

#include <cstdint>
#include <memory>
#include <random>
#include <set>
#include <string>
#include <utility>
#include <vector>

#include "tests/server/rpc/rpc_fixture.h"

namespace ballast::testing {

class TeamRpcTest : public RpcTest {
 protected:
  struct Team {
    RunSpec spec;
    std::vector<std::string> tokens;
    std::vector<std::unique_ptr<v1::TrainerService::Stub>> stubs;  // a connection for each rank
    std::vector<std::unique_ptr<Wire>> wires;                      // by rank
    std::unique_ptr<Reference> reference;
    std::set<std::pair<uint64_t, uint32_t>> poisoned;  // step and tensor: its first gradient element is infinite
  };
  // How a step is sent.
  struct StepShape {
    uint32_t micros = 1;
    std::optional<double> loss_scale = std::nullopt;
    std::optional<double> end_lr = std::nullopt;  // of the first group, with StepEnd
    uint32_t shuffle = 0;                         // of what comes when
    bool open_ended = false;                      // no micro-batch is announced as the last
    bool ends = true;                             // with StepEnd
  };

  void SetUp() override { StartServer(); }

  static v1::RunSpec StagedSpec(const std::string& run_id = "r1");
  // Rank 0 loads the weights.
  Team StartTeam(v1::RunSpec wire_spec, uint32_t world);

  static std::string GradientOf(const Team& team, uint32_t tensor, uint64_t step, uint32_t rank, uint32_t micro);
  // The sum of the gradients in fp32, in the order in which they are given.
  static std::vector<float> Sum(const RunSpec& spec, uint32_t tensor, const std::vector<std::string>& gradients);
  // The sum of the tensor's gradients over all ranks and micro-batches of the step.
  static std::vector<float> SumOf(const Team& team, uint32_t tensor, uint64_t step, uint32_t micros);

  // The norm of the step's whole gradient, to the bit: of the tensors' sums of squares, each in the order of the
  // statistics, in the order of the spec.
  static double ExactNorm(const Team& team, uint64_t step, uint32_t micros, float scale);

  void SendStep(Team* team, uint64_t step, const StepShape& shape);
  static void UpdateReference(Team* team, uint64_t step, uint32_t micros, float scale, float clip = 1);
  // Expects that every rank gets the reference's weights to the bit. Returns rank 0's answer.
  static StepAnswer ExpectApplied(Team* team);
  // Makes a whole step, and expects the reference's weights.
  void ExpectStep(Team* team, uint64_t step, uint32_t micros, float scale);

 private:
  // All ranks send one micro-batch, chunk by chunk, in an order that mixes ranks and tensors.
  static void SendMicro(Team* team, uint64_t step, uint32_t micro, std::mt19937* random);
};

}  // namespace ballast::testing
