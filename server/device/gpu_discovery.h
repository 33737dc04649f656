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
  // Where there are none. NOT_FOUND: the machine seems to have no GPU. FAILED_PRECONDITION: it has a driver of one, and says
  // why that is of no use here.
  absl::Status why_none = absl::OkStatus();
};
GpuSurvey SurveyGpus();

// NOT_FOUND and FAILED_PRECONDITION as in GpuSurvey; they say what was found instead.
absl::StatusOr<std::unique_ptr<GpuDriver>> OpenGpu(uint32_t number);

// Why a driver for CUDA `driver` does not do for a build with the runtime `runtime`, which are written as CUDA does: 12080
// is 12.8. Within a major version each driver does (CUDA's "minor version compatibility").
std::string WhyDriverIsTooOld(int driver, int runtime);

}  // namespace ballast
