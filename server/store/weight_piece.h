// A piece of a tensor's weights in its serving format, on its way out: the device encodes it, then it is swapped into a
// message and back, or it is encoded where a transport wants it. Its own memory is reserved once. A movable value.
#pragma once

#include <cstddef>
#include <cstdint>
#include <cstring>
#include <string>
#include <vector>

#include "absl/types/span.h"
#include "proto/checksum.h"

namespace ballast {

struct WeightPiece {
  std::string data;
  std::vector<float> scales;  // those that the data needs, in order; none for most formats
  uint32_t crc32c = 0;        // of the encoded bytes, since Seal or the device that encoded them
  // Where not null, memory that a transport lends and that is used instead of `data`; any piece of the run fits.
  std::byte* place = nullptr;
  bool on_device = false;     // that memory is the device's (SharedMemory): the piece has no checksum, and is not cut
  uint32_t slot = 0;          // the transport's own number of that memory
  uint64_t placed_bytes = 0;  // encoded there

  void Reserve(uint64_t data_bytes, uint64_t scale_count) {
    data.reserve(data_bytes);
    scales.reserve(scale_count);
  }
  // Makes room for so many encoded bytes.
  std::byte* Resize(uint64_t data_bytes) {
    if (place != nullptr) {
      placed_bytes = data_bytes;
      return place;
    }
    data.resize(data_bytes);
    return reinterpret_cast<std::byte*>(data.data());
  }
  // Keeps so many of the encoded bytes, from `first` on.
  void Cut(uint64_t first, uint64_t count) {
    if (place != nullptr) {
      std::memmove(place, place + first, count);
      placed_bytes = count;
      return;
    }
    data.erase(0, first);
    data.resize(count);
  }
  void Seal() { crc32c = Crc32c(encoded()); }
  // Where they are, which is not for the host to read if it is on_device.
  absl::Span<const std::byte> encoded() const {
    if (place != nullptr) return {place, placed_bytes};
    return {reinterpret_cast<const std::byte*>(data.data()), data.size()};
  }
  uint64_t bytes() const { return encoded().size() + scales.size() * sizeof(float); }
  uint64_t reserved_bytes() const { return data.capacity() + scales.capacity() * sizeof(float); }
};

}  // namespace ballast
