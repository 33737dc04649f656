// What a fuzz target demands of its subject; where that fails, the process ends, and the input is kept.
#pragma once

#include <cstdio>
#include <cstdlib>

#include "absl/status/status.h"

namespace ballast::fuzz {

inline void Require(bool holds, const char* what) {
  if (holds) return;
  std::fprintf(stderr, "accepted, but %s\n", what);
  std::abort();
}

// What is refused says why.
inline void RequireSaid(const absl::Status& refused) {
  if (!refused.message().empty()) return;
  std::fprintf(stderr, "refused without a word\n");
  std::abort();
}

}  // namespace ballast::fuzz
