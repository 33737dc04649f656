#include "server/base/host.h"

#include <unistd.h>

#include <algorithm>
#include <array>
#include <fstream>

#include "absl/strings/str_cat.h"
#include "absl/strings/str_split.h"

namespace ballast {
namespace {

// The limit in a control group's file; "max" and what cannot be read: none, as 0.
uint64_t ReadLimit(const char* path) {
  uint64_t bytes = 0;
  std::ifstream(path) >> bytes;
  return bytes;
}

// The words of a line, without its remark.
std::vector<std::string> WordsOf(absl::string_view line) {
  return absl::StrSplit(line.substr(0, line.find('#')), absl::ByAnyChar(" \t\r"), absl::SkipEmpty());
}

// The first 64 KiB of the file; empty if it cannot be read.
std::string Read(const char* path) {
  std::string text(64 << 10, '\0');
  std::ifstream file(path, std::ios::binary);
  file.read(text.data(), static_cast<std::streamsize>(text.size()));
  text.resize(static_cast<size_t>(file.gcount()));
  return text;
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

std::vector<std::string> NamesOf(const std::string& hostname, const std::string& hosts,
                                 const std::string& resolv_conf) {
  if (hostname.empty()) return {};
  const std::string first_label = hostname.substr(0, hostname.find('.'));
  std::vector<std::string> names = {hostname, first_label};
  for (const absl::string_view line : absl::StrSplit(hosts, '\n')) {
    std::vector<std::string> words = WordsOf(line);
    const bool mine = std::find(words.begin(), words.end(), hostname) != words.end() && words.front() != hostname;
    if (mine) names.insert(names.end(), words.begin() + 1, words.end());
  }
  for (const absl::string_view line : absl::StrSplit(resolv_conf, '\n')) {
    const std::vector<std::string> words = WordsOf(line);
    if (words.empty() || (words.front() != "search" && words.front() != "domain")) continue;
    for (size_t i = 1; i < words.size(); ++i) names.push_back(absl::StrCat(first_label, ".", words[i]));
  }
  return names;
}

std::vector<std::string> MachineNames() {
  return NamesOf(MachineHostname(), Read("/etc/hosts"), Read("/etc/resolv.conf"));
}

}  // namespace ballast
