// A tensor of some kernel's formats for tests: its planes, with guard bytes around each, and one update of it.
#pragma once

#include <cmath>
#include <cstring>
#include <memory>
#include <numbers>
#include <random>
#include <span>
#include <string>
#include <string_view>
#include <utility>
#include <vector>

#include "kernels/registry.h"
#include "tests/oracle/numbers.h"

namespace ballast::kernels {

// What a step is given besides the tensor. `hyper` empty: the rule's defaults.
struct StepOptions {
  std::vector<double> hyper;
  uint64_t t = 1;
  uint64_t tensor_key = 42;
  bool stochastic = true;
  StatisticsLevel statistics = StatisticsLevel::kFull;
  float grad_scale = 1;
  float clip = 1;
  bool dry = false;
};

// A gradient in a wire format.
struct Payload {
  WireIndex format = 0;
  std::vector<std::byte> bytes;
};

inline std::vector<double> DefaultHypers(const Kernel& kernel) {
  std::vector<double> hyper;
  for (const Hyper& h : kernel.hypers) hyper.push_back(h.value);
  return hyper;
}

// A wire format of binary floating point; nullptr where it is int8 with a scale.
inline const oracle::Float* FloatOf(const WireFormat& wire) {
  const std::pair<std::string_view, const oracle::Float*> known[] = {{"fp32", &oracle::kFp32},
                                                                     {"bf16", &oracle::kBf16},
                                                                     {"fp16", &oracle::kFp16},
                                                                     {"fp8-e5m2", &oracle::kE5M2},
                                                                     {"fp8-e4m3", &oracle::kE4M3}};
  for (const auto& [name, format] : known) {
    if (name == wire.name) return format;
  }
  return nullptr;
}

// The oracle's code of a number, saturating. NaN and infinities where the format has them: its topmost exponent.
inline uint32_t EncodedNumber(double x, const oracle::Float& format, int bits) {
  const uint32_t sign = std::signbit(x) ? 1u << (bits - 1) : 0;
  const uint32_t infinity = oracle::CodeOf(format.largest, format, bits) + 1;
  if (std::isnan(x)) return sign | infinity | 1;
  if (std::isinf(x)) return sign | infinity;
  return oracle::CodeOf(oracle::Nearest(x, format), format, bits);
}

// A gradient, rounded to a wire format by the oracle.
inline Payload Encoded(WireIndex format, const std::vector<float>& values) {
  const WireFormat& wire = WireFormats()[static_cast<size_t>(format)];
  Payload payload{format, std::vector<std::byte>(values.size() * wire.bytes)};
  if (wire.bytes == 4) {
    std::memcpy(payload.bytes.data(), values.data(), payload.bytes.size());
    return payload;
  }
  for (size_t i = 0; i < values.size(); ++i) {
    const uint32_t code =
        EncodedNumber(static_cast<double>(values[i]), *FloatOf(wire), static_cast<int>(wire.bytes) * 8);
    std::memcpy(payload.bytes.data() + i * wire.bytes, &code, wire.bytes);  // little-endian, as every target is
  }
  return payload;
}

// Copyable; a copy's buffers are aligned anew, so its planes lie elsewhere in them.
class Tensor {
 public:
  Tensor(const Kernel& k, uint64_t elements) : kernel_(&k), n_(elements) {
    for (const Plane& plane : k.planes) {
      const uint64_t bytes = PlaneBytes(plane, elements);
      storage_.emplace_back(bytes + 3 * kGuard, kGuardByte);
      std::memset(Aligned(storage_.size() - 1), 0, bytes);
    }
  }
  Tensor(const Tensor& other) : Tensor(*other.kernel_, other.n_) {
    for (size_t p = 0; p < storage_.size(); ++p) std::memcpy(plane(p), other.plane(p), Size(p));
  }
  Tensor(Tensor&&) = default;  // keeps the buffers, so the planes stay where they are
  Tensor& operator=(Tensor other) {
    kernel_ = other.kernel_;
    n_ = other.n_;
    storage_.swap(other.storage_);
    return *this;
  }

  const Kernel& kernel() const { return *kernel_; }
  uint64_t size() const { return n_; }
  uint64_t tiles() const { return (n_ + kTile - 1) / kTile; }
  std::byte* plane(size_t p) { return Aligned(p); }
  const std::byte* plane(size_t p) const { return const_cast<Tensor*>(this)->Aligned(p); }

  void SetWeights(const std::vector<float>& weights) {
    const Pointers to = Planes();
    FindMasterFormat(kernel_->master)->load(to.at, FindWireFormat("fp32"), weights.data(), 0, n_);
  }
  std::vector<float> Weights() const {
    std::vector<float> weights(n_);
    const Pointers from = const_cast<Tensor*>(this)->Planes();
    FindMasterFormat(kernel_->master)
        ->encode_weights(from.at, FindWireFormat("fp32"), nullptr, 1, weights.data(), 0, n_);
    return weights;
  }

  // Every plane, without guards.
  std::vector<std::byte> Bytes() const {
    std::vector<std::byte> all;
    for (size_t p = 0; p < storage_.size(); ++p) all.insert(all.end(), plane(p), plane(p) + Size(p));
    return all;
  }
  bool GuardsAreIntact() const {
    for (size_t p = 0; p < storage_.size(); ++p) {
      const std::byte *begin = storage_[p].data(), *end = begin + storage_[p].size();
      for (const std::byte* b = begin; b != plane(p); ++b) {
        if (*b != kGuardByte) return false;
      }
      for (const std::byte* b = plane(p) + Size(p); b != end; ++b) {
        if (*b != kGuardByte) return false;
      }
    }
    return true;
  }

  // With the first pass done, where the rule has one.
  Update MakeUpdate(const Payload& grad, const StepOptions& options) {
    Update u{};
    const Pointers planes = Planes();
    std::copy(planes.at, planes.at + kMaxPlanes, u.planes);
    u.grad = grad.bytes.data();
    u.grad_format = grad.format;
    u.n = n_;
    u.grad_scale = options.grad_scale;
    u.clip = options.clip;
    u.random_key = RandomKey(options.tensor_key, options.t);
    u.stochastic = options.stochastic;
    u.dry = options.dry;
    u.statistics = options.statistics;
    kernel_->prepare(options.hyper.empty() ? DefaultHypers(*kernel_) : options.hyper, options.t, u.constants);
    if (kernel_->fit != nullptr) Direct(&u);
    if (kernel_->finish != nullptr) kernel_->finish(Measured(u), n_, u.constants);
    return u;
  }

  // One update in one call.
  std::vector<TileStatistics> Step(const Payload& grad, const StepOptions& options) {
    std::vector<TileStatistics> stats(tiles());
    kernel_->update(MakeUpdate(grad, options), 0, tiles(), stats.data());
    return stats;
  }

  // Gives a kernel over matrices its directions, as they are: orthogonal is what others make them.
  void Direct(Update* u) {
    direction_.resize(PaddedElements(n_));
    u->direction = direction_.data();
    u->rows = 1;
    u->least_norm = kernel_->fit(u->rows, n_, u->constants);
    Measured(*u);
  }

  // The first pass's sum.
  double Measured(const Update& update) const {
    std::vector<float> sums(tiles());
    kernel_->measure(update, 0, tiles(), sums.data());
    double sum = 0;
    for (const float tile : sums) sum += static_cast<double>(tile);
    return sum;
  }

 private:
  static constexpr size_t kGuard = 64;
  static constexpr std::byte kGuardByte{0xA5};
  struct Pointers {
    std::byte* at[kMaxPlanes];
  };

  std::byte* Aligned(size_t p) {
    const uintptr_t start = reinterpret_cast<uintptr_t>(storage_[p].data()) + kGuard;
    return storage_[p].data() + kGuard + (kGuard - start % kGuard) % kGuard;
  }
  Pointers Planes() {
    Pointers pointers{};
    for (size_t p = 0; p < storage_.size(); ++p) pointers.at[p] = Aligned(p);
    return pointers;
  }
  size_t Size(size_t p) const { return PlaneBytes(kernel_->planes[p], n_); }

  const Kernel* kernel_;
  uint64_t n_;
  std::vector<std::vector<std::byte>> storage_;
  std::vector<float> direction_;  // of the last update, where the kernel is over matrices
};

// The gradient formats, and the serving ones.
inline std::vector<WireIndex> GradientFormats() {
  std::vector<WireIndex> formats;
  for (size_t i = 0; i < WireFormats().size(); ++i) {
    if (WireFormats()[i].gradient) formats.push_back(static_cast<WireIndex>(i));
  }
  return formats;
}
inline const char* NameOf(WireIndex format) { return WireFormats()[static_cast<size_t>(format)].name; }
inline std::string NameOf(const Kernel& k) { return std::string(k.rule) + "+" + k.master + "+" + k.state; }

// The same normals on every machine: std::normal_distribution's are the library's choice.
class Normals {
 public:
  explicit Normals(uint64_t seed) : engine_(seed) {}
  double Uniform() { return (static_cast<double>(engine_() >> 11) + 0.5) * 0x1p-53; }
  double Next() { return std::sqrt(-2 * std::log(Uniform())) * std::cos(2 * std::numbers::pi * Uniform()); }
  std::vector<float> Vector(uint64_t n, double scale = 1) {
    std::vector<float> values(n);
    for (float& x : values) x = static_cast<float>(scale * Next());
    return values;
  }
  uint64_t Word() { return engine_(); }

 private:
  std::mt19937_64 engine_;
};

}  // namespace ballast::kernels
