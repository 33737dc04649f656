// Places where tests end the process, as kill -9 would, to see that nothing is lost. Builds for users have none: CMake
// takes failpoint_none.cc there.
//
//   Failpoint("checkpoint.published");
//
// tests/python/test_crashes.py ends a daemon at every one. Thread-safe.
#pragma once

#include <string>

namespace ballast {

void Failpoint(const char* name);
// "checkpoint.published=2": the process ends when it comes to that place for the second time. Before any other thread.
void ArmFailpoint(const std::string& place);

}  // namespace ballast
