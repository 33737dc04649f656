// Unit scaling's factors (arXiv 2303.11257, 2407.17465) and u-muP's table of learning rates, which the Python client
// computes for users; here as plain formulas.
#pragma once

#include <cmath>
#include <numbers>

namespace ballast::oracle {

// A linear layer y = x W^T: each of output, input gradient and weight gradient is divided by the root of the number of
// products it sums. `free`: without the constraint that output and input gradient share a factor.
inline double LinearOut(double fan_in) { return 1 / std::sqrt(fan_in); }
inline double LinearGradInFree(double fan_out) { return 1 / std::sqrt(fan_out); }
inline double LinearGeometricMean(double fan_in, double fan_out) { return 1 / std::pow(fan_in * fan_out, 0.25); }
inline double LinearGradWeight(double batch) { return 1 / std::sqrt(batch); }
inline double ReadoutOut(double fan_in) { return 1 / fan_in; }
inline double AddOut(double inputs) { return 1 / std::sqrt(inputs); }
// Softmax cross entropy over `vocabulary` classes: the gradient of a uniform guess has this inverse deviation.
inline double CrossEntropyGrad(double vocabulary) { return vocabulary / std::sqrt(vocabulary - 1); }
// Each row of an embedding is looked up batch/vocabulary times.
inline double EmbeddingGrad(double vocabulary, double batch) { return std::sqrt(vocabulary / batch); }
inline double DropoutOut(double p) { return std::sqrt(1 - p); }
// The difference of two unit normals, doubled by the square's derivative.
inline double MseGrad() { return 1 / std::sqrt(8.0); }
inline double ResidualBranch(double tau) { return tau / std::sqrt(1 + tau * tau); }
inline double SkipBranch(double tau) { return 1 / std::sqrt(1 + tau * tau); }

// Activations and softmax: between two limits of the multiplier, in the logarithm.
inline double Between(double alpha, double lower, double upper) {
  return std::pow(lower, 1 - alpha) * std::pow(upper, alpha);
}
inline double GeluOut(double mult) {
  return Between(1 / (1 + 0.25 / (mult * mult)), 2, std::sqrt(2 / (1 - 1 / std::numbers::pi)));
}
inline double GeluGrad(double mult) { return Between(1 / (1 + 0.25 / (mult * mult)), 2, std::sqrt(2.0)); }
inline double SiluOut(double mult) { return GeluOut(mult); }
inline double SiluGrad(double mult) { return Between(1 / (1 + 1 / (mult * mult)), 2, std::sqrt(2.0)); }
inline double SoftmaxOut(double size, double mult) {
  return Between(1 / (1 + 4 / (mult * mult)), size, std::sqrt(size));
}

// Adam's learning rate multipliers.
inline double AdamWeight(double fan_in, double depth) { return 1 / std::sqrt(fan_in * depth); }
inline double AdamBiasOrNorm(double depth) { return 1 / std::sqrt(depth); }
inline double AdamOutput() { return 1; }
inline double SgdWeight(double fan_in, double depth) { return std::sqrt(fan_in / depth); }
inline double SgdBias(double fan_out, double depth) { return fan_out / std::sqrt(depth); }
inline double AdamEmbedding(double width) { return 1 / std::sqrt(width); }

}  // namespace ballast::oracle
