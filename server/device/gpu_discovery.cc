#include "server/device/gpu_discovery.h"

#include "absl/strings/str_cat.h"

namespace ballast {
namespace {

std::string CudaVersion(int version) { return absl::StrCat(version / 1000, ".", version % 1000 / 10); }

// The first driver for a major version of CUDA, by NVIDIA's release notes of the toolkit.
std::string FirstDriverFor(int runtime) {
  const int major = runtime / 1000;
  return major == 12 ? "525" : major == 13 ? "580" : absl::StrCat("one for CUDA ", major);
}

}  // namespace

std::string WhyDriverIsTooOld(int driver, int runtime) {
  return absl::StrCat("the GPU's driver knows CUDA ", CudaVersion(driver), ", and this build needs ",
                      CudaVersion(runtime), ": install driver ", FirstDriverFor(runtime),
                      " or newer, or take a build for CUDA ", driver / 1000);
}

}  // namespace ballast
