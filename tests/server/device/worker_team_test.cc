#include "server/device/worker_team.h"

#include <gtest/gtest.h>

#include <algorithm>
#include <atomic>
#include <latch>
#include <vector>

namespace ballast {
namespace {

TEST(WorkerTeamTest, EachPartIsDoneOnce) {
  WorkerTeam team(3, "test");
  for (uint64_t parts = 0; parts < 200; ++parts) {
    std::vector<std::atomic<int>> done(parts);
    team.Share(parts, [&](uint64_t part) { ++done[part]; });
    EXPECT_TRUE(std::ranges::all_of(done, [](const std::atomic<int>& n) { return n == 1; })) << parts << " parts";
  }
}

TEST(WorkerTeamTest, AsManyPartsAsThereAreThreadsAreDoneAtOnce) {
  WorkerTeam team(4, "test");
  EXPECT_EQ(team.threads(), 4u);
  std::latch all(4);
  team.Share(4, [&](uint64_t) { all.arrive_and_wait(); });  // none ends before the last has begun
}

TEST(WorkerTeamTest, ATeamOfOneIsTheCaller) {
  for (const uint32_t threads : {0u, 1u}) {
    WorkerTeam team(threads, "test");
    EXPECT_EQ(team.threads(), 1u);
    EXPECT_TRUE(team.workers().empty());
    const auto caller = std::this_thread::get_id();
    int here = 0;
    team.Share(5, [&](uint64_t) { here += std::this_thread::get_id() == caller ? 1 : 0; });
    EXPECT_EQ(here, 5);
  }
}

TEST(WorkerTeamTest, WhatWorkersWroteIsSeenByTheCaller) {
  WorkerTeam team(2, "test");
  std::vector<uint64_t> written(1000);
  for (uint64_t round = 1; round <= 100; ++round) {
    team.Share(written.size(), [&](uint64_t part) { written[part] = round * part; });
    for (uint64_t i = 0; i < written.size(); ++i) ASSERT_EQ(written[i], round * i);
  }
}

}  // namespace
}  // namespace ballast
