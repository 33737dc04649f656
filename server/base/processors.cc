#include "server/base/processors.h"

#include <sched.h>

#include <algorithm>
#include <fstream>
#include <iterator>
#include <utility>

#include "absl/strings/numbers.h"
#include "absl/strings/str_cat.h"
#include "absl/strings/str_split.h"

namespace ballast {
namespace {

constexpr const char* kNodes = "/sys/devices/system/node";
constexpr uint32_t kMostNumber = 1 << 16;  // of a processor or node

std::string FirstLine(const std::string& path) {
  std::string line;
  std::ifstream file(path);
  std::getline(file, line);
  return line;
}

// Ascending.
std::vector<uint32_t> AllowedProcessors() {
  std::vector<uint32_t> allowed;
  cpu_set_t set;
  if (sched_getaffinity(0, sizeof set, &set) != 0) return allowed;
  for (uint32_t i = 0; i < CPU_SETSIZE; ++i) {
    if (CPU_ISSET(i, &set)) allowed.push_back(i);
  }
  return allowed;
}

}  // namespace

std::vector<uint32_t> ParseNumbers(absl::string_view list) {
  std::vector<uint32_t> numbers;
  for (const absl::string_view part : absl::StrSplit(list, ',', absl::SkipWhitespace())) {
    const std::pair<absl::string_view, absl::string_view> ends = absl::StrSplit(part, absl::MaxSplits('-', 1));
    uint32_t first = 0, last = 0;
    if (!absl::SimpleAtoi(ends.first, &first)) continue;
    if (!absl::SimpleAtoi(ends.second.empty() ? ends.first : ends.second, &last) || last >= kMostNumber) continue;
    for (uint32_t i = first; i <= last; ++i) numbers.push_back(i);
  }
  return numbers;
}

uint32_t UsableProcessors(size_t allowed, absl::string_view cpu_max) {
  const std::pair<absl::string_view, absl::string_view> words = absl::StrSplit(cpu_max, absl::MaxSplits(' ', 1));
  uint64_t quota = 0, period = 0;
  auto usable = static_cast<uint64_t>(allowed);
  if (absl::SimpleAtoi(words.first, &quota) && absl::SimpleAtoi(words.second, &period) && quota > 0 && period > 0) {
    usable = std::min(usable, (quota - 1) / period + 1);
  }
  return static_cast<uint32_t>(std::max<uint64_t>(usable, 1));
}

uint32_t UsableProcessors() {
  std::string cpu_max =
      FirstLine("/sys/fs/cgroup/cpu.max");  // version 2, then version 1, as seen from inside a container
  if (cpu_max.empty()) {
    cpu_max = absl::StrCat(FirstLine("/sys/fs/cgroup/cpu/cpu.cfs_quota_us"), " ",
                           FirstLine("/sys/fs/cgroup/cpu/cpu.cfs_period_us"));
  }
  return UsableProcessors(AllowedProcessors().size(), cpu_max);
}

std::vector<NumaNode> NumaNodes() {
  const std::vector<uint32_t> allowed = AllowedProcessors();
  std::vector<NumaNode> nodes;
  for (const uint32_t id : ParseNumbers(FirstLine(absl::StrCat(kNodes, "/online")))) {
    NumaNode node{.id = id, .processors = {}};
    const std::vector<uint32_t> there = ParseNumbers(FirstLine(absl::StrCat(kNodes, "/node", id, "/cpulist")));
    std::set_intersection(there.begin(), there.end(), allowed.begin(), allowed.end(),
                          std::back_inserter(node.processors));
    if (!node.processors.empty()) nodes.push_back(std::move(node));
  }
  return nodes;
}

std::vector<size_t> SpreadThreads(const std::vector<NumaNode>& nodes, uint32_t threads) {
  std::vector<size_t> places;
  std::vector<uint64_t> have(nodes.size());
  for (uint32_t t = 0; t < threads && !nodes.empty(); ++t) {
    size_t best = 0;
    for (size_t n = 1; n < nodes.size(); ++n) {
      if ((have[n] + 1) * nodes[best].processors.size() < (have[best] + 1) * nodes[n].processors.size()) best = n;
    }
    ++have[best];
    places.push_back(best);
  }
  return places;
}

}  // namespace ballast
