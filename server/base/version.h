// Which build of ballastd this is.
#pragma once

#include <string>

namespace ballast {

struct BuildInfo {
  std::string version, revision, compiler, cuda;
};

std::string Version();
std::string Revision();  // of git; "unknown" outside a checkout
BuildInfo ThisBuild();

}  // namespace ballast
