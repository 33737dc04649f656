// Curvature probes of a test's tensor.
#pragma once

#include <algorithm>
#include <cstring>
#include <iterator>
#include <utility>
#include <vector>

#include "tests/kernels/tensor.h"

namespace ballast::kernels {

// What is kept of a tensor's gradient from one probe to the next, with a guard behind it.
class Kept {
 public:
  explicit Kept(uint64_t n) : elements_(SampledElements(n)), lines_(elements_ / kEach + 1) {
    for (float& x : lines_.back().of) x = kGuard;
  }
  float* data() { return reinterpret_cast<float*>(lines_.data()); }
  uint64_t elements() const { return elements_; }
  bool GuardIsIntact() const {
    return std::all_of(lines_.back().of, std::end(lines_.back().of), [](float x) { return x == kGuard; });
  }
  bool operator==(const Kept& other) const {
    return lines_.size() == other.lines_.size() &&
           std::memcmp(lines_.data(), other.lines_.data(), lines_.size() * sizeof(Line)) == 0;
  }
  bool empty = true;  // no probe yet

 private:
  static constexpr uint64_t kEach = 16;
  static constexpr float kGuard = 77;
  struct alignas(64) Line {
    float of[kEach] = {};
  };
  uint64_t elements_;
  std::vector<Line> lines_;
};

// options.t: the tensor's updates so far.
inline CurvatureProbe MakeProbe(const Kernel& kernel, Tensor* tensor, const Payload& grad, const StepOptions& options,
                                Kept* kept) {
  const std::byte* planes[kMaxPlanes] = {};
  for (size_t p = 0; p < kernel.planes.size(); ++p) planes[p] = tensor->plane(p);
  CurvatureProbe probe = ProbeOf(kernel, planes);
  probe.grad = grad.bytes.data();
  probe.grad_format = grad.format;
  probe.n = tensor->size();
  probe.grad_scale = options.grad_scale;
  probe.clip = options.clip;
  probe.before = kept->data();
  probe.first = std::exchange(kept->empty, false);
  if (!probe.first) {
    probe.preconditioner =
        kernel.precondition(options.hyper.empty() ? DefaultHypers(kernel) : options.hyper, options.t);
  }
  return probe;
}

inline std::vector<TileCurvature> ProbeCurvature(const Kernel& kernel, Tensor* tensor, const Payload& grad,
                                                 const StepOptions& options, Kept* kept) {
  const CurvatureProbe probe = MakeProbe(kernel, tensor, grad, options, kept);
  std::vector<TileCurvature> tiles(SampledTiles(probe.n));
  kernel.curvature(probe, 0, tiles.size(), tiles.data());
  return tiles;
}
// The last tile first.
inline std::vector<TileCurvature> ProbeInPieces(const Kernel& kernel, Tensor* tensor, const Payload& grad,
                                                const StepOptions& options, Kept* kept) {
  const CurvatureProbe probe = MakeProbe(kernel, tensor, grad, options, kept);
  std::vector<TileCurvature> tiles(SampledTiles(probe.n));
  for (uint64_t s = tiles.size(); s-- > 0;) kernel.curvature(probe, s, s + 1, &tiles[s]);
  return tiles;
}

inline bool SameBits(const std::vector<TileCurvature>& a, const std::vector<TileCurvature>& b) {
  return a.size() == b.size() && std::memcmp(a.data(), b.data(), a.size() * sizeof a[0]) == 0;
}

}  // namespace ballast::kernels
