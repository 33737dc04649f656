// Which processors the process may use, and at which NUMA nodes they are. Thread-safe; reads /proc and /sys at each call.
#pragma once

#include <cstdint>
#include <string>
#include <vector>

#include "absl/strings/string_view.h"

namespace ballast {

struct NumaNode {
  uint32_t id = 0;
  std::vector<uint32_t> processors;  // ascending
};

// How many processors the process may keep busy: those that its affinity allows (taskset, a container's cpuset), or the
// control group's share of their time, rounded up, where that is less. At least 1.
uint32_t UsableProcessors();
// The same. cpu_max: of version 2 of control groups, `QUOTA PERIOD`; a quota that is no number is none.
uint32_t UsableProcessors(size_t allowed, absl::string_view cpu_max);

// The nodes at which the process may use processors, and those. Empty where the system tells of none.
std::vector<NumaNode> NumaNodes();
// 0-3,8,10-11, as the system writes sets of processors and nodes. What is wrong in it is left out.
std::vector<uint32_t> ParseNumbers(absl::string_view list);
// Which node each of so many threads belongs to, as a place in `nodes`, none of which is empty: each thread in turn goes
// where the fewest are for the processors there.
std::vector<size_t> SpreadThreads(const std::vector<NumaNode>& nodes, uint32_t threads);

}  // namespace ballast
