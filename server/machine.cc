#include "server/machine.h"

#include <unistd.h>

#include <algorithm>
#include <array>
#include <fstream>

namespace ballast {
namespace {

// The limit in a control group's file; "max" and what cannot be read: none, as 0.
uint64_t ReadLimit(const char* path) {
  uint64_t bytes = 0;
  std::ifstream(path) >> bytes;
  return bytes;
}

}  // namespace

uint64_t MachineMemoryBytes() {
  const long pages = sysconf(_SC_PHYS_PAGES);
  const long page_bytes = sysconf(_SC_PAGE_SIZE);
  uint64_t bytes = pages > 0 && page_bytes > 0 ? static_cast<uint64_t>(pages) * static_cast<uint64_t>(page_bytes) : 0;
  // Version 2, then version 1, as seen from inside a container.
  for (const char* path : {"/sys/fs/cgroup/memory.max", "/sys/fs/cgroup/memory/memory.limit_in_bytes"}) {
    if (const uint64_t limit = ReadLimit(path); limit > 0) bytes = bytes > 0 ? std::min(bytes, limit) : limit;
  }
  return bytes;
}

std::string MachineHostname() {
  std::array<char, 256> name{};
  if (gethostname(name.data(), name.size() - 1) != 0) return "";
  return name.data();
}

}  // namespace ballast
