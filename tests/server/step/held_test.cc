#include "server/step/held.h"

#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include <algorithm>

namespace ballast {
namespace {

constexpr uint32_t kOfTensors = 20, kOfMicros = 30;

// A rank that has all of its micro-batches in, but for the last tensor of the last.
ReductionTracker AllButOne() {
  ReductionTracker::Options options{.chunks = std::vector<uint64_t>(kOfTensors, 1),
                                    .slab_bytes = std::vector<uint64_t>(kOfTensors, 64),
                                    .pool_of = std::vector<uint32_t>(kOfTensors),
                                    .pool_bytes = {64 * kOfTensors},
                                    .micros = kOfMicros};
  ReductionTracker reduction(options);
  reduction.Begin(1);
  for (uint32_t micro = 0; micro < kOfMicros; ++micro) {
    reduction.BeginMicro(0, micro + 1 == kOfMicros);
    const bool last = micro + 1 == kOfMicros;
    for (uint32_t i = 0; i < kOfTensors - (last ? 1 : 0); ++i) reduction.Deliver(0, {micro, i, 0}, 7);
    if (!last) reduction.EndMicro(0, std::vector<bool>(kOfTensors));
    reduction.Advance();
  }
  return reduction;
}

TEST(HeldTest, AClientThatKnowsHeldWholeIsToldInAFewBits) {
  const ReductionTracker reduction = AllButOne();
  const auto held = HeldOf(reduction, 0, kOfTensors, /*knows_whole=*/true, /*most_bytes=*/0);
  ASSERT_TRUE(held.ok()) << held.status();
  EXPECT_EQ(held->whole_micros, kOfMicros - 1);
  EXPECT_EQ(std::count(held->whole_tensors.begin(), held->whole_tensors.end(), true), kOfTensors - 1);
  EXPECT_TRUE(held->chunks.empty());
}

TEST(HeldTest, HeldChunksThatFitNoMessageAreRefusedByName) {
  const ReductionTracker reduction = AllButOne();
  const auto fits = HeldOf(reduction, 0, kOfTensors, /*knows_whole=*/false);
  ASSERT_TRUE(fits.ok()) << fits.status();
  EXPECT_EQ(fits->chunks.size(), kOfTensors * kOfMicros - 1u);
  const auto refused = HeldOf(reduction, 0, kOfTensors, /*knows_whole=*/false, /*most_bytes=*/10000);
  EXPECT_EQ(refused.status().code(), absl::StatusCode::kFailedPrecondition);
  EXPECT_THAT(std::string(refused.status().message()),
              ::testing::AllOf(::testing::HasSubstr("20 tensors in 30 micro-batches"), ::testing::HasSubstr("10000"),
                               ::testing::HasSubstr("held_whole")));
}

}  // namespace
}  // namespace ballast
