// A store with gradients of its own, that a test trains by hand on the CPU or on the GPU's device.
#pragma once

#include <gtest/gtest.h>

#include <algorithm>
#include <cstring>
#include <functional>
#include <memory>
#include <numeric>
#include <string>
#include <string_view>
#include <utility>
#include <vector>

#include "absl/synchronization/blocking_counter.h"

#include "server/convert/convert.h"
#include "server/device/cpu_device.h"
#include "server/device/gpu_device.h"
#include "server/store/parameter_store.h"
#include "tests/normals.h"
#include "tests/server/device/fake_gpu.h"
#include "tests/server/specs.h"

namespace ballast::testing {

struct Kernel {
  const char *rule, *master, *state;
};

// A run of tensors of several sizes, the first with two sampled tiles, and its gradients in the device's memory. With a
// `past` it has a tensor more, and takes the others over.
class Store {
 public:
  Store(Device* device, const Kernel& kernel, Store* past = nullptr) {
    v1::RunSpec wire = MakeSpec("r1", {{"a", {70000}, "fp32"}, {"b", {64, 64}, "fp32"}, {"c", {5}, "fp32"}});
    const auto kept = static_cast<uint32_t>(past == nullptr ? 0 : wire.tensors_size());
    if (past != nullptr) {
      *wire.add_tensors() = wire.tensors(1);
      wire.mutable_tensors(3)->set_name("d");
    }
    wire.mutable_groups(0)->set_rule(kernel.rule);
    wire.mutable_groups(0)->set_master(kernel.master);
    wire.mutable_groups(0)->set_state(kernel.state);
    if (kernels::FindKernel(kernel.rule, kernel.master, kernel.state)->fit != nullptr) {
      for (v1::TensorSpec& tensor : *wire.mutable_tensors()) tensor.add_shape(1);  // columns, or a matrix of filters
    }
    spec_ = ToRunSpec(wire, {}).value();
    spec_.spikes.curvature = true;
    plan_ = MakePlan(spec_);
    const ParameterStore* const past_store = past == nullptr ? nullptr : past->store_.get();
    store_ = ParameterStore::Create(
                 {.spec = &spec_, .plan = &plan_, .devices = {device}, .strand = &strand_, .past = past_store})
                 .value();
    if (past != nullptr) store_->TakeOver(past->store_.get());
    for (uint32_t i = 0; i < tensors(); ++i) {
      gradients_.push_back(device->Allocate(4 * spec_.tensors[i].elements + 64, Place::kHost).value());
      if (i >= kept) Load(i);
    }
    hyper_ = spec_.groups[0].hyper;
  }
  ~Store() {
    store_->WaitIdle();
    strand_.Stop();
  }

  uint32_t tensors() const { return static_cast<uint32_t>(spec_.tensors.size()); }
  ParameterStore& operator*() { return *store_; }
  ParameterStore* operator->() { return store_.get(); }
  const Plan& plan() const { return plan_; }
  const RunSpec& spec() const { return spec_; }
  uint64_t gradient_bytes() const {
    return std::accumulate(gradients_.begin(), gradients_.end(), uint64_t{0},
                           [](uint64_t sum, const DeviceBuffer& buffer) { return sum + buffer.bytes(); });
  }
  void Set(std::string_view name, double value) {
    const auto hypers = spec_.groups[0].kernel->hypers;
    for (size_t h = 0; h < hypers.size(); ++h) {
      if (hypers[h].name == name) hyper_[h] = value;
    }
  }

  // Normals of their own for each step.
  void FillGradients(uint64_t step) {
    for (uint32_t i = 0; i < tensors(); ++i) Fill(i, 100 * step + i, 0.1f, Gradient(i));
  }
  float* Gradient(uint32_t tensor) { return reinterpret_cast<float*>(gradients_[tensor].data()); }
  std::vector<float> Weights(uint32_t tensor) {
    const TensorSpec& t = spec_.tensors[tensor];
    std::vector<float> weights(t.elements);
    for (uint64_t first = 0; first < t.elements; first += spec_.chunk_elements) {
      const uint64_t last = std::min(t.elements, first + spec_.chunk_elements);
      WeightPiece piece;
      Wait(1, [&](auto done) { store_->EncodeWeights({tensor, first, last}, &piece, std::move(done)); });
      std::memcpy(weights.data() + first, piece.encoded().data(), piece.encoded().size());
    }
    return weights;
  }

  // Elements of the momentum, of the weights as they are served, and of all that there is of them: the same bits.
  std::vector<std::string> Read(TensorRange range) {
    WeightPiece served, master, momentum;
    StateRoom room;
    Wait(1, [&](auto done) { store_->EncodeWeights(range, &served, std::move(done)); });
    Wait(1, [&](auto done) { store_->EncodeMaster(range, &master, std::move(done)); });
    Wait(1, [&](auto done) {
      constexpr auto kMomentum = kernels::PlaneKind::kMomentum;
      EXPECT_TRUE(store_->DecodeState(range, kMomentum, &momentum, &room, std::move(done)).ok());
    });
    return {served.data, master.data, momentum.data};
  }

  StoreImage Image() {
    StoreImage image = store_->NewImage().value();
    for (uint32_t i = 0; i < tensors(); ++i) {
      Wait(1, [&](auto done) { store_->Save(i, &image, std::move(done)); });
    }
    return image;
  }

  ParameterStore::UpdateValues Values(uint32_t tensor, uint64_t step) {
    return {.step = step,
            .gradient_divisor = 2,
            .hyper = hyper_,
            .gradient = gradients_[tensor].data(),
            .gradient_format = kernels::FindWireFormat("fp32")};
  }
  using Call =
      std::function<void(ParameterStore&, uint32_t, const ParameterStore::UpdateValues&, ParameterStore::Done)>;
  TaskResult Do(const Call& call, uint32_t tensor, uint64_t step) {
    TaskResult result;
    Wait(1, [&](auto done) {
      call(*store_, tensor, Values(tensor, step), [&result, done = std::move(done)](const TaskResult& r) mutable {
        result = r;
        done(r);
      });
    });
    return result;
  }
  // Makes the call for every tensor, one submitted behind the other.
  std::vector<TaskResult> DoAll(const Call& call, uint64_t step) {
    std::vector<TaskResult> results(tensors());
    absl::BlockingCounter left(static_cast<int>(tensors()));
    for (uint32_t i = 0; i < tensors(); ++i) {
      call(*store_, i, Values(i, step), [&, i](const TaskResult& r) {
        results[i] = r;
        left.DecrementCount();
      });
    }
    left.Wait();
    return results;
  }

 private:
  void Fill(uint32_t tensor, uint64_t seed, float scale, float* values) const {
    FillNormal(seed, scale, {values, spec_.tensors[tensor].elements});
  }
  void Load(uint32_t tensor) {
    const uint64_t elements = spec_.tensors[tensor].elements;
    std::vector<float> weights(elements);
    Fill(tensor, tensor, 0.1f, weights.data());  // small enough for an update to move each, in bf16 too
    for (uint64_t first = 0; first < elements; first += spec_.chunk_elements) {
      Wait(1, [&](auto done) {
        store_->Load({tensor, first, std::min(elements, first + spec_.chunk_elements)}, kernels::FindWireFormat("fp32"),
                     reinterpret_cast<const std::byte*>(weights.data() + first), std::move(done));
      });
    }
  }
  template <class Submit>
  static void Wait(int count, const Submit& submit) {
    absl::BlockingCounter left(count);
    submit([&left](const TaskResult&) { left.DecrementCount(); });
    left.Wait();
  }

  RunSpec spec_;
  Plan plan_;
  Strand strand_{{.name = "t"}};
  std::vector<double> hyper_;
  std::vector<DeviceBuffer> gradients_;
  std::unique_ptr<ParameterStore> store_;
};

inline constexpr auto kProbe = &ParameterStore::DryUpdate, kCurvature = &ParameterStore::Curvature;
inline constexpr auto kUpdate = [](ParameterStore& store, uint32_t tensor, const ParameterStore::UpdateValues& values,
                                   ParameterStore::Done done) { store.Update(tensor, values, std::move(done)); };

class ParameterStoreTest : public ::testing::TestWithParam<bool> {
 protected:
  ParameterStoreTest() {
    if (GetParam()) {
      device_ = std::make_unique<GpuDevice>(std::make_unique<FakeGpu>(&gpu_));
    } else {
      device_ = std::make_unique<CpuDevice>(CpuDevice::Options{.threads = 3});
    }
  }
  FakeGpuState gpu_;
  std::unique_ptr<Device> device_;
};

}  // namespace ballast::testing
