// The step that daemons go back to which are at different ones: proto/PROTOCOL.md, "Several daemons".
#pragma once

#include <algorithm>
#include <cstdint>
#include <optional>
#include <set>
#include <vector>

namespace ballast {

// The last, of those up to `at_most`, whose state all have; none: there is none. `kept`: by part.
inline std::optional<uint64_t> LastCommonStep(const std::vector<std::set<uint64_t>>& kept, uint64_t at_most) {
  std::optional<uint64_t> last;
  for (const uint64_t step : kept[0]) {
    const auto has = [&](const std::set<uint64_t>& steps) { return steps.contains(step); };
    if (step <= at_most && std::all_of(kept.begin(), kept.end(), has)) last = step;
  }
  return last;
}

}  // namespace ballast
