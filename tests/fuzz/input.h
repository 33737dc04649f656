// How fuzz targets read their input.
#pragma once

#include <algorithm>
#include <cstdint>
#include <cstring>
#include <string>

namespace ballast::fuzz {

// Reads values off the front; zeros when there is nothing left.
class Input {
 public:
  Input(const uint8_t* data, size_t size) : data_(data), size_(size) {}
  template <class T>
  T Take() {
    T value{};
    const size_t count = std::min(sizeof value, size_);
    if (count > 0) std::memcpy(&value, data_, count);
    data_ += count;
    size_ -= count;
    return value;
  }
  // Below n, from one byte; n at least 1.
  uint32_t Below(uint32_t n) { return Take<uint8_t>() % n; }
  std::string Rest() { return {reinterpret_cast<const char*>(data_), size_}; }
  size_t left() const { return size_; }

 private:
  const uint8_t* data_;
  size_t size_;
};

}  // namespace ballast::fuzz
