// What a rank's client wants kept with the run: its own state, opaque here, and the step that it belongs to. A value;
// thread-compatible.
#pragma once

#include <cstdint>
#include <string>

namespace ballast {

struct ClientState {
  uint64_t step = 0;
  std::string bytes;
};

}  // namespace ballast
