// Tensors that a benchmark updates and serves through the queue of a device. Thread-compatible.
#pragma once

#include <algorithm>
#include <array>
#include <bit>
#include <cstring>
#include <memory>
#include <random>
#include <utility>
#include <vector>

#include "server/base/clock.h"
#include "server/device/device.h"

namespace ballast::bench {

inline constexpr uint64_t kChunk = 256 << 10;  // elements that are loaded or served at a time: a run's default

struct Shape {
  const char* what;
  uint64_t tensors, elements;
};

inline std::vector<uint16_t> Bf16Numbers(uint64_t count, float scale) {
  std::mt19937 random(1);
  std::normal_distribution<float> normal(0, scale);
  std::vector<uint16_t> numbers(count);
  for (uint16_t& x : numbers) x = static_cast<uint16_t>(std::bit_cast<uint32_t>(normal(random)) >> 16);
  return numbers;
}

// Tensors of one size and the default recipe, as a run has them.
class Tensors {
 public:
  Tensors(Device* device, const Shape& shape)
      : shape_(shape),
        stride_(kernels::PaddedElements(shape.elements)),
        tiles_(kernels::TilesOf(shape.elements)),
        served_(shape.tensors * shape.elements * sizeof(uint16_t)),
        queue_(device
                   ->NewQueue({.tiles = tiles_.size(),
                               .payload_bytes = kChunk * sizeof(float),
                               .elements = shape.tensors * shape.elements})
                   .value()) {
    for (const kernels::Plane& plane : kernel_.planes) {
      plane_strides_.push_back((kernels::PlaneBytes(plane, shape.elements) + 63) / 64 * 64);
      planes_.push_back(device->Allocate(shape.tensors * plane_strides_.back(), Place::kDevice).value());
    }
    gradients_ = device->Allocate(shape.tensors * stride_ * sizeof(uint16_t), Place::kHost).value();
    const std::vector<uint16_t> numbers = Bf16Numbers(kChunk, 1e-3f);
    for (uint64_t at = 0; at < gradients_.bytes(); at += kChunk * sizeof(uint16_t)) {
      std::memcpy(gradients_.data() + at, numbers.data(), std::min(kChunk * sizeof(uint16_t), gradients_.bytes() - at));
    }
    for (const kernels::Hyper& hyper : kernel_.hypers) hypers_.push_back(hyper.value);
    Load();
  }
  ~Tensors() { queue_->WaitIdle(); }

  // Updates each tensor once, and serves it, if so wanted. The seconds until all is done.
  double Step(bool serve) {
    ++step_;
    UpdateTask update{.kernel = &kernel_, .tiles = tiles_.data()};
    update.update.grad_format = bf16_;
    update.update.n = shape_.elements;
    update.update.grad_scale = update.update.clip = 1;
    update.update.stochastic = true;
    update.update.statistics = kernels::StatisticsLevel::kCore;
    kernel_.prepare(hypers_, step_, update.update.constants);
    const double began_s = MonotonicSeconds();
    for (uint64_t i = 0; i < shape_.tensors; ++i) {
      for (size_t p = 0; p < planes_.size(); ++p) update.update.planes[p] = Plane(i, p);
      update.update.grad = gradients_.data() + i * stride_ * sizeof(uint16_t);
      update.update.random_key = kernels::RandomKey(i, step_);
      Enqueue(update, i);
      if (serve) Serve(i);
    }
    queue_->Wake();
    queue_->WaitIdle();
    return MonotonicSeconds() - began_s;
  }

  // Whether all that was asked for was done, and no block was rejected.
  bool sound() const { return answered_ == asked_ && rejected_ == 0 && finite_; }

 private:
  std::byte* Plane(uint64_t tensor, size_t p) const { return planes_[p].data() + tensor * plane_strides_[p]; }
  std::array<std::byte*, kernels::kMaxPlanes> MasterPlanes(uint64_t tensor) const {
    std::array<std::byte*, kernels::kMaxPlanes> planes = {};
    for (size_t p = 0; p < master_.planes.size(); ++p) planes[p] = Plane(tensor, p);
    return planes;
  }
  void Enqueue(DeviceTask task, uint64_t tensor) {
    ++asked_;
    queue_->Enqueue(
        std::move(task),
        [this](const TaskResult& result) {
          ++answered_;
          rejected_ += result.statistics.rejected;
          finite_ = finite_ && result.finite;
        },
        static_cast<uint32_t>(tensor));
  }
  void Load() {
    const std::vector<uint16_t> numbers = Bf16Numbers(std::min(kChunk, shape_.elements), 0.02f);
    for (uint64_t i = 0; i < shape_.tensors; ++i) {
      for (uint64_t first = 0; first < shape_.elements; first += kChunk) {
        Enqueue(LoadTask{.master = &master_,
                         .planes = MasterPlanes(i),
                         .format = bf16_,
                         .first = first,
                         .last = std::min(first + kChunk, shape_.elements),
                         .in = reinterpret_cast<const std::byte*>(numbers.data())},
                i);
      }
    }
    queue_->WaitIdle();
  }
  void Serve(uint64_t tensor) {
    for (uint64_t first = 0; first < shape_.elements; first += kChunk) {
      Enqueue(EncodeWeightsTask{.master = &master_,
                                .planes = MasterPlanes(tensor),
                                .format = bf16_,
                                .first = first,
                                .last = std::min(first + kChunk, shape_.elements),
                                .out = served_.data() + (tensor * shape_.elements + first) * sizeof(uint16_t)},
              tensor);
    }
  }

  const kernels::Kernel& kernel_ = *kernels::FindKernel("adamw", "split24", "companded8");
  const kernels::MasterFormat& master_ = *kernels::FindMasterFormat("split24");
  const kernels::WireIndex bf16_ = kernels::FindWireFormat("bf16");
  const Shape shape_;
  const uint64_t stride_;  // elements
  std::vector<kernels::TileStatistics> tiles_;
  std::vector<std::byte> served_;
  std::vector<uint64_t> plane_strides_;
  std::vector<DeviceBuffer> planes_;
  DeviceBuffer gradients_;
  std::vector<double> hypers_;
  uint64_t step_ = 0, asked_ = 0, answered_ = 0, rejected_ = 0;
  bool finite_ = true;
  std::unique_ptr<DeviceQueue> queue_;
};

}  // namespace ballast::bench
