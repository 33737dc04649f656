// What the process may know about the machine it runs on. Thread-safe; reads /proc and /sys at each call.
#pragma once

#include <cstdint>
#include <string>

namespace ballast {

// Physical memory, or the control group's limit where that is lower; 0 if neither can be read.
uint64_t MachineMemoryBytes();
std::string MachineHostname();

}  // namespace ballast
