// A tensor's stored weights and moments as values, read from its planes by the oracle's definitions.
#pragma once

#include <cmath>
#include <string_view>
#include <vector>

#include "tests/kernels/tensor.h"
#include "tests/oracle/collage.h"
#include "tests/oracle/formats.h"

namespace ballast::kernels {

inline double Wide(float x) { return static_cast<double>(x); }

template <class T>
T ReadAt(const std::byte* plane, uint64_t index) {
  T x;
  std::memcpy(&x, plane + index * sizeof x, sizeof x);
  return x;
}
template <class T>
T ReadPlane(const Tensor& tensor, size_t plane, uint64_t index) {
  return ReadAt<T>(tensor.plane(plane), index);
}

// The index of the moment's first plane, of `kind`; kMaxPlanes where the rule has no such moment.
inline size_t MomentPlane(const Kernel& kernel, PlaneKind kind) {
  for (size_t p = 0; p < kernel.planes.size(); ++p) {
    if (kernel.planes[p].kind == kind) return p;
  }
  return kMaxPlanes;
}

inline bool IsCollage(const Kernel& kernel) { return std::string_view(kernel.rule).starts_with("collage"); }

// A weight from its master planes.
inline double WeightAt(std::string_view master, const std::byte* const* planes, uint64_t i) {
  if (master == "fp32") return static_cast<double>(ReadAt<float>(planes[0], i));
  if (master == "mcf8") return oracle::WeightOf(master, ReadAt<uint8_t>(planes[0], i), ReadAt<uint8_t>(planes[1], i));
  const uint32_t hi = ReadAt<uint16_t>(planes[0], i);
  if (master == "bf16") return oracle::WeightOf(master, hi, 0);
  const bool narrow = master == "split24" || master == "flash24";
  return oracle::WeightOf(master, hi, narrow ? ReadAt<int8_t>(planes[1], i) : ReadAt<int16_t>(planes[1], i));
}
inline std::vector<double> DecodeWeights(const Tensor& tensor) {
  const std::byte* planes[2] = {tensor.plane(0), tensor.plane(1)};
  std::vector<double> values(tensor.size());
  for (uint64_t i = 0; i < tensor.size(); ++i) values[i] = WeightAt(tensor.kernel().master, planes, i);
  return values;
}

struct DecodedMoment {
  std::vector<double> values;
  std::vector<int> codes;  // where the format has scales
  uint64_t saturated = 0;  // codes at the largest level
};

inline oracle::Moment MomentOf(PlaneKind kind) {
  return kind == PlaneKind::kMomentum ? oracle::Moment::kFirst : oracle::Moment::kSecond;
}
inline double ScaleAt(std::string_view state, const std::byte* scales, uint64_t block) {
  if (state == "dynamic8") return static_cast<double>(ReadAt<float>(scales, block));
  return oracle::ValueOf(ReadAt<uint16_t>(scales, block), state == "flash8" ? oracle::kFp16 : oracle::kBf16, 16);
}
// Codes of dynamic8 are indices; the others' are int8 for m and uint8 for v.
inline int CodeAt(std::string_view state, PlaneKind kind, const std::byte* codes, uint64_t i) {
  const bool with_sign = kind == PlaneKind::kMomentum && state != "dynamic8";
  return with_sign ? static_cast<int>(ReadAt<int8_t>(codes, i)) : static_cast<int>(ReadAt<uint8_t>(codes, i));
}
inline bool IsLargest(std::string_view state, PlaneKind kind, int code) {
  return std::abs(code) == oracle::FormatOf(state, MomentOf(kind)).largest;
}

// planes[0], planes[1]: the moment's own.
inline DecodedMoment DecodePlanes(std::string_view state, PlaneKind kind, const std::byte* const* planes, uint64_t n) {
  const oracle::FormatOfMoment format = oracle::FormatOf(state, MomentOf(kind));
  DecodedMoment moment;
  for (uint64_t i = 0; i < n; ++i) {
    if (format.block == 0) {
      moment.values.push_back(state == "fp32" ? static_cast<double>(ReadAt<float>(planes[0], i))
                                              : oracle::ValueOf(ReadAt<uint16_t>(planes[0], i), oracle::kBf16, 16));
      if (state == "mcf" && kind == PlaneKind::kVariance) {
        moment.values.back() += oracle::ValueOf(ReadAt<uint16_t>(planes[1], i), oracle::kBf16, 16);
      }
      continue;
    }
    const double scale = ScaleAt(state, planes[1], i / static_cast<uint64_t>(format.block));
    moment.codes.push_back(CodeAt(state, kind, planes[0], i));
    moment.values.push_back(format.level(moment.codes.back(), scale));
    moment.saturated += IsLargest(state, kind, moment.codes.back()) ? 1 : 0;
  }
  return moment;
}
// Empty where the rule has no such moment.
inline DecodedMoment DecodeMoment(const Tensor& tensor, PlaneKind kind) {
  const size_t p = MomentPlane(tensor.kernel(), kind);
  if (p == kMaxPlanes) return {};
  const std::byte* planes[2] = {tensor.plane(p), nullptr};
  if (p + 1 < tensor.kernel().planes.size()) planes[1] = tensor.plane(p + 1);
  return DecodePlanes(tensor.kernel().state, kind, planes, tensor.size());
}

inline oracle::Hypers HypersOf(const Kernel& kernel, const std::vector<double>& hyper) {
  const std::pair<std::string_view, double oracle::Hypers::*> known[] = {
      {"lr", &oracle::Hypers::lr},
      {"weight_decay", &oracle::Hypers::weight_decay},
      {"beta1", &oracle::Hypers::beta1},
      {"beta2", &oracle::Hypers::beta2},
      {"eps", &oracle::Hypers::eps},
      {"momentum", &oracle::Hypers::momentum},
      {"dampening", &oracle::Hypers::dampening},
      {"nesterov", &oracle::Hypers::nesterov},
      {"lr_peak", &oracle::Hypers::lr_peak}};
  oracle::Hypers h;
  for (size_t i = 0; i < hyper.size(); ++i) {
    for (const auto& [name, field] : known) {
      if (name == kernel.hypers[i].name) h.*field = hyper[i];
    }
  }
  return h;
}
// The rule's defaults with some set, where the rule has them.
inline std::vector<double> Hypers(const Kernel& kernel,
                                  std::initializer_list<std::pair<std::string_view, double>> set) {
  std::vector<double> hyper = DefaultHypers(kernel);
  for (const auto& [name, value] : set) {
    for (size_t i = 0; i < hyper.size(); ++i) {
      if (kernel.hypers[i].name == name) hyper[i] = value;
    }
  }
  return hyper;
}

}  // namespace ballast::kernels
