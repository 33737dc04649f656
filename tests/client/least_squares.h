// A small problem to train on a real daemon: Y = X W + b with known W and b, fp32, W cut into several chunks. Its arithmetic
// is compiled with optimization in every build.
#pragma once

#include <string>
#include <vector>

#include "client/cpp/client.h"

namespace ballast {

class LeastSquares {
 public:
  static constexpr size_t kInputs = 96, kOutputs = 128, kSamples = 32;

  LeastSquares();

  static v1::RunSpec Spec() {
    v1::RunSpec spec;
    spec.set_run_id("least-squares");
    const auto add = [&](const char* name, const std::vector<int64_t>& shape) {
      v1::TensorSpec* tensor = spec.add_tensors();
      tensor->set_name(name);
      tensor->set_dtype("fp32");
      tensor->mutable_shape()->Add(shape.begin(), shape.end());
    };
    add("linear.weight", {kInputs, kOutputs});
    add("linear.bias", {kOutputs});
    spec.add_groups()->set_rule("adamw");
    spec.set_seed(3);
    return spec;
  }

  // Returns the present loss, and computes its gradients for Gradient().
  double Backward();

  absl::Span<const std::byte> Gradient(uint32_t tensor) const { return Bytes(gradient_[tensor]); }
  std::vector<float>& weights(uint32_t tensor) { return tensor == 0 ? weights_ : bias_; }
  absl::Span<const std::byte> WeightBytes(uint32_t tensor) const { return Bytes(tensor == 0 ? weights_ : bias_); }

  // Creates the run, attaches, uploads the weights if the run has none, and binds them.
  absl::StatusOr<Attachment> Join(Client& client, const AttachOptions& options = {.run_id = "least-squares"}) {
    if (auto created = client.CreateRun(Spec()); !created.ok()) return created.status();
    auto attachment = client.Attach(options);
    if (!attachment.ok()) return attachment;
    if (auto s = attachment->weights_loaded ? Bind(client) : UploadAndBind(client); !s.ok()) return s;
    return attachment;
  }

  absl::Status UploadAndBind(Client& client) {
    const TensorView views[] = {{.tensor = 0, .format = "fp32", .bytes = WeightBytes(0)},
                                {.tensor = 1, .format = "fp32", .bytes = WeightBytes(1)}};
    if (auto loaded = client.LoadWeights(views); !loaded.ok()) return loaded.status();
    return Bind(client);
  }

  absl::Status Bind(Client& client) {
    for (const uint32_t tensor : {0u, 1u}) {
      const uint64_t bytes = weights(tensor).size() * sizeof(float);
      if (auto s = client.BindWeights(tensor, weights(tensor).data(), bytes); !s.ok()) return s;
    }
    return absl::OkStatus();
  }

  // Makes one step; returns the loss before it.
  absl::StatusOr<double> Step(Client& client) {
    if (auto s = client.BeginStep({.groups = {{.lr = 0.02}}}); !s.ok()) return s;
    const double loss = Backward();
    for (const uint32_t tensor : {1u, 0u}) {
      if (auto s = client.Push(tensor, Gradient(tensor)); !s.ok()) return s;
    }
    const auto result = client.EndStep(loss).get();
    if (!result.ok()) return result.status();
    return loss;
  }

 private:
  static absl::Span<const std::byte> Bytes(const std::vector<float>& values) {
    return {reinterpret_cast<const std::byte*>(values.data()), values.size() * sizeof(float)};
  }
  std::vector<float> Outputs(const std::vector<float>& weights, const std::vector<float>& bias) const;

  std::vector<float> inputs_, targets_, weights_, bias_;
  std::vector<float> gradient_[2];
};

}  // namespace ballast
