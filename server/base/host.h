// What the process may know about the machine it runs on. Thread-safe; reads /proc and /sys at each call.
#pragma once

#include <cstdint>
#include <string>
#include <vector>

namespace ballast {

// Physical memory, or the control group's limit where that is lower; 0 if neither can be read.
uint64_t MachineMemoryBytes();
std::string MachineHostname();
// The machine's hostname and its other names: the first label, its names in /etc/hosts, and its names in the domains
// that /etc/resolv.conf searches. Does not ask DNS.
std::vector<std::string> MachineNames();
// The same, from the text of these files.
std::vector<std::string> NamesOf(const std::string& hostname, const std::string& hosts, const std::string& resolv_conf);

}  // namespace ballast
