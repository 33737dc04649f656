// How the wire says that a session has ended, and that nobody took its rank over: by the message of an ABORTED. Both
// transports carry a code and a message, and nothing else.
#pragma once

#include "absl/status/status.h"
#include "absl/strings/string_view.h"

namespace ballast {

inline absl::Status SessionOverError() {
  return absl::AbortedError("this session is over: attach again without its token");
}

// Whether the session is over, usually since its rank was away for longer than its lease and rank_timeout. A new
// session may begin.
inline bool IsSessionOver(const absl::Status& status) { return status == SessionOverError(); }

}  // namespace ballast
