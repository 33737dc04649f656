// Arrays for a codec alone, without a kernel: what a MasterFormat or a MomentCodec reads and writes.
#pragma once

#include <cstring>
#include <new>
#include <span>
#include <vector>

#include "tests/kernels/tensor.h"

namespace ballast::kernels {

class Planes {
 public:
  Planes(std::span<const Plane> planes, uint64_t n) {
    for (const Plane& plane : planes) {
      storage_.emplace_back((PlaneBytes(plane, n) + sizeof(Line) - 1) / sizeof(Line));
      at_.push_back(reinterpret_cast<std::byte*>(storage_.back().data()));
      bytes_.push_back(PlaneBytes(plane, n));
    }
  }
  std::byte* const* get() { return at_.data(); }
  std::byte* operator[](size_t p) { return at_[p]; }
  size_t count() const { return at_.size(); }
  std::vector<std::byte> Bytes() const {
    std::vector<std::byte> all;
    for (size_t p = 0; p < at_.size(); ++p) all.insert(all.end(), at_[p], at_[p] + bytes_[p]);
    return all;
  }

 private:
  struct alignas(64) Line {
    std::byte bytes[64];
  };
  std::vector<std::vector<Line>> storage_;
  std::vector<std::byte*> at_;
  std::vector<uint64_t> bytes_;
};

// A master's planes with fp32 weights in and out.
class Weights {
 public:
  Weights(const char* master, uint64_t n) : master_(*FindMasterFormat(master)), planes_(master_.planes, n), n_(n) {}
  Weights(const char* master, const std::vector<float>& values) : Weights(master, values.size()) { Load(values); }

  bool Load(const std::vector<float>& values) { return Load(FindWireFormat("fp32"), values.data()); }
  bool Load(WireIndex format, const void* in) { return master_.load(planes_.get(), format, in, 0, n_); }
  std::vector<float> Values() { return Served<float>("fp32"); }
  template <class T>
  std::vector<T> Served(const char* format, const float* scales = nullptr, uint64_t row_length = 1) {
    std::vector<T> out(n_);
    master_.encode_weights(planes_.get(), FindWireFormat(format), scales, row_length, out.data(), 0, n_);
    return out;
  }
  const MasterFormat& master() const { return master_; }
  Planes& planes() { return planes_; }

 private:
  const MasterFormat& master_;
  Planes planes_;
  uint64_t n_;
};

// One moment of a state format.
class Moment {
 public:
  Moment(const char* state, PlaneKind kind, uint64_t n)
      : codec_(kind == PlaneKind::kMomentum ? FindMomentFormat(state)->momentum : FindMomentFormat(state)->variance),
        planes_(codec_.planes, n),
        n_(n) {}

  bool Encode(const std::vector<float>& values, uint64_t random_key = 0, bool stochastic = false) {
    return codec_.encode(planes_.get(), values.data(), n_, random_key, stochastic);
  }
  std::vector<float> Decode() {
    std::vector<float> values(n_);
    codec_.decode(planes_.get(), values.data(), n_);
    return values;
  }
  std::vector<float> RoundTrip(const std::vector<float>& values, uint64_t random_key = 0, bool stochastic = false) {
    return Encode(values, random_key, stochastic) ? Decode() : std::vector<float>();
  }
  const MomentCodec& codec() const { return codec_; }
  Planes& planes() { return planes_; }
  uint64_t size() const { return n_; }

 private:
  const MomentCodec& codec_;
  Planes planes_;
  uint64_t n_;
};

}  // namespace ballast::kernels
