// A piece of a tensor's weights in its serving format, on its way out: encoded by the device, then swapped into a
// message and back. Its memory is reserved once. A movable value.
#pragma once

#include <cstdint>
#include <string>
#include <vector>

namespace ballast {

struct WeightPiece {
  std::string data;
  std::vector<float> scales;  // those that the data needs, in order; none for most formats

  void Reserve(uint64_t data_bytes, uint64_t scale_count) {
    data.reserve(data_bytes);
    scales.reserve(scale_count);
  }
  uint64_t bytes() const { return data.size() + scales.size() * sizeof(float); }
  uint64_t reserved_bytes() const { return data.capacity() + scales.capacity() * sizeof(float); }
};

}  // namespace ballast
