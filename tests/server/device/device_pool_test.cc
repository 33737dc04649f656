#include "server/device/device_pool.h"

#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include "server/device/gpu_discovery.h"

namespace ballast {
namespace {

using ::testing::AllOf;
using ::testing::HasSubstr;
using ::testing::IsEmpty;

// Also what it writes to the log.
std::pair<std::unique_ptr<Device>, std::string> Take(absl::Status why) {
  ::testing::internal::CaptureStderr();
  auto device = GpuOrCpu(std::move(why), Config{.threads = 1});
  return {std::move(device), ::testing::internal::GetCapturedStderr()};
}

TEST(DevicePoolTest, WithoutAGpuTheCpuIsTakenQuietly) {
  const auto [device, log] = Take(absl::NotFoundError("no GPU found"));
  EXPECT_THAT(device->description(), HasSubstr("no GPU found"));
  EXPECT_THAT(log, IsEmpty());
}

TEST(DevicePoolTest, AGpuThatCannotBeUsedIsSaidInTheLogToo) {
  const auto [device, log] = Take(absl::FailedPreconditionError(WhyDriverIsTooOld(12040, 13000)));
  EXPECT_EQ(device->label(), "cpu");
  EXPECT_THAT(device->description(), HasSubstr("install driver 580 or newer"));
  EXPECT_THAT(log, AllOf(HasSubstr("warn"), HasSubstr("gpu_unusable"), HasSubstr("install driver 580 or newer")));
}

TEST(DevicePoolTest, ADriverThatIsTooOldIsToldWhatToDo) {
  EXPECT_EQ(WhyDriverIsTooOld(12040, 13000),
            "the GPU's driver knows CUDA 12.4, and this build needs 13.0: install driver 580 or newer, or take a build "
            "for CUDA 12");
  EXPECT_THAT(WhyDriverIsTooOld(11080, 12080), HasSubstr("CUDA 11.8, and this build needs 12.8: install driver 525"));
}

}  // namespace
}  // namespace ballast
