// The shortest trainer: fits y = Xw by gradient descent on a ballastd, which holds the weights and the optimizer.
//
//   ballastd &
//   ballast_example [HOST:PORT]
#include <cstdio>
#include <random>
#include <string>
#include <vector>

#include "client/cpp/client.h"

namespace {

constexpr size_t kFeatures = 64, kSamples = 256;

absl::Span<const std::byte> Bytes(const std::vector<float>& values) {
  return {reinterpret_cast<const std::byte*>(values.data()), values.size() * sizeof(float)};
}

struct Problem {
  std::vector<float> inputs, targets;  // [kSamples, kFeatures], [kSamples]
};

Problem MakeProblem() {
  std::mt19937 random(7);
  std::normal_distribution<float> normal;
  Problem problem{std::vector<float>(kSamples * kFeatures), std::vector<float>(kSamples)};
  std::vector<float> truth(kFeatures);
  for (float& w : truth) w = normal(random);
  for (float& x : problem.inputs) x = normal(random);
  for (size_t i = 0; i < kSamples; ++i) {
    for (size_t j = 0; j < kFeatures; ++j) problem.targets[i] += problem.inputs[i * kFeatures + j] * truth[j];
  }
  return problem;
}

// The loss at `weights`; its gradient in *gradient.
double Backward(const Problem& problem, const std::vector<float>& weights, std::vector<float>* gradient) {
  double loss = 0;
  gradient->assign(kFeatures, 0);
  for (size_t i = 0; i < kSamples; ++i) {
    const float* x = &problem.inputs[i * kFeatures];
    float error = -problem.targets[i];
    for (size_t j = 0; j < kFeatures; ++j) error += x[j] * weights[j];
    for (size_t j = 0; j < kFeatures; ++j) (*gradient)[j] += 2 * error * x[j] / kSamples;
    loss += error * error / kSamples;
  }
  return loss;
}

ballast::v1::RunSpec Spec() {
  ballast::v1::RunSpec spec;
  spec.set_run_id("example");
  auto* tensor = spec.add_tensors();
  tensor->set_name("w");
  tensor->add_shape(kFeatures);
  tensor->set_dtype("fp32");
  auto* group = spec.add_groups();
  group->set_rule("adamw");
  (*group->mutable_hyper())["weight_decay"] = 0;
  return spec;
}

absl::Status Train(const std::string& server) {
  std::vector<float> weights(kFeatures, 0), gradient;  // before the client, which writes to them
  auto client = ballast::Client::Connect({.server = server});
  if (!client.ok()) return client.status();
  if (auto created = (*client)->CreateRun(Spec()); !created.ok()) return created.status();
  auto attachment = (*client)->Attach({.run_id = "example"});
  if (!attachment.ok()) return attachment.status();

  const auto bytes = Bytes(weights);
  if (!attachment->weights_loaded) {
    const ballast::TensorView view{.tensor = 0, .format = "fp32", .bytes = bytes};
    if (auto loaded = (*client)->LoadWeights({&view, 1}); !loaded.ok()) return loaded.status();
  }
  if (auto s = (*client)->BindWeights(0, weights.data(), bytes.size()); !s.ok()) return s;

  const Problem problem = MakeProblem();
  for (int i = 0; i < 200; ++i) {
    if (auto s = (*client)->BeginStep({.groups = {{.lr = 0.05}}}); !s.ok()) return s;
    const double loss = Backward(problem, weights, &gradient);
    if (auto s = (*client)->Push(0, Bytes(gradient)); !s.ok()) return s;
    const auto step = (*client)->EndStep(loss).get();  // the new weights are in `weights` now
    if (!step.ok()) return step.status();
    if (i % 20 == 0) std::printf("step %3d  loss %.6f\n", static_cast<int>(step->result.step()), loss);
  }
  std::printf("final     loss %.6f\n", Backward(problem, weights, &gradient));
  return (*client)->DeleteRun("example", /*force=*/true).status();
}

}  // namespace

int main(int argc, char** argv) {
  const absl::Status status = Train(argc > 1 ? argv[1] : "localhost:7700");
  if (!status.ok()) std::fprintf(stderr, "%s\n", status.ToString().c_str());
  return status.ok() ? 0 : 1;
}
