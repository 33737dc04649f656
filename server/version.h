// Which ballastd this is, as built.
#pragma once

#include <string>

#include "server/metrics.h"

namespace ballast {

std::string Version();
std::string Revision();  // of git; "unknown" outside a checkout
BuildInfo ThisBuild();

}  // namespace ballast
