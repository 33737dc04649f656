// The planes that a run has of a tensor, in order: its kernel's, and then those of each average of its weights.
//
// A value of no memory but its own; thread-safe.
#pragma once

#include <algorithm>
#include <array>
#include <cstddef>
#include <span>

#include "kernels/registry.h"
#include "server/spec/run_spec.h"

namespace ballast {

inline constexpr size_t kAveragePlanes = 2;  // of one
inline constexpr const char* kAveragePlaneNames[kMostAverages][kAveragePlanes] = {{"average0.hi", "average0.lo"},
                                                                                  {"average1.hi", "average1.lo"},
                                                                                  {"average2.hi", "average2.lo"},
                                                                                  {"average3.hi", "average3.lo"}};

class StoredPlanes {
 public:
  StoredPlanes(const RunSpec& spec, const TensorSpec& t) {
    const std::span<const kernels::Plane> kernel = spec.groups[t.group].kernel->planes;
    auto* next = std::copy(kernel.begin(), kernel.end(), planes_.begin());
    const std::span<const kernels::Plane> average = kernels::AverageMaster().planes;
    for (size_t a = 0; a < spec.averages.size(); ++a) {
      for (size_t p = 0; p < kAveragePlanes; ++p) {
        *next++ = {kAveragePlaneNames[a][p], kernels::PlaneKind::kAverage, average[p].bytes, average[p].per};
      }
    }
    size_ = static_cast<size_t>(next - planes_.begin());
  }
  size_t size() const { return size_; }
  const kernels::Plane& operator[](size_t plane) const { return planes_[plane]; }
  const kernels::Plane* begin() const { return planes_.data(); }
  const kernels::Plane* end() const { return planes_.data() + size_; }

 private:
  std::array<kernels::Plane, kernels::kMaxPlanes + kMostAverages * kAveragePlanes> planes_;
  size_t size_ = 0;
};

// The number among them of the first plane of an average.
inline size_t FirstPlaneOfAverage(const RunSpec& spec, const TensorSpec& t, size_t average) {
  return spec.groups[t.group].kernel->planes.size() + average * kAveragePlanes;
}

}  // namespace ballast
