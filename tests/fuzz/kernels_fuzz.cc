// Finite inputs never make a NaN or an infinity: any bytes are read as a kernel, its hyperparameters, weights and
// gradients, and whatever is stored after three updates decodes to finite values. Inputs that are not finite leave the
// blocks they fall in as they were.
//
// A libFuzzer target (LLVMFuzzerTestOneInput); random_inputs.cc drives it where there is no clang.
#include <algorithm>
#include <cmath>
#include <cstdio>
#include <cstdlib>
#include <cstring>
#include <memory>
#include <vector>

#include "kernels/registry.h"
#include "tests/fuzz/input.h"

namespace ballast::kernels {
namespace {

using fuzz::Input;

[[noreturn]] void Fail(const Kernel& kernel, const char* what, uint64_t element, double value) {
  std::fprintf(stderr, "%s/%s/%s: %s of element %llu is %g\n", kernel.rule, kernel.master, kernel.state, what,
               static_cast<unsigned long long>(element), value);
  std::abort();
}

// Within the hyperparameter's bounds: the bound itself, the default, or a value spread over the exponents between.
double HyperFrom(Input* in, const Hyper& h) {
  const uint8_t choice = in->Take<uint8_t>();
  const double fraction = in->Take<uint16_t>() / 65536.0;
  if (choice % 4 == 0) return h.value;
  if (choice % 4 == 1) return h.open_min ? 1e-300 : h.min;
  if (choice % 4 == 2) return h.open_max ? std::nextafter(h.max, h.min) : h.max;
  const double value = h.max * std::pow(2.0, -60 * fraction);
  return h.open_max ? std::min(value, std::nextafter(h.max, h.min)) : value;
}

struct Buffer {
  explicit Buffer(uint64_t bytes) : data(static_cast<std::byte*>(std::aligned_alloc(64, (bytes + 63) / 64 * 64))) {
    std::memset(data, 0, bytes);
  }
  ~Buffer() { std::free(data); }
  Buffer(const Buffer&) = delete;
  Buffer& operator=(const Buffer&) = delete;
  std::byte* const data;
};

void CheckFinite(const Kernel& kernel, const Update& u) {
  std::vector<float> values(u.n);
  FindMasterFormat(kernel.master)->encode_weights(u.planes, FindWireFormat("fp32"), nullptr, 1, values.data(), 0, u.n);
  const auto check = [&](const char* what, bool negative) {
    for (uint64_t i = 0; i < u.n; ++i) {
      if (!std::isfinite(values[i]) || (!negative && values[i] < 0)) Fail(kernel, what, i, values[i]);
    }
  };
  check("the weight", true);
  const MomentFormat& state = *FindMomentFormat(kernel.state);
  const size_t master_planes = FindMasterFormat(kernel.master)->planes.size();
  state.momentum.decode(u.planes + master_planes, values.data(), u.n);
  check("m", true);
  if (master_planes + state.momentum.planes.size() == kernel.planes.size()) return;
  state.variance.decode(u.planes + master_planes + state.momentum.planes.size(), values.data(), u.n);
  check("v", false);
}

void CheckStatistics(const Kernel& kernel, const TileStatistics& s) {
  for (const float sum : {s.grad_sq, s.update_sq, s.rms_sq, s.grad_absmax, s.weight_sq}) {
    if (std::isnan(sum) || sum < 0) Fail(kernel, "a statistic", 0, sum);
  }
}

void RunOne(Input in) {
  const Kernel& kernel = Kernels()[in.Take<uint8_t>() % Kernels().size()];
  Update u{};
  do {
    u.grad_format = static_cast<WireIndex>(in.Take<uint8_t>() % WireFormats().size());
  } while (!WireFormats()[static_cast<size_t>(u.grad_format)].gradient && in.left() > 0);
  if (!WireFormats()[static_cast<size_t>(u.grad_format)].gradient) return;
  const uint8_t flags = in.Take<uint8_t>();
  u.stochastic = (flags & 1) != 0;
  u.statistics = static_cast<StatisticsLevel>((flags >> 1) % 3);
  u.grad_scale = (flags & 8) != 0 ? 0x1p-16f : 1;
  u.clip = (flags & 16) != 0 ? 0.3f : 1;
  u.n = 1 + in.Take<uint16_t>() % 600;
  uint64_t t = 1 + ((flags & 16) != 0 ? in.Take<uint64_t>() >> (in.Take<uint8_t>() % 64) : 0);
  std::vector<double> hyper;
  for (const Hyper& h : kernel.hypers) hyper.push_back(HyperFrom(&in, h));

  std::vector<std::unique_ptr<Buffer>> planes;
  for (const Plane& plane : kernel.planes) {
    planes.push_back(std::make_unique<Buffer>(PlaneBytes(plane, u.n)));
    u.planes[planes.size() - 1] = planes.back()->data;
  }
  std::vector<float> weights(u.n);
  for (float& w : weights) w = in.Take<float>();
  for (float& w : weights) w = std::isfinite(w) ? w : 1.0f;
  if (!FindMasterFormat(kernel.master)->load(u.planes, FindWireFormat("fp32"), weights.data(), 0, u.n)) std::abort();

  // Of a kernel over matrices: one row, whose direction is taken as it is.
  std::vector<float> direction(PaddedElements(u.n));
  u.direction = direction.data();
  u.rows = 1;

  const size_t bytes = WireFormats()[static_cast<size_t>(u.grad_format)].bytes;
  std::vector<std::byte> grad(u.n * bytes);
  u.grad = grad.data();
  for (int step = 0; step < 3; ++step, ++t) {
    for (std::byte& b : grad) b = static_cast<std::byte>(in.Take<uint8_t>());
    u.random_key = RandomKey(in.Take<uint8_t>(), t);
    kernel.prepare(hyper, t, u.constants);
    if (kernel.fit != nullptr) u.least_norm = kernel.fit(u.rows, u.n, u.constants);
    if (kernel.measure != nullptr) {
      float sum = 0;
      kernel.measure(u, 0, 1, &sum);
      if (std::isnan(sum) || sum < 0) Fail(kernel, "the first pass's sum", 0, sum);
      if (kernel.finish != nullptr) kernel.finish(static_cast<double>(sum), u.n, u.constants);
    }
    TileStatistics statistics{};
    kernel.update(u, 0, 1, &statistics);
    CheckFinite(kernel, u);
    CheckStatistics(kernel, statistics);
  }
}

}  // namespace
}  // namespace ballast::kernels

extern "C" int LLVMFuzzerTestOneInput(const uint8_t* data, size_t size) {
  ballast::kernels::RunOne({data, size});
  return 0;
}
