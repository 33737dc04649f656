#include "server/step/slab_allocator.h"

#include <gtest/gtest.h>

#include <algorithm>
#include <random>

namespace ballast {
namespace {

TEST(SlabAllocatorTest, FirstFitReusesTheFirstHole) {
  SlabAllocator pool(1024, 8);
  const auto a = pool.Allocate(256), b = pool.Allocate(256), c = pool.Allocate(256);
  ASSERT_TRUE(a && b && c);
  pool.Free(*a);
  EXPECT_EQ(pool.Allocate(128)->offset, 0u);
  EXPECT_FALSE(pool.Fits(512));
  EXPECT_TRUE(pool.Fits(256));
}

TEST(SlabAllocatorTest, NeighbouringHolesBecomeOne) {
  SlabAllocator pool(768, 8);
  const auto a = pool.Allocate(256), b = pool.Allocate(256), c = pool.Allocate(256);
  pool.Free(*a);
  pool.Free(*c);
  EXPECT_FALSE(pool.Fits(512));
  pool.Free(*b);
  EXPECT_TRUE(pool.Fits(768));
  EXPECT_EQ(pool.used(), 0u);
}

TEST(SlabAllocatorTest, SlabsNeverOverlapAndAllComeBack) {
  std::mt19937 random(5);
  SlabAllocator pool(64 * 1000, 1000);
  std::vector<Slab> live;
  for (int i = 0; i < 20000; ++i) {
    if (random() % 2 == 0 || live.empty()) {
      const auto slab = pool.Allocate(64 * (1 + random() % 40));
      if (!slab) continue;
      for (const Slab& other : live) {
        ASSERT_TRUE(slab->offset + slab->bytes <= other.offset || other.offset + other.bytes <= slab->offset);
      }
      live.push_back(*slab);
    } else {
      std::swap(live[random() % live.size()], live.back());
      pool.Free(live.back());
      live.pop_back();
    }
  }
  for (const Slab& slab : live) pool.Free(slab);
  EXPECT_TRUE(pool.Fits(pool.bytes()));
}

}  // namespace
}  // namespace ballast
