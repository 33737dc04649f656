#include "proto/shm/segment.h"

#include <fcntl.h>
#include <gmock/gmock.h>
#include <gtest/gtest.h>
#include <sys/mman.h>
#include <unistd.h>

#include "proto/shm/slots.h"

#include "tests/proto/shm/pair.h"

namespace ballast {
namespace {

using ::testing::HasSubstr;
using testing::ShmPair;

TEST(ShmSegmentTest, BothEndsSeeTheSameBytes) {
  const ShmPair pair;
  pair.trainer->gradient_slots()[700] = std::byte{7};
  pair.daemon->weight_slots()[255] = std::byte{9};
  pair.daemon->control().down_written.value = 11;
  pair.trainer->weight_marks()[1] = 13;
  EXPECT_EQ(pair.daemon->gradient_slots()[700], std::byte{7});
  EXPECT_EQ(pair.trainer->weight_slots()[255], std::byte{9});
  EXPECT_EQ(pair.trainer->control().down_written.value, 11u);
  EXPECT_EQ(pair.daemon->weight_marks()[1], 13u);
}

TEST(ShmSegmentTest, ThePartsDoNotOverlapAndLieWithinTheSegment) {
  const ShmPair pair;
  const auto* const base = reinterpret_cast<const std::byte*>(&pair.daemon->control());
  EXPECT_GE(reinterpret_cast<std::byte*>(pair.daemon->gradient_marks().data()) - base,
            static_cast<ptrdiff_t>(sizeof(ShmControl)));
  EXPECT_GE(pair.daemon->up_pipe().data(), reinterpret_cast<std::byte*>(pair.daemon->weight_marks().end()));
  EXPECT_GE(pair.daemon->down_pipe().data(), pair.daemon->up_pipe().end());
  EXPECT_GE(pair.daemon->gradient_slots(), pair.daemon->down_pipe().end());
  EXPECT_GE(pair.daemon->weight_slots(), pair.daemon->gradient_slots() + 4 * 256);
  EXPECT_LE(static_cast<uint64_t>(pair.daemon->weight_slots() + 2 * 128 - base), ShmBytes(ShmPair::kShape));
}

TEST(ShmSegmentTest, NobodyCanShrinkOrGrowIt) {
  const ShmPair pair;
  EXPECT_NE(ftruncate(pair.daemon->fd(), 4096), 0);
  EXPECT_NE(ftruncate(pair.daemon->fd(), 1 << 20), 0);
  EXPECT_NE(fcntl(pair.daemon->fd(), F_ADD_SEALS, F_SEAL_WRITE), 0);
}

TEST(ShmSegmentTest, ADescriptorUnsealedOrOfAnotherSizeIsNotMapped) {
  const ShmPair pair;
  ShmShape larger = ShmPair::kShape;
  ++larger.gradient_slots;
  larger.gradient_slot_bytes = 1 << 20;
  EXPECT_THAT(std::string(ShmSegment::Map(pair.daemon->fd(), larger).status().message()), HasSubstr("another size"));

  const int unsealed = memfd_create("unsealed", MFD_CLOEXEC | MFD_ALLOW_SEALING);
  ASSERT_EQ(ftruncate(unsealed, static_cast<off_t>(ShmBytes(ShmPair::kShape))), 0);
  EXPECT_THAT(std::string(ShmSegment::Map(unsealed, ShmPair::kShape).status().message()), HasSubstr("not sealed"));
  close(unsealed);
}

TEST(ShmSegmentTest, ShapesThatNoDaemonChoosesAreRefused) {
  const auto spoilt = [](auto change) {
    ShmShape shape = ShmPair::kShape;
    change(shape);
    return CheckShape(shape).code();
  };
  EXPECT_EQ(spoilt([](auto&) {}), absl::StatusCode::kOk);
  EXPECT_EQ(spoilt([](auto& s) { s.pipe_bytes = 0; }), absl::StatusCode::kInvalidArgument);
  EXPECT_EQ(spoilt([](auto& s) { s.pipe_bytes = 1025; }), absl::StatusCode::kInvalidArgument);
  EXPECT_EQ(spoilt([](auto& s) { s.pipe_bytes = 1u << 31; }), absl::StatusCode::kInvalidArgument);
  EXPECT_EQ(spoilt([](auto& s) { s.gradient_slots = ~0u; }), absl::StatusCode::kInvalidArgument);
  EXPECT_EQ(spoilt([](auto& s) { s.weight_slot_bytes = ~uint64_t{0}; }), absl::StatusCode::kInvalidArgument);
  EXPECT_EQ(spoilt([](auto& s) { s.on_gpu = 2; }), absl::StatusCode::kInvalidArgument);
  EXPECT_EQ(spoilt([](auto& s) { s.on_gpu = 1, s.weight_slot_bytes = 1000; }), absl::StatusCode::kInvalidArgument);
}

TEST(ShmSegmentTest, SlotsOnAGpuAreNotInTheSegment) {
  ShmShape shape = ShmPair::kShape;
  shape.gradient_slot_bytes = shape.weight_slot_bytes = 512;
  shape.gradient_slots = 4000;
  shape.weight_slots = 200;
  const uint64_t in_segment = ShmBytes(shape);
  shape.on_gpu = 1;
  EXPECT_EQ(CheckShape(shape).code(), absl::StatusCode::kOk);
  EXPECT_LE(ShmBytes(shape) + 4200 * 512, in_segment);
  EXPECT_EQ(GpuSlotBytes(shape), 2 * kGpuUnit);
  const auto made = ShmSegment::Create(shape).value();
  std::vector<std::byte> gpu(GpuSlotBytes(shape));
  EXPECT_EQ(GradientSlots(*made, gpu.data()).memory, gpu.data());
  EXPECT_EQ(WeightSlots(*made, gpu.data()).memory, gpu.data() + 4000 * 512);
}

}  // namespace
}  // namespace ballast
