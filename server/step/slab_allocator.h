// Where gradients are summed: slabs, cut first-fit from one buffer that was reserved with the run. A slab holds one
// tensor's gradient, from its first chunk until its update has read it.
//
// Bookkeeping only; the bytes belong to the caller. Strand-confined. Each call walks over the holes, of which there are
// at most slabs + 1.
#pragma once

#include <cstdint>
#include <optional>
#include <vector>

namespace ballast {

struct Slab {
  uint64_t offset = 0;
  uint64_t bytes = 0;
};

class SlabAllocator {
 public:
  // most_slabs: how many may be live at once, so that nothing is allocated later.
  SlabAllocator(uint64_t bytes, size_t most_slabs);

  bool Fits(uint64_t bytes) const { return bytes <= largest_hole(); }
  uint64_t largest_hole() const;
  std::optional<Slab> Allocate(uint64_t bytes);
  void Free(Slab slab);

  uint64_t bytes() const { return bytes_; }
  uint64_t used() const { return used_; }

 private:
  const uint64_t bytes_;
  uint64_t used_ = 0;
  std::vector<Slab> holes_;  // by offset; neighbours never touch
};

}  // namespace ballast
