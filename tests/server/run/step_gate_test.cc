#include "server/run/step_gate.h"

#include <gtest/gtest.h>

#include <utility>

namespace ballast {
namespace {

StepMachine MachineOfOneTensor() {
  StepMachineOptions options{.tensor_names = {"w"}};
  options.reduction = {.chunks = {1}, .slab_bytes = {1}, .pool_of = {0}, .pool_bytes = {1}, .micros = 1};
  return StepMachine(std::move(options));
}

TEST(StepGateTest, NoStepBeginsBeforeTheWeightsAreLoaded) {
  const StepMachine machine = MachineOfOneTensor();
  StepGate gate;
  EXPECT_TRUE(absl::IsFailedPrecondition(gate.Check(machine, 1)));
  gate.set_weights_loaded(true);
  EXPECT_TRUE(gate.Check(machine, 1).ok());
}

TEST(StepGateTest, NoStepBeginsWhileTheDaemonDrains) {
  const StepMachine machine = MachineOfOneTensor();
  StepGate gate;
  gate.set_weights_loaded(true);
  gate.Drain();
  EXPECT_TRUE(absl::IsUnavailable(gate.Check(machine, 1)));
}

TEST(StepGateTest, AStoppedRunSaysWhyItWasStoppedFirst) {
  const StepMachine machine = MachineOfOneTensor();
  StepGate gate;
  gate.set_weights_loaded(true);
  EXPECT_FALSE(gate.Stop(""));
  EXPECT_TRUE(gate.Check(machine, 1).ok());
  EXPECT_TRUE(gate.Stop("the first reason"));
  EXPECT_FALSE(gate.Stop("another"));
  EXPECT_EQ(gate.Check(machine, 1), absl::FailedPreconditionError("the first reason"));
  EXPECT_TRUE(gate.Check(machine, 7).ok()) << "the step machine refuses a step that is not the next";
  gate.GoBackTo("");
  EXPECT_TRUE(gate.Check(machine, 1).ok());
}

}  // namespace
}  // namespace ballast
