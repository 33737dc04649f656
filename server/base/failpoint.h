// Places where tests end the process, as kill -9 would, or hold it, while they cut the power; and calls that tests leave
// out, to see that what proves them needed does so. Builds for users have none: CMake takes failpoint_none.cc there.
//
//   Failpoint("checkpoint.published");
//   if (LeftOut("fs.sync")) return absl::OkStatus();
//
// tests/python/test_crashes.py ends a daemon at every one, power.py cuts the power there. Thread-safe.
#pragma once

#include <string>

namespace ballast {

void Failpoint(const char* name);
// Whether the call that stands here is left out now.
bool LeftOut(const char* name);
// Of one place, in place of the one before; "": of none.
//   checkpoint.published=2        the process ends when it comes there for the second time
//   checkpoint.published=2:stop   it stands still there (SIGSTOP), the calling thread exactly there
//   fs.sync=3:skip                the third call is left out; fs.sync=0:skip: each
void ArmFailpoint(const std::string& place);

}  // namespace ballast
