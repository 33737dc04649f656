// The check at the start finds whatever a GPU computes otherwise than the CPU, and one that does not answer.
#include "server/device/device_check.h"

#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include <string>

#include "absl/strings/str_cat.h"

#include "server/device/gpu_device.h"
#include "tests/server/device/fake_gpu.h"

namespace ballast {
namespace {

absl::Status Checked(Wrong wrong) {
  FakeGpuState state;
  state.wrong = wrong;
  GpuDevice gpu(std::make_unique<FakeGpu>(&state));
  return CheckDevice(&gpu);
}

TEST(DeviceCheckTest, ADeviceWithTheCpusBitsIsTrusted) { EXPECT_EQ(Checked(Wrong::kNothing), absl::OkStatus()); }

struct Case {
  const char* name;
  Wrong wrong;
  const char* what;
};

class DeviceCheckWrongTest : public ::testing::TestWithParam<Case> {};

TEST_P(DeviceCheckWrongTest, AWrongDeviceIsFoundAndNamed) {
  const absl::Status wrong = Checked(GetParam().wrong);
  EXPECT_EQ(wrong.code(), absl::StatusCode::kDataLoss);
  EXPECT_THAT(std::string(wrong.message()),
              ::testing::StartsWith(absl::StrCat("cuda:0 gives other ", GetParam().what, " than the CPU: ")));
}

INSTANTIATE_TEST_SUITE_P(
    All, DeviceCheckWrongTest,
    ::testing::Values(Case{"Update", Wrong::kEveryUpdate, "weights"}, Case{"Nearest", Wrong::kNearest, "weights"},
                      Case{"Bf16", Wrong::kBf16, "weights"}, Case{"Dry", Wrong::kDry, "statistics"},
                      Case{"Measure", Wrong::kMeasure, "statistics"}, Case{"Average", Wrong::kAverage, "averages"},
                      Case{"ProbeCurvature", Wrong::kProbe, "curvatures"}),
    [](const auto& one) { return one.param.name; });

TEST(DeviceCheckTest, AGpuThatDoesNotAnswerIsUnavailable) {
  FakeGpuState state;
  {
    absl::MutexLock lock(&state.mu);
    state.failure = absl::InternalError("an illegal address");
  }
  GpuDevice gpu(std::make_unique<FakeGpu>(&state));
  EXPECT_EQ(CheckDevice(&gpu).code(), absl::StatusCode::kUnavailable);
}

}  // namespace
}  // namespace ballast
