#include "server/base/ring_buffer.h"

#include <gtest/gtest.h>

#include <deque>
#include <memory>
#include <random>

namespace ballast {
namespace {

TEST(RingBufferTest, IsAQueue) {
  std::mt19937 draw(1);
  RingBuffer<int> ring;
  std::deque<int> model;
  for (int i = 0; i < 20'000; ++i) {
    // Longer, and shorter again: the front is everywhere when it grows.
    const bool push = model.empty() || draw() % 100 < (i / 4000 % 2 == 0 ? 60 : 40);
    if (push) {
      ring.push(i);
      model.push_back(i);
    } else if (draw() % 8 == 0) {
      const size_t later = draw() % model.size();
      const auto taken = model.end() - 1 - static_cast<std::ptrdiff_t>(later);
      ASSERT_EQ(ring.back(later), *taken);
      ASSERT_EQ(ring.take_back(later), *taken);
      model.erase(taken);
    } else {
      ASSERT_EQ(ring.front(), model.front());
      ASSERT_EQ(ring.pop(), model.front());
      model.pop_front();
    }
    ASSERT_EQ(ring.size(), model.size());
    ASSERT_EQ(ring.empty(), model.empty());
  }
}

TEST(RingBufferTest, KeepsNothingThatWasPopped) {
  RingBuffer<std::shared_ptr<int>> ring;
  const auto value = std::make_shared<int>(1);
  for (int i = 0; i < 40; ++i) ring.push(value);
  ring.take_back(7);
  while (!ring.empty()) ring.pop();
  EXPECT_EQ(value.use_count(), 1);
}

}  // namespace
}  // namespace ballast
