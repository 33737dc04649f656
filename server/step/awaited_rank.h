// A rank that the open step waits for: a value, for people.
#pragma once

#include <cstdint>
#include <string>

namespace ballast {

struct AwaitedRank {
  uint32_t rank = 0;
  std::string what;    // has not begun it
  double seconds = 0;  // for which it could have sent that, in this step
  bool connected = false;
};

}  // namespace ballast
