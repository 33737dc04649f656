// A queue whose memory stays: what is pushed takes the place of what was popped, so that nothing is allocated but when it
// grows, to twice its length.
//
//   RingBuffer<int> ring;
//   ring.push(1);
//   int first = ring.pop();   // requires that it is not empty
//
// T is movable, and holds nothing once it was moved from. Thread-compatible.
#pragma once

#include <cstddef>
#include <utility>
#include <vector>

namespace ballast {

template <typename T>
class RingBuffer {
 public:
  bool empty() const { return size_ == 0; }
  size_t size() const { return size_; }
  // Requires that it is not empty, as pop does.
  T& front() { return places_[first_]; }
  const T& front() const { return places_[first_]; }
  // That `later` others came after; there are more than so many.
  T& back(size_t later = 0) { return places_[(first_ + size_ - 1 - later) & (places_.size() - 1)]; }

  void push(T value) {
    if (size_ == places_.size()) Grow();
    places_[(first_ + size_++) & (places_.size() - 1)] = std::move(value);
  }
  T pop() {
    T value = std::move(places_[first_]);
    first_ = (first_ + 1) & (places_.size() - 1);
    --size_;
    return value;
  }
  // Takes back(later) out; each that came after it takes the place of the one before.
  T take_back(size_t later = 0) {
    T value = std::move(back(later));
    for (; later > 0; --later) back(later) = std::move(back(later - 1));
    --size_;
    return value;
  }

 private:
  void Grow() {
    std::vector<T> places(places_.empty() ? 16 : 2 * places_.size());  // a power of two
    for (size_t i = 0; i < size_; ++i) places[i] = std::move(places_[(first_ + i) & (places_.size() - 1)]);
    places_ = std::move(places);
    first_ = 0;
  }

  std::vector<T> places_;
  size_t first_ = 0, size_ = 0;
};

}  // namespace ballast
