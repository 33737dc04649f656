// Which warp works on which tile: every tile of every tensor of a batch by exactly one warp, for any sizes.
#include "kernels/cuda/warp_grid.h"

#include <gtest/gtest.h>

#include <algorithm>
#include <numeric>
#include <random>
#include <vector>

namespace ballast::kernels {
namespace {

struct Item {
  uint64_t first_tile;
};

struct Batch {
  explicit Batch(const std::vector<uint64_t>& tiles_of_items) {
    for (const uint64_t n : tiles_of_items) {
      items.push_back({tiles});
      tiles += n;
    }
  }
  std::vector<Item> items;
  uint64_t tiles = 0;
};

const uint64_t kWarps[] = {1, 2, 3, 31, 32, 1583, 1584, 2112, 1ull << 31};

TEST(WarpGridTest, RangesAreEvenAndLeaveNothingOut) {
  for (const uint64_t tiles : {uint64_t{0}, uint64_t{1}, uint64_t{1583}, uint64_t{1584}, uint64_t{1585},
                               uint64_t{244141}, uint64_t{1} << 21, (uint64_t{1} << 52) + 7}) {
    for (const uint64_t warps : kWarps) {
      uint64_t next = 0;
      const uint64_t looked_at = std::min<uint64_t>(warps, 4000);
      for (uint64_t w = 0; w < looked_at; ++w) {
        const TileRange range = TilesOfWarp(w, warps, tiles);
        ASSERT_EQ(range.first, next);
        ASSERT_GE(range.last, range.first);
        ASSERT_LE(range.last - range.first, tiles / warps + 1);
        ASSERT_GE(range.last - range.first, tiles / warps);
        next = range.last;
      }
      EXPECT_EQ(TilesOfWarp(warps - 1, warps, tiles).last, tiles);
      if (looked_at == warps) {
        EXPECT_EQ(next, tiles);
      }
    }
  }
}

void ExpectEveryTileOnce(const std::vector<uint64_t>& sizes, uint64_t warps) {
  const Batch batch(sizes);
  std::vector<std::vector<int>> seen;
  for (const uint64_t n : sizes) seen.emplace_back(n);
  for (uint64_t w = 0; w < warps; ++w) {
    ForTilesOfWarp(batch.items.data(), static_cast<int>(batch.items.size()), batch.tiles, w, warps,
                   [&](const Item& item, uint64_t tile) {
                     auto& tiles = seen[static_cast<size_t>(&item - batch.items.data())];
                     ASSERT_LT(tile, tiles.size());
                     ++tiles[tile];
                   });
  }
  for (const auto& tiles : seen) {
    EXPECT_TRUE(std::all_of(tiles.begin(), tiles.end(), [](int count) { return count == 1; }));
  }
}

TEST(WarpGridTest, EveryTileOfABatchIsDoneOnce) {
  std::mt19937 random(1);
  std::vector<std::vector<uint64_t>> batches = {{1},
                                                {0},
                                                {0, 0, 1},
                                                {1, 0, 0},
                                                {0, 1, 0, 0, 2, 0},
                                                {5000},
                                                std::vector<uint64_t>(20000, 1),
                                                {4000, 1, 1, 0, 4000}};
  for (int i = 0; i < 30; ++i) {
    std::vector<uint64_t> sizes(1 + random() % 300);
    for (uint64_t& n : sizes) n = random() % 4 == 0 ? random() % 200 : random() % 3;
    batches.push_back(sizes);
  }
  for (const auto& sizes : batches) {
    for (const uint64_t warps : {1u, 2u, 7u, 32u, 1584u}) {
      ExpectEveryTileOnce(sizes, warps);
      if (HasFailure()) return;
    }
  }
}

// A tensor of 2^33 elements among small ones: its tiles are found without counting to them.
TEST(WarpGridTest, AHugeTensorsTilesAreFound) {
  const uint64_t huge = 1ull << 21;
  const Batch batch({3, huge, 0, 2});
  const int count = static_cast<int>(batch.items.size());
  EXPECT_EQ(ItemOfTile(batch.items.data(), count, 0), 0);
  EXPECT_EQ(ItemOfTile(batch.items.data(), count, 2), 0);
  EXPECT_EQ(ItemOfTile(batch.items.data(), count, 3), 1);
  EXPECT_EQ(ItemOfTile(batch.items.data(), count, huge + 2), 1);
  EXPECT_EQ(ItemOfTile(batch.items.data(), count, huge + 3), 3);
}

}  // namespace
}  // namespace ballast::kernels
