// What the keys of a relay may be, with what the others say. Each says what is wrong; empty: nothing. Pure functions.
#pragma once

#include <string>

#include "server/config/config.h"

namespace ballast {

std::string CheckUpstream(const Config& config);
std::string CheckRelayedRuns(const Config& config);
// ca, certificate and key.
std::string CheckRelayCa(const Config& config);
std::string CheckRelayCertificate(const Config& config);
std::string CheckRelayKey(const Config& config);
std::string CheckRelayToken(const Config& config);

}  // namespace ballast
