// Versions of the protocol that this source speaks, first and last: the daemon's range, and the client's, which takes
// the newest that both speak.
#pragma once

#include <cstdint>

namespace ballast {

inline constexpr uint32_t kProtocolMin = 1;
inline constexpr uint32_t kProtocolMax = 1;

}  // namespace ballast
