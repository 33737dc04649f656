// Which warp of a launch works on which tiles. A launch serves a batch of tensors whose tiles are numbered through.
// Every warp takes one run of consecutive tiles, all runs as equal as can be, so that it looks its tensor up once.
// Plain functions, which the tests run on a CPU.
#pragma once

#include <cstdint>

#include "kernels/simd/vector.h"

namespace ballast::kernels {
inline namespace BALLAST_UNIT {

struct TileRange {
  uint64_t first, last;
};

// The share of warp number `warp`, of `warps`, in `tiles` tiles.
BALLAST_FN TileRange TilesOfWarp(uint64_t warp, uint64_t warps, uint64_t tiles) {
  const uint64_t each = tiles / warps, more = tiles % warps;  // the first `more` warps take one more
  const uint64_t first = warp * each + (warp < more ? warp : more);
  return {first, first + each + (warp < more ? 1 : 0)};
}

// The item that holds the tile: the last whose first_tile is not above it. Items without tiles hold none.
template <class Item>
BALLAST_FN int ItemOfTile(const Item* items, int count, uint64_t tile) {
  int low = 0, high = count;
  while (high - low > 1) {
    const int middle = low + (high - low) / 2;
    (items[middle].first_tile <= tile ? low : high) = middle;
  }
  return low;
}

// Calls act(item, tile of the item) for every tile of a warp.
template <class Item, class Act>
BALLAST_FN void ForTilesOfWarp(const Item* items, int count, uint64_t tiles, uint64_t warp, uint64_t warps, Act&& act) {
  const TileRange range = TilesOfWarp(warp, warps, tiles);
  if (range.first == range.last) return;
  int item = ItemOfTile(items, count, range.first);
  for (uint64_t tile = range.first; tile < range.last; ++tile) {
    while (item + 1 < count && items[item + 1].first_tile <= tile) ++item;
    act(items[item], tile - items[item].first_tile);
  }
}

}  // namespace BALLAST_UNIT
}  // namespace ballast::kernels
