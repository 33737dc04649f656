#include <filesystem>

#include "absl/strings/str_cat.h"

#include "server/device/gpu_discovery.h"

namespace ballast {

GpuSurvey SurveyGpus() {
  std::error_code ignored;
  const bool driver = std::filesystem::exists("/proc/driver/nvidia/version", ignored);
  return {.why_none = driver ? absl::FailedPreconditionError("GPU support not in this build")
                             : absl::NotFoundError("no GPU found")};
}

absl::StatusOr<std::unique_ptr<GpuDriver>> OpenGpu(uint32_t) {
  const absl::Status why = SurveyGpus().why_none;
  return absl::Status(why.code(), absl::StrCat("this build has no GPU support (", why.message(), ")"));
}

}  // namespace ballast
