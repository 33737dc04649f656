// Runs the simulator at length, or one seed of it:
//
//   step_simulator --seeds FIRST COUNT    prints violations, and how often each kind of event occurred
//   step_simulator --seed N               prints every event and its effects, like a scenario
//   step_simulator --parts FIRST COUNT    --seeds, of runs on several daemons
//   step_simulator --part N               --seed, of one of them
//   step_simulator --grow                 what such a run costs, as ranks and parts grow
#include <cstdio>
#include <iostream>
#include <string>
#include <vector>

#include "absl/strings/numbers.h"

#include "tests/server/step/parts_simulator.h"
#include "tests/server/step/step_growth.h"
#include "tests/server/step/step_simulator.h"

namespace {

using namespace ballast::sim;

// `simulate`: of a seed. `name`: of a kind of event, by number.
template <typename Simulate, typename Name>
int RunSeeds(uint64_t first, uint64_t count, const Simulate& simulate, const Name& name) {
  decltype(simulate(first).counts) counts = {};
  uint64_t events = 0, violations = 0;
  for (uint64_t seed = first; seed < first + count; ++seed) {
    const auto report = simulate(seed);
    std::cout << report.violation;
    violations += report.violation.empty() ? 0 : 1;
    events += report.events;
    for (size_t k = 0; k < counts.size(); ++k) counts[k] += report.counts[k];
  }
  for (size_t k = 0; k < counts.size(); ++k) std::cout << "  " << name(k) << " " << counts[k] << "\n";
  std::cout << count << " seeds, " << events << " events, " << violations << " violations\n";
  return violations == 0 ? 0 : 1;
}

template <typename Report>
int Show(const Report& report) {
  std::cout << report.violation;
  return report.violation.empty() ? 0 : 1;
}

int RunSeeds(uint64_t first, uint64_t count) {
  return RunSeeds(
      first, count, [](uint64_t seed) { return Simulate({.seed = seed}); },
      [](size_t kind) { return KindName(static_cast<Kind>(kind)); });
}

int RunParts(uint64_t first, uint64_t count) {
  return RunSeeds(
      first, count, [](uint64_t seed) { return SimulateParts({.seed = seed}); },
      [](size_t kind) { return PartsKindName(static_cast<PartsKind>(kind)); });
}

}  // namespace

int main(int argc, char** argv) {
  const std::vector<std::string> arguments(argv + 1, argv + argc);
  uint64_t first = 0, count = 0;
  const std::string mode = arguments.empty() ? "" : arguments[0];
  const bool seed = arguments.size() == 2 && absl::SimpleAtoi(arguments[1], &first);
  const bool seeds =
      arguments.size() == 3 && absl::SimpleAtoi(arguments[1], &first) && absl::SimpleAtoi(arguments[2], &count);
  if (seed && mode == "--seed") return Show(Simulate({.seed = first, .listing = &std::cout}));
  if (seed && mode == "--part") return Show(SimulateParts({.seed = first, .listing = &std::cout}));
  if (seeds && mode == "--seeds") return RunSeeds(first, count);
  if (arguments.size() == 1 && mode == "--grow") return PrintGrowth(std::cout), 0;
  if (seeds && mode == "--parts") return RunParts(first, count);
  std::fputs("usage: step_simulator --seeds FIRST COUNT | --seed N | --parts FIRST COUNT | --part N | --grow\n",
             stderr);
  return 2;
}
