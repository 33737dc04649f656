// Runs the simulator at length, or one seed of it:
//
//   step_simulator --seeds FIRST COUNT    prints violations, and how often each kind of event occurred
//   step_simulator --seed N               prints every event and its effects, like a scenario
#include <cstdio>
#include <iostream>
#include <string>
#include <vector>

#include "absl/strings/numbers.h"

#include "tests/server/step/step_simulator.h"

namespace {

using ballast::sim::Kind;

int RunSeeds(uint64_t first, uint64_t count) {
  ballast::sim::Counts counts = {};
  uint64_t events = 0, violations = 0;
  for (uint64_t seed = first; seed < first + count; ++seed) {
    const auto report = ballast::sim::Simulate({.seed = seed});
    if (!report.violation.empty()) {
      std::cout << report.violation;
      ++violations;
    }
    events += report.events;
    for (size_t k = 0; k < counts.size(); ++k) counts[k] += report.counts[k];
  }
  for (size_t k = 0; k < counts.size(); ++k) {
    std::cout << "  " << ballast::sim::KindName(static_cast<Kind>(k)) << " " << counts[k] << "\n";
  }
  std::cout << count << " seeds, " << events << " events, " << violations << " violations\n";
  return violations == 0 ? 0 : 1;
}

int RunOne(uint64_t seed) {
  const auto report = ballast::sim::Simulate({.seed = seed, .listing = &std::cout});
  std::cout << report.violation;
  return report.violation.empty() ? 0 : 1;
}

}  // namespace

int main(int argc, char** argv) {
  const std::vector<std::string> arguments(argv + 1, argv + argc);
  uint64_t first = 0, count = 0;
  if (arguments.size() == 2 && arguments[0] == "--seed" && absl::SimpleAtoi(arguments[1], &first)) return RunOne(first);
  if (arguments.size() == 3 && arguments[0] == "--seeds" && absl::SimpleAtoi(arguments[1], &first) &&
      absl::SimpleAtoi(arguments[2], &count)) {
    return RunSeeds(first, count);
  }
  std::fputs("usage: step_simulator --seeds FIRST COUNT | --seed N\n", stderr);
  return 2;
}
