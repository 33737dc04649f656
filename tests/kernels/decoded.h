// A tensor's stored state as values, read from its planes by the oracle's definitions.
#pragma once

#include <cmath>
#include <string_view>
#include <vector>

#include "tests/kernels/tensor.h"
#include "tests/oracle/reference.h"

namespace ballast::kernels {

struct DecodedSlot {
  std::vector<double> values;
  uint64_t saturated = 0;  // codes at the largest level
};

template <class T>
T ReadPlane(const Tensor& tensor, size_t plane, uint64_t index) {
  T x;
  std::memcpy(&x, tensor.plane(plane) + index * sizeof x, sizeof x);
  return x;
}

// The index of the slot's first plane, of `kind`.
inline size_t SlotPlane(const Kernel& kernel, Kind kind) {
  size_t p = 0;
  while (kernel.planes[p].kind != kind) ++p;
  return p;
}

inline DecodedSlot DecodeSlot(const Tensor& tensor, Kind kind) {
  const size_t p = SlotPlane(tensor.kernel(), kind);
  DecodedSlot slot;
  for (uint64_t i = 0; i < tensor.size(); ++i) {
    if (tensor.kernel().state == std::string_view("fp32")) {
      slot.values.push_back(static_cast<double>(ReadPlane<float>(tensor, p, i)));
      continue;
    }
    const double scale = oracle::FromHalf(ReadPlane<uint16_t>(tensor, p + 1, i / kBlock), 7);
    if (kind == Kind::kMomentum) {
      const int code = ReadPlane<int8_t>(tensor, p, i);
      slot.values.push_back(oracle::MomentumLevel(code, scale));
      slot.saturated += std::abs(code) == 127 ? 1 : 0;
    } else {
      const int code = ReadPlane<uint8_t>(tensor, p, i);
      slot.values.push_back(oracle::VarianceLevel(code, scale));
      slot.saturated += code == 255 ? 1 : 0;
    }
  }
  return slot;
}

inline oracle::AdamWHyper HyperOf(const Kernel& kernel, const std::vector<double>& hyper) {
  oracle::AdamWHyper h;
  for (size_t i = 0; i < hyper.size(); ++i) {
    const std::string_view name = kernel.hypers[i].name;
    if (name == "lr") h.lr = hyper[i];
    if (name == "weight_decay") h.weight_decay = hyper[i];
    if (name == "beta1") h.beta1 = hyper[i];
    if (name == "beta2") h.beta2 = hyper[i];
    if (name == "eps") h.eps = hyper[i];
  }
  return h;
}
// The rule's defaults with some set.
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
