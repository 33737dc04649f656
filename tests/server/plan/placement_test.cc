#include "server/plan/placement.h"

#include <gtest/gtest.h>

#include <algorithm>

#include "server/convert/convert.h"
#include "server/plan/plan.h"
#include "tests/server/specs.h"

namespace ballast {
namespace {

using testing::Made;
using testing::MakeSpec;

RunSpec EightTensors() {
  return Made(MakeSpec("r1", {{"a", {1000}},
                              {"b", {800, 1000}},
                              {"c", {700, 1000}},
                              {"d", {600, 1000}},
                              {"e", {500, 1000}},
                              {"f", {400, 1000}},
                              {"g", {300, 1000}},
                              {"h", {1}}}));
}

TEST(PlacementTest, ARunThatFitsOnOneDeviceGoesToTheRoomiest) {
  const RunSpec spec = EightTensors();
  const uint64_t need = MakePlan(spec).bytes.total();
  for (const std::vector<uint64_t>& free :
       {std::vector<uint64_t>{need}, {need, need}, {0, need}, {need, 2 * need, 3 * need / 2}, {need - 1, need}}) {
    const auto placement = ChoosePlacement(spec, free);
    ASSERT_TRUE(placement);
    const auto roomiest = std::max_element(free.begin(), free.end()) - free.begin();
    EXPECT_EQ(placement->devices, std::vector<size_t>{static_cast<size_t>(roomiest)});
    EXPECT_EQ(placement->shard_of, std::vector<uint32_t>(8));
  }
}

TEST(PlacementTest, ALargerRunIsSpreadEvenly) {
  const RunSpec spec = EightTensors();
  const uint64_t need = MakePlan(spec).bytes.total();
  const auto placement = ChoosePlacement(spec, {need - 1, 0, need - 1, need - 1});
  ASSERT_TRUE(placement);
  std::vector<size_t> devices = placement->devices;
  std::sort(devices.begin(), devices.end());
  EXPECT_EQ(devices, (std::vector<size_t>{0, 2, 3}));
  const Plan plan = MakePlan(spec, *placement);
  ASSERT_EQ(plan.shards.size(), 3u);
  uint64_t least = need, most = 0, weights = 0;
  for (const ShardPlan& shard : plan.shards) {
    least = std::min(least, shard.bytes.weights);
    most = std::max(most, shard.bytes.weights);
    weights += shard.bytes.weights;
  }
  EXPECT_EQ(weights, MakePlan(spec).bytes.weights);
  EXPECT_EQ(weights, plan.bytes.weights);
  EXPECT_LT(static_cast<double>(most), 1.2 * static_cast<double>(least));
}

TEST(PlacementTest, WhatFitsNowhereHasNoPlacement) {
  const RunSpec spec = EightTensors();
  const uint64_t need = MakePlan(spec).bytes.total();
  EXPECT_FALSE(ChoosePlacement(spec, {need - 1}));
  EXPECT_FALSE(ChoosePlacement(spec, {0, 0}));
  // Enough in all, but the largest tensor is whole on some device.
  EXPECT_FALSE(ChoosePlacement(spec, std::vector<uint64_t>(100, need / 50)));
}

// The plan's bytes are those of its parts, for any placement.
TEST(PlacementTest, AShardOfOneDeviceIsThePlan) {
  const RunSpec spec = EightTensors();
  const Plan whole = MakePlan(spec);
  ASSERT_EQ(whole.shards.size(), 1u);
  EXPECT_TRUE(whole.shards[0].bytes == whole.bytes);
  PlanBytes rest = whole.bytes;
  rest -= whole.shards[0].bytes;
  EXPECT_EQ(rest.total() + rest.padding, 0u);
}

TEST(PlacementTest, WhatIsAddedGoesToTheRoomiestOfTheRunsDevicesAndTheRestStays) {
  const RunSpec spec = EightTensors();
  const Placement six{.devices = {2, 0}, .shard_of = {0, 1, 0, 1, 1, 1}};
  const Placement grown = Extended(six, spec, {100, 1u << 30, 100'000'000});
  EXPECT_EQ(grown.devices, six.devices);
  EXPECT_EQ(grown.shard_of, (std::vector<uint32_t>{0, 1, 0, 1, 1, 1, 0, 0}));
  EXPECT_EQ(Extended(six, spec, {1'400'000, 0, 1'500'000}).shard_of, (std::vector<uint32_t>{0, 1, 0, 1, 1, 1, 0, 1}));
}

TEST(PlacementTest, SnapshotsOfAGpusRunTakeRoomOfTheHostAlone) {
  RunSpec spec = EightTensors();
  spec.snapshots = 2;
  const PlanBytes bytes = MakePlan(spec).bytes;
  const uint64_t need = bytes.on_device(), beside = bytes.snapshots + bytes.client_state;
  EXPECT_TRUE(ChoosePlacement(spec, {need}, beside));
  EXPECT_FALSE(ChoosePlacement(spec, {need}, beside - 1));
  EXPECT_FALSE(ChoosePlacement(spec, {need}));  // the device is the host
  EXPECT_TRUE(ChoosePlacement(spec, {need + beside}));
}

}  // namespace
}  // namespace ballast
