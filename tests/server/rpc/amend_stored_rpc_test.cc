// A run whose tensors are stored otherwise from some step on.
#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include <string>
#include <vector>

#include "tests/server/rpc/amend_fixture.h"

namespace ballast::testing {
namespace {

using ::testing::HasSubstr;

struct Formats {
  const char *rule, *master, *state;
};

class AmendStoredRpcTest : public AmendRpcTest {
 protected:
  static void Store(v1::GroupSpec* group, const Formats& formats) {
    group->set_rule(formats.rule);
    group->set_master(formats.master);
    group->set_state(formats.state);
  }
  void ExpectAmended(Team* team, const v1::RunSpec& spec) {
    v1::AmendRunResponse amended;
    const grpc::Status s = Amend(team->tokens[0], spec, &amended);
    ASSERT_TRUE(s.ok()) << s.error_message();
    EXPECT_TRUE(amended.amended());
    EXPECT_EQ(amended.tensors_added() == 0, Status("r1").weights_loaded());
    const v1::RunStatus status = Status("r1");
    EXPECT_EQ(status.bytes().SerializeAsString(), status.plan().server().SerializeAsString());
    EXPECT_EQ(status.bytes().SerializeAsString(), amended.plan().server().SerializeAsString());
    Follow(team, spec);
  }
};

TEST_F(AmendStoredRpcTest, WhatIsStoredOtherwiseIsConvertedAndTrainsOn) {
  const std::vector<Formats> ways[] = {
      {{"adamw", "split24", "companded8"}, {"adamw", "fp32", "fp32"}, {"adamw", "bf16", "bf16"}},
      {{"adamw", "fp32", "fp32"}, {"adamw", "split24", "companded8"}, {"adamw", "flash24", "flash8"}},
      {{"adamw", "fp32", "fp32"}, {"adam", "split32", "companded8"}, {"adamw", "split24", "fp32"}},
      {{"lion", "split24", "companded8"}, {"lion", "fp32", "companded8"}, {"lion", "fp32", "fp32"}},
  };
  for (const std::vector<Formats>& way : ways) {
    for (const uint32_t world : {1u, 8u}) {
      v1::RunSpec spec = ForWorld(Spec(), world);
      Store(spec.mutable_groups(0), way[0]);
      Team team = StartTeam(spec, world);
      uint64_t step = 0;
      for (size_t i = 0; i < way.size(); ++i) {
        SCOPED_TRACE(::testing::Message() << way[i].rule << ", " << way[i].master << ", " << way[i].state);
        Store(spec.mutable_groups(0), way[i]);
        if (i > 0) ExpectAmended(&team, spec);
        for (int k = 0; k < 2; ++k) ExpectStep(&team, ++step, 1, 1.0f / static_cast<float>(world));
      }
      StartAnew(&team);
    }
  }
}

TEST_F(AmendStoredRpcTest, ThereAndBackIsToTheBit) {
  v1::RunSpec spec = Spec();
  Team team = StartTeam(spec, 1);
  for (uint64_t step = 1; step <= 3; ++step) ExpectStep(&team, step, 1, 1);
  const auto before = Stored("r1", kKept);
  v1::RunSpec wide = spec;
  Store(wide.mutable_groups(0), {"adamw", "fp32", "fp32"});
  ExpectAmended(&team, wide);
  EXPECT_EQ(Stored("r1", kKept), before) << "fp32 holds all of it";
  ExpectAmended(&team, spec);
  EXPECT_EQ(Stored("r1", kKept), before);
}

// Of tensors that came with it, and before it, and that are added.
TEST_F(AmendStoredRpcTest, OneOfThemIsStoredOtherwiseAndTheRestKeepsItsBits) {
  v1::RunSpec spec = Spec();
  spec.mutable_rewind()->set_snapshots(2);
  spec.mutable_rewind()->set_every(1);
  Team team = StartTeam(spec, 1);
  uint64_t step = 0;
  const auto train = [&] {
    for (int i = 0; i < 2; ++i) ExpectStep(&team, ++step, 1, 1);
  };
  train();
  spec = Grown(spec);
  ExpectAmended(&team, spec);
  train();
  auto before = Stored("r1", 4);
  Store(spec.add_groups(), {"adamw", "bf16", "bf16"});
  spec.mutable_tensors(1)->set_group(2);
  AddTensor(&spec, "added", {7}, 2);
  ExpectAmended(&team, spec);
  auto after = Stored("r1", 4);
  for (auto* stored : {&before, &after}) {
    for (const char* slot : {"master", "momentum", "variance"}) EXPECT_EQ(stored->erase({1, slot}), 1u) << slot;
  }
  EXPECT_EQ(after, before);
  train();

  const auto kept = Stored("r1", 5);
  SendStep(&team, step + 1, {});
  ASSERT_TRUE(ReadStep(team.wires[0].get()).result);
  ASSERT_TRUE(RewindTo(step).ok());
  EXPECT_EQ(Stored("r1", 5), kept) << "a snapshot has what was converted";
}

TEST_F(AmendStoredRpcTest, ARefusalLeavesTheRunAsItWas) {
  v1::RunSpec spec = Spec();
  Store(spec.mutable_groups(0), {"adamw", "fp32", "fp32"});
  Team team = StartTeam(spec, 1);
  ExpectStep(&team, 1, 1, 1);
  Store(spec.mutable_groups(0), {"lion", "split24", "companded8"});
  EXPECT_THAT(Amend(team.tokens[0], spec).error_message(),
              HasSubstr("the rule of tensor 'layers.0.w' is adamw with state fp32, asked for is lion with companded8"));
  ExpectStep(&team, 2, 1, 1);
}

}  // namespace
}  // namespace ballast::testing
