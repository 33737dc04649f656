#include "tests/client/least_squares.h"

#include <random>

namespace ballast {

LeastSquares::LeastSquares() : weights_(kInputs * kOutputs), bias_(kOutputs) {
  std::mt19937 random(11);
  std::normal_distribution<float> normal;
  inputs_.resize(kSamples * kInputs);
  for (float& x : inputs_) x = normal(random);
  std::vector<float> truth(weights_.size()), bias(kOutputs);
  for (float& w : truth) w = 0.3f * normal(random);
  for (float& b : bias) b = normal(random);
  targets_ = Outputs(truth, bias);
}

double LeastSquares::Backward() {
  const std::vector<float> outputs = Outputs(weights_, bias_);
  gradient_[0].assign(weights_.size(), 0);
  gradient_[1].assign(bias_.size(), 0);
  double loss = 0;
  for (size_t i = 0; i < kSamples; ++i) {
    for (size_t k = 0; k < kOutputs; ++k) {
      const float error = outputs[i * kOutputs + k] - targets_[i * kOutputs + k];
      loss += error * error / kSamples;
      gradient_[1][k] += 2 * error / kSamples;
      for (size_t j = 0; j < kInputs; ++j) {
        gradient_[0][j * kOutputs + k] += 2 * error * inputs_[i * kInputs + j] / kSamples;
      }
    }
  }
  return loss;
}

std::vector<float> LeastSquares::Outputs(const std::vector<float>& weights, const std::vector<float>& bias) const {
  std::vector<float> outputs(kSamples * kOutputs);
  for (size_t i = 0; i < kSamples; ++i) {
    for (size_t k = 0; k < kOutputs; ++k) {
      float sum = bias[k];
      for (size_t j = 0; j < kInputs; ++j) sum += inputs_[i * kInputs + j] * weights[j * kOutputs + k];
      outputs[i * kOutputs + k] = sum;
    }
  }
  return outputs;
}

}  // namespace ballast
