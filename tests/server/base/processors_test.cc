#include "server/base/processors.h"

#include <gtest/gtest.h>
#include <sched.h>

#include <thread>

namespace ballast {
namespace {

using Numbers = std::vector<uint32_t>;

NumaNode Node(uint32_t id, uint32_t first, uint32_t count) {
  NumaNode node{.id = id, .processors = {}};
  for (uint32_t i = 0; i < count; ++i) node.processors.push_back(first + i);
  return node;
}

TEST(ProcessorsTest, SetsOfNumbersAreReadAsTheSystemWritesThem) {
  EXPECT_EQ(ParseNumbers("0-3,8,10-11"), (Numbers{0, 1, 2, 3, 8, 10, 11}));
  EXPECT_EQ(ParseNumbers("5"), Numbers{5});
  EXPECT_EQ(ParseNumbers(""), Numbers{});
  EXPECT_EQ(ParseNumbers("x,2,3-y,0-4294967295,-1"), Numbers{2}) << "no number, no end, too many";
}

TEST(ProcessorsTest, AControlGroupsShareBoundsTheProcessors) {
  EXPECT_EQ(UsableProcessors(64, "max 100000"), 64u);
  EXPECT_EQ(UsableProcessors(64, "400000 100000"), 4u);
  EXPECT_EQ(UsableProcessors(64, "150000 100000"), 2u) << "one and a half";
  EXPECT_EQ(UsableProcessors(64, "1000 100000"), 1u);
  EXPECT_EQ(UsableProcessors(2, "400000 100000"), 2u);
  EXPECT_EQ(UsableProcessors(8, "-1 100000"), 8u) << "version 1 without a quota";
  EXPECT_EQ(UsableProcessors(8, " "), 8u);
  EXPECT_EQ(UsableProcessors(0, ""), 1u);
}

TEST(ProcessorsTest, ThreadsAreSpreadAsProcessorsAre) {
  const std::vector<NumaNode> even = {Node(0, 0, 4), Node(1, 4, 4)}, uneven = {Node(0, 0, 6), Node(3, 6, 2)};
  EXPECT_EQ(SpreadThreads(even, 4), (std::vector<size_t>{0, 1, 0, 1}));
  EXPECT_EQ(SpreadThreads(uneven, 8), (std::vector<size_t>{0, 0, 0, 1, 0, 0, 0, 1}));
  EXPECT_EQ(SpreadThreads({Node(0, 0, 1)}, 3), (std::vector<size_t>{0, 0, 0})) << "more than processors";
  EXPECT_EQ(SpreadThreads({}, 3), std::vector<size_t>{});
}

// On a thread of its own, whose affinity ends with it.
TEST(ProcessorsTest, OnlyWhatTheProcessMayUseCounts) {
  std::thread([] {
    const std::vector<NumaNode> all = NumaNodes();
    cpu_set_t set;
    ASSERT_EQ(sched_getaffinity(0, sizeof set, &set), 0);
    uint32_t one = 0;
    while (!CPU_ISSET(one, &set)) ++one;
    CPU_ZERO(&set);
    CPU_SET(one, &set);
    ASSERT_EQ(sched_setaffinity(0, sizeof set, &set), 0);
    const std::vector<NumaNode> left = NumaNodes();
    EXPECT_EQ(left.size(), all.empty() ? 0u : 1u) << "some systems tell of no node";
    for (const NumaNode& node : left) EXPECT_EQ(node.processors, Numbers{one});
    EXPECT_EQ(UsableProcessors(), 1u);
  }).join();
}

}  // namespace
}  // namespace ballast
