// A run in which every rank has the same gradients in every step: with rounding to nearest a tensor's weights depend on
// nothing but how often it was updated, whatever became of steps and processes.
#pragma once

#include <cstdint>
#include <random>
#include <string>
#include <vector>

#include "absl/status/status.h"
#include "absl/strings/str_cat.h"
#include "absl/types/span.h"

#include "client/cpp/client.h"

namespace ballast {

class ConstantTeam {
 public:
  static constexpr uint64_t kElements[] = {30000, 5, 70001};
  static constexpr uint32_t kTensors = std::size(kElements);
  static constexpr const char* kRun = "constant";

  static v1::RunSpec Spec(uint32_t world) {
    v1::RunSpec spec;
    spec.set_run_id(kRun);
    for (uint32_t i = 0; i < kTensors; ++i) {
      v1::TensorSpec* const tensor = spec.add_tensors();
      tensor->set_name(absl::StrCat("t", i));
      tensor->set_dtype("fp32");
      tensor->add_shape(static_cast<int64_t>(kElements[i]));
    }
    v1::GroupSpec* const group = spec.add_groups();
    group->set_rule("adamw");
    group->set_rounding("nearest");
    spec.set_ranks(world);
    return spec;
  }

  explicit ConstantTeam(uint32_t rank) {
    std::mt19937 random(rank + 1);
    std::normal_distribution<float> normal;
    for (uint32_t i = 0; i < kTensors; ++i) {
      weights_.emplace_back(kElements[i], 1.0f);
      for (uint64_t k = 0; k < kElements[i]; ++k) gradients_[i].push_back(normal(random));
    }
  }
  const std::vector<float>& weights(uint32_t tensor) const { return weights_[tensor]; }

  // Creates the run, attaches by `options`, and loads the weights where the run has none and this is rank 0.
  absl::Status Join(Client& client, AttachOptions options) {
    options.run_id = kRun;
    if (auto s = client.CreateRun(Spec(options.world)).status(); !s.ok()) return s;
    const auto attached = client.Attach(options);
    if (!attached.ok()) return attached.status();
    std::vector<TensorView> views;
    for (uint32_t i = 0; i < kTensors; ++i) {
      const uint64_t bytes = weights_[i].size() * sizeof(float);
      if (auto s = client.BindWeights(i, weights_[i].data(), bytes); !s.ok()) return s;
      views.push_back({.tensor = i, .format = "fp32", .bytes = Bytes(weights_[i])});
    }
    const bool loads = options.rank == 0 && !attached->weights_loaded;
    return loads ? client.LoadWeights(views).status() : absl::OkStatus();
  }
  absl::Status Step(Client& client) {
    if (auto s = client.BeginStep({}); !s.ok()) return s;
    for (uint32_t i = kTensors; i-- > 0;) {
      if (auto s = client.Push(i, Bytes(gradients_[i])); !s.ok()) return s;
    }
    return client.EndStep(std::nullopt).get().status();
  }

 private:
  static absl::Span<const std::byte> Bytes(const std::vector<float>& values) {
    return {reinterpret_cast<const std::byte*>(values.data()), values.size() * sizeof(float)};
  }

  std::vector<std::vector<float>> weights_;
  std::vector<float> gradients_[kTensors];
};

}  // namespace ballast
