// How long a task of the CPU device is said to have taken.
#include <gtest/gtest.h>

#include <algorithm>
#include <numeric>
#include <vector>

#include "server/base/clock.h"
#include "server/device/cpu_device.h"

namespace ballast {
namespace {

// Those that are done together, too: the time that they take is told once.
TEST(TaskSecondsTest, EachTaskHasItsShareOfTheTime) {
  for (const uint32_t threads : {1u, 3u}) {
    CpuDevice device({.threads = threads});
    const auto queue = *device.NewQueue({});
    std::vector<std::byte> from(1 << 16), to(1 << 16);
    std::vector<double> copies, sums;
    const double began_s = MonotonicSeconds();
    for (uint64_t i = 1; i <= 100; ++i) {
      CopyTask copy;
      copy.pieces[0] = {.to = to.data(), .from = from.data(), .bytes = i * 600};
      queue->Enqueue(
          copy, [&](const TaskResult& r) { copies.push_back(r.seconds); }, std::nullopt);
      queue->Enqueue(
          SumTask{}, [&](const TaskResult& r) { sums.push_back(r.seconds); }, std::nullopt);
    }
    queue->WaitIdle();
    const double took_s = MonotonicSeconds() - began_s;
    EXPECT_EQ(sums, std::vector<double>(100, 0));
    ASSERT_EQ(copies.size(), 100u);
    EXPECT_GT(*std::min_element(copies.begin(), copies.end()), 0);
    EXPECT_LE(std::accumulate(copies.begin(), copies.end(), 0.0), took_s);
  }
}

}  // namespace
}  // namespace ballast
