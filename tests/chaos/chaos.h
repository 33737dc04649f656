// Two ranks train on a real daemon of this process while a ChaosProxy cuts each one's connections; then the same two
// train without. Whatever the seed, the weights are the same to the bit, every step closes once and is applied, and no
// chunk comes twice with other bytes.
#pragma once

#include <cstdint>
#include <string>

namespace ballast {

struct ChaosOptions {
  uint64_t seed = 0;
  bool staged = false;
  // The second rank ignores what the daemon holds: then chunks come twice, at least one for every ten cuts.
  bool forgetful = false;
  uint64_t steps = 0;
  uint64_t cuts = 0;  // at least; the training is long enough for as many
};

struct ChaosReport {
  std::string failure;  // with the seed; empty: none
  uint64_t cuts = 0, late = 0, duplicates = 0;
};

ChaosReport RunChaos(const ChaosOptions& options);

}  // namespace ballast
