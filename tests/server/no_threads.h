// While it lives, the daemon can start no thread, as when a limit of processes is reached. Libraries can: gRPC, where a thread of
// its own pools is refused, waits at its end for ever for that thread.
#pragma once

#include "server/base/failpoint.h"

namespace ballast::testing {

class NoThreads {
 public:
  NoThreads() { ArmFailpoint("thread.start=0:skip"); }
  ~NoThreads() { ArmFailpoint(""); }
  NoThreads(const NoThreads&) = delete;
  NoThreads& operator=(const NoThreads&) = delete;
};

}  // namespace ballast::testing
