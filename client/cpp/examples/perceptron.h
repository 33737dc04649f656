// A network of one hidden layer, fp32, on the CPU: logits = relu(x w1 + b1) w2 + b2, with cross-entropy.
#pragma once

#include <array>
#include <cstddef>
#include <cstdint>
#include <functional>
#include <vector>

#include "absl/status/statusor.h"
#include "absl/types/span.h"

namespace ballast::examples {

// Images of one byte a pixel, 0 to 255, and the class of each.
struct Samples {
  std::vector<uint8_t> pixels;  // [count, kPixels]
  std::vector<uint8_t> labels;  // [count]; below kClasses
  size_t count() const { return labels.size(); }
};

// Thread-compatible. Its results depend on the weights and the samples alone, to the bit.
class Perceptron {
 public:
  static constexpr size_t kPixels = 784, kHidden = 128, kClasses = 10;
  enum Tensor : uint32_t { kW1, kB1, kW2, kB2, kTensors };
  struct Shape {
    const char* name;
    size_t rows, columns;  // rows = 0: one dimension
    size_t elements() const { return rows == 0 ? columns : rows * columns; }
  };
  static constexpr std::array<Shape, kTensors> kShapes = {{{"hidden.weight", kPixels, kHidden},
                                                           {"hidden.bias", 0, kHidden},
                                                           {"output.weight", kHidden, kClasses},
                                                           {"output.bias", 0, kClasses}}};

  // The same weights for the same seed.
  explicit Perceptron(uint64_t seed);

  std::vector<float>& weights(uint32_t tensor) { return weights_[tensor]; }

  // The loss summed over these samples, divided by `divisor`. `take` is given each tensor's gradient of that as soon as
  // it is made: the output's, then the hidden layer's. Its error ends the pass.
  absl::StatusOr<double> Backward(const Samples& samples, absl::Span<const uint32_t> which, double divisor,
                                  const std::function<absl::Status(uint32_t, absl::Span<const float>)>& take);

  // The part of the samples whose likeliest class is their label.
  double Accuracy(const Samples& samples) const;

 private:
  using Hidden = std::array<float, kHidden>;
  using Classes = std::array<float, kClasses>;
  Classes Forward(const uint8_t* pixels, Hidden* hidden) const;

  std::array<std::vector<float>, kTensors> weights_, gradients_;
};

}  // namespace ballast::examples
