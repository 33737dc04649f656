#include "server/base/failpoint.h"
#include "server/base/log.h"

namespace ballast {

void Failpoint(const char*) {}

bool LeftOut(const char*) { return false; }

void ArmFailpoint(const std::string& place) {
  Log(LogLevel::kWarn, "config", "this build has no failpoints", {{"err", place}});
}

}  // namespace ballast
