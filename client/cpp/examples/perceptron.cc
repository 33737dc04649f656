// Samples are taken one by one, and each loop runs over the units of a layer, whose number the compiler knows. Black
// pixels, half of all in Fashion-MNIST, are passed over.
#include "client/cpp/examples/perceptron.h"

#include <algorithm>
#include <cmath>
#include <random>

namespace ballast::examples {
namespace {

constexpr float kWhite = 1.0f / 255;

// to += a * x
template <size_t n>
void Add(float a, const float* x, float* to) {
  for (size_t i = 0; i < n; ++i) to[i] += a * x[i];
}

// Makes logits the derivative of the loss by them; returns the loss.
template <size_t n>
double SoftmaxLoss(std::array<float, n>* logits, uint8_t label) {
  const float most = *std::max_element(logits->begin(), logits->end());
  const float of_label = (*logits)[label] - most;
  float sum = 0;
  for (float& z : *logits) sum += z = std::exp(z - most);
  for (float& z : *logits) z /= sum;
  (*logits)[label] -= 1;
  return static_cast<double>(std::log(sum) - of_label);
}

}  // namespace

Perceptron::Perceptron(uint64_t seed) {
  std::mt19937_64 random(seed);
  for (uint32_t tensor = 0; tensor < kTensors; ++tensor) {
    const Shape& shape = kShapes[tensor];
    weights_[tensor].assign(shape.elements(), 0);
    if (shape.rows == 0) continue;
    std::normal_distribution<float> normal(0, std::sqrt(2 / static_cast<float>(shape.rows)));
    for (float& w : weights_[tensor]) w = normal(random);
  }
}

Perceptron::Classes Perceptron::Forward(const uint8_t* pixels, Hidden* hidden) const {
  std::copy(weights_[kB1].begin(), weights_[kB1].end(), hidden->begin());
  for (size_t p = 0; p < kPixels; ++p) {
    if (pixels[p] != 0) Add<kHidden>(kWhite * pixels[p], &weights_[kW1][p * kHidden], hidden->data());
  }
  Classes logits;
  std::copy(weights_[kB2].begin(), weights_[kB2].end(), logits.begin());
  for (size_t h = 0; h < kHidden; ++h) {
    (*hidden)[h] = std::max((*hidden)[h], 0.0f);
    Add<kClasses>((*hidden)[h], &weights_[kW2][h * kClasses], logits.data());
  }
  return logits;
}

absl::StatusOr<double> Perceptron::Backward(
    const Samples& samples, absl::Span<const uint32_t> which, double divisor,
    const std::function<absl::Status(uint32_t, absl::Span<const float>)>& take) {
  for (uint32_t tensor = 0; tensor < kTensors; ++tensor) gradients_[tensor].assign(kShapes[tensor].elements(), 0);
  std::vector<Hidden> by_hidden(which.size());  // derivatives by the hidden layer
  double loss = 0;
  for (size_t i = 0; i < which.size(); ++i) {
    Hidden hidden;
    Classes by_logits = Forward(&samples.pixels[which[i] * kPixels], &hidden);
    loss += SoftmaxLoss(&by_logits, samples.labels[which[i]]) / divisor;
    for (float& d : by_logits) d /= static_cast<float>(divisor);
    Add<kClasses>(1, by_logits.data(), gradients_[kB2].data());
    for (size_t h = 0; h < kHidden; ++h) {
      Add<kClasses>(hidden[h], by_logits.data(), &gradients_[kW2][h * kClasses]);
      by_hidden[i][h] = 0;
      if (hidden[h] == 0) continue;
      for (size_t c = 0; c < kClasses; ++c) by_hidden[i][h] += by_logits[c] * weights_[kW2][h * kClasses + c];
    }
  }
  // Its own weights may be replaced from here on.
  for (const uint32_t tensor : {kB2, kW2}) {
    if (auto s = take(tensor, gradients_[tensor]); !s.ok()) return s;
  }
  for (size_t i = 0; i < which.size(); ++i) {
    const uint8_t* pixels = &samples.pixels[which[i] * kPixels];
    Add<kHidden>(1, by_hidden[i].data(), gradients_[kB1].data());
    for (size_t p = 0; p < kPixels; ++p) {
      if (pixels[p] != 0) Add<kHidden>(kWhite * pixels[p], by_hidden[i].data(), &gradients_[kW1][p * kHidden]);
    }
  }
  for (const uint32_t tensor : {kB1, kW1}) {
    if (auto s = take(tensor, gradients_[tensor]); !s.ok()) return s;
  }
  return loss;
}

double Perceptron::Accuracy(const Samples& samples) const {
  size_t right = 0;
  for (size_t i = 0; i < samples.count(); ++i) {
    Hidden hidden;
    const Classes logits = Forward(&samples.pixels[i * kPixels], &hidden);
    right += std::max_element(logits.begin(), logits.end()) - logits.begin() == samples.labels[i] ? 1 : 0;
  }
  return static_cast<double>(right) / static_cast<double>(samples.count());
}

}  // namespace ballast::examples
