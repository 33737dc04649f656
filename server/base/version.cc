#include "server/base/version.h"

#include <string>

#include "ballast_version.h"

namespace ballast {

std::string Version() { return kVersion; }
std::string Revision() { return kRevision; }

BuildInfo ThisBuild() { return {.version = kVersion, .revision = kRevision, .compiler = kCompiler, .cuda = kCuda}; }

}  // namespace ballast
