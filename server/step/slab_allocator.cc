#include "server/step/slab_allocator.h"

#include <algorithm>

namespace ballast {

SlabAllocator::SlabAllocator(uint64_t bytes, size_t most_slabs) : bytes_(bytes) {
  holes_.reserve(most_slabs + 2);
  holes_.push_back({.offset = 0, .bytes = bytes});
}

uint64_t SlabAllocator::largest_hole() const {
  uint64_t largest = 0;
  for (const Slab& hole : holes_) largest = std::max(largest, hole.bytes);
  return largest;
}

std::optional<Slab> SlabAllocator::Allocate(uint64_t bytes) {
  const auto hole = std::find_if(holes_.begin(), holes_.end(), [&](const Slab& h) { return h.bytes >= bytes; });
  if (hole == holes_.end()) return std::nullopt;
  const Slab slab{.offset = hole->offset, .bytes = bytes};
  hole->offset += bytes;
  hole->bytes -= bytes;
  if (hole->bytes == 0) holes_.erase(hole);
  used_ += bytes;
  return slab;
}

void SlabAllocator::Free(Slab slab) {
  auto next = std::lower_bound(holes_.begin(), holes_.end(), slab.offset,
                               [](const Slab& hole, uint64_t offset) { return hole.offset < offset; });
  used_ -= slab.bytes;
  if (next != holes_.begin() && (next - 1)->offset + (next - 1)->bytes == slab.offset) {
    --next;
    next->bytes += slab.bytes;
  } else {
    next = holes_.insert(next, slab);
  }
  const auto after = next + 1;
  if (after != holes_.end() && next->offset + next->bytes == after->offset) {
    next->bytes += after->bytes;
    holes_.erase(after);
  }
}

}  // namespace ballast
