// The GPUs of this machine. The build takes cuda_driver.cc where there is nvcc and cuda_stub.cc elsewhere; with either,
// a daemon starts on a machine without a GPU or a driver. Thread-safe.
#pragma once

#include <memory>
#include <string>
#include <vector>

#include "absl/status/statusor.h"

#include "server/device/gpu_driver.h"

namespace ballast {

struct GpuSurvey {
  std::vector<std::string> names;  // by number: "NVIDIA H200"
  std::string why_none;            // where there are none
};
GpuSurvey SurveyGpus();

// NOT_FOUND says what was found instead.
absl::StatusOr<std::unique_ptr<GpuDriver>> OpenGpu(uint32_t number);

}  // namespace ballast
