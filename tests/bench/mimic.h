// A kernel's memory traffic without its arithmetic: what the machine allows a fused update at best.
#pragma once

#include <cstddef>
#include <cstdint>

namespace ballast::bench {

// One array: what a row of 256 elements takes of it, a multiple of 4 bytes.
struct Stream {
  std::byte* data;
  uint64_t row_bytes;
};

// Row by row: reads `gradient` and reads and writes each of the `planes` in place. Every word becomes word ^ key, so
// that a key of 0, which the compiler does not see, leaves all as it was. Returns something made of the gradient.
uint64_t Mimic(const Stream* planes, int count, const Stream& gradient, uint64_t first_row, uint64_t last_row,
               uint64_t key);

}  // namespace ballast::bench
