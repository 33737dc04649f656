// The ranks of a chaos test, and what they train. The gradients follow from the weights, so that one wrong bit shows in
// all later steps; steps have one or two micro-batches, and tensors that are absent on one rank or on both.
#pragma once

#include <array>
#include <cstdint>
#include <memory>
#include <string>
#include <vector>

#include "absl/status/status.h"
#include "absl/types/span.h"

#include "ballast/v1/run.pb.h"
#include "tests/chaos/chaos.h"

namespace ballast::chaos {

inline constexpr uint32_t kWorld = 2;
inline constexpr const char* kRun = "chaos";
// Chunks hold 4096: the first tensor has ten, the third one's last is of one element.
inline constexpr std::array<uint32_t, 5> kElements = {40000, 100, 12289, 4096, 1};
inline constexpr uint32_t kTensors = kElements.size();
using Weights = std::array<std::vector<float>, kTensors>;

// splitmix64's finalizer.
uint64_t Mix(uint64_t a, uint64_t b);
v1::RunSpec Spec(const ChaosOptions& options);
uint32_t Micros(const ChaosOptions& options, uint64_t step);
inline absl::Span<const std::byte> Bytes(const std::vector<float>& values) {
  return {reinterpret_cast<const std::byte*>(values.data()), values.size() * sizeof(float)};
}

// What one rank's process does. Thread-compatible.
class Rank {
 public:
  Rank(const ChaosOptions& options, uint32_t rank);
  virtual ~Rank() = default;

  // Creates the run if need be, and attaches. Rank 0 also uploads the weights: zeros.
  virtual absl::Status Join(const std::string& server) = 0;
  // Makes the step and awaits its result, which must be APPLIED.
  virtual absl::Status Step(uint64_t step) = 0;
  const Weights& weights() const { return weights_; }

 protected:
  // The gradient of this micro-batch; empty: absent.
  std::vector<float> Gradient(uint64_t step, uint32_t micro, uint32_t tensor) const;

  const ChaosOptions options_;
  const uint32_t rank_;
  Weights weights_;
};

// A trainer with ballast::Client.
std::unique_ptr<Rank> MakeClientRank(const ChaosOptions& options, uint32_t rank);
// A trainer on the bare stubs that ignores what the daemon holds: after a lost connection it sends the whole open step
// again. It does not heed credit, so the daemon must give it enough for two steps.
std::unique_ptr<Rank> MakeForgetfulRank(const ChaosOptions& options, uint32_t rank);

}  // namespace ballast::chaos
