// Each kernel on the GPU's device against the CPU's: the same tasks, the same bits.
#include <gtest/gtest.h>

#include <memory>
#include <string>

#include "server/device/cpu_device.h"
#include "server/device/gpu_device.h"
#include "tests/server/device/device_model.h"
#include "tests/server/device/fake_gpu.h"

namespace ballast {
namespace {

using testing::TrainOn;
using testing::WhatDiffers;

TEST(GpuDeviceTest, EveryKernelGivesTheCpusBits) {
  CpuDevice cpu({.threads = 2});
  FakeGpuState state;
  GpuDevice gpu(std::make_unique<FakeGpu>(&state), 3);
  gpu.Watch([](const absl::Status& status) { ADD_FAILURE() << status; });
  for (const kernels::Kernel& kernel : kernels::Kernels()) {
    SCOPED_TRACE(std::string(kernel.rule) + " " + kernel.master + " " + kernel.state);
    EXPECT_EQ(WhatDiffers(TrainOn(&cpu, kernel), TrainOn(&gpu, kernel)), "");
  }
}

}  // namespace
}  // namespace ballast
