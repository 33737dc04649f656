#include "server/stability/spike_policy.h"

#include <gtest/gtest.h>

#include <string>
#include <string_view>

namespace ballast {
namespace {

const std::vector<SpikeEvent> kRms = {{.kind = SpikeKind::kRms}}, kLoss = {{.kind = SpikeKind::kLoss}}, kNothing = {};

SpikeSettings Settings(SpikeAction action, SpikeKind acts_on) {
  SpikeSettings settings;
  settings.action = action;
  settings.acts_on[static_cast<size_t>(acts_on)] = true;
  return settings;
}

// A character a step, x: an event; gives S for each step skipped.
std::string Skips(SpikeSettings settings, std::string_view steps) {
  SpikePolicy policy(settings);
  std::string out;
  for (const char c : steps) out += policy.Skips(c == 'x' ? kRms : kNothing) ? 'S' : '.';
  return out;
}

// Likewise: R rewind, ! stop.
std::string Rewinds(SpikeSettings settings, std::string_view steps) {
  SpikePolicy policy(settings);
  std::string out;
  for (const char c : steps) out += ".R!"[static_cast<size_t>(policy.Decide(c == 'x' ? kLoss : kNothing))];
  return out;
}

TEST(SpikePolicyTest, WarningIsNoAction) {
  SpikeSettings settings = Settings(SpikeAction::kWarn, SpikeKind::kRms);
  EXPECT_EQ(Skips(settings, "xxx"), "...");
  EXPECT_EQ(Rewinds(settings, "xxx"), "...");
}

TEST(SpikePolicyTest, ActsOnWhatItIsToldToOnly) {
  SpikePolicy policy(Settings(SpikeAction::kSkip, SpikeKind::kRms));
  EXPECT_FALSE(policy.Skips(kLoss));
  EXPECT_TRUE(policy.Skips(kRms));
  EXPECT_EQ(policy.Decide(kRms), SpikePolicy::Answer::kGoOn);
}

TEST(SpikePolicyTest, SkipsInARowEnd) {
  SpikeSettings settings = Settings(SpikeAction::kSkip, SpikeKind::kRms);
  settings.most_skips = 3;
  EXPECT_EQ(Skips(settings, ".x.xx..xxxxx"), ".S.SS..SSS.S");
}

TEST(SpikePolicyTest, RestsAfterSkips) {
  SpikeSettings settings = Settings(SpikeAction::kSkip, SpikeKind::kRms);
  settings.most_skips = 2;
  settings.cooldown_steps = 2;
  EXPECT_EQ(Skips(settings, "xx.xxxx"), "SS...SS");
}

TEST(SpikePolicyTest, RewindsAreCountedAndEndInAStop) {
  SpikeSettings settings = Settings(SpikeAction::kRewind, SpikeKind::kLoss);
  settings.most_rewinds = 2;
  EXPECT_EQ(Rewinds(settings, ".x..x.x"), ".R..R.!");
}

TEST(SpikePolicyTest, RestsAfterARewind) {
  SpikeSettings settings = Settings(SpikeAction::kRewind, SpikeKind::kLoss);
  settings.cooldown_steps = 2;
  EXPECT_EQ(Rewinds(settings, "xxxx"), "R..R");
}

}  // namespace
}  // namespace ballast
