// How the wire says that a run was rewound (proto/PROTOCOL.md, "Rewind"): by the message of the FAILED_PRECONDITION
// that ends its sessions. Both transports carry a code and a message, and nothing else. A client says so itself where
// the daemon has started again, and has read the run back from its disk: to a trainer that is the same.
#pragma once

#include <cstdint>
#include <optional>
#include <string>

#include "absl/status/status.h"
#include "absl/strings/match.h"
#include "absl/strings/numbers.h"
#include "absl/strings/str_cat.h"
#include "absl/strings/string_view.h"

namespace ballast {

inline constexpr absl::string_view kRewoundPrefix = "rewound to step ";

// "rewound to step 20 (generation 3): attach again ..."
// why: in front of that, "the daemon ...; ".
inline absl::Status RewoundError(uint64_t step, uint64_t generation, absl::string_view why = "") {
  return absl::FailedPreconditionError(
      absl::StrCat(kRewoundPrefix, step, " (generation ", generation, "): ", why,
                   "attach again without the token, take weights and client_state, and go on with step ", step + 1));
}

// The step that the run was taken back to; none: the status says something else.
inline std::optional<uint64_t> RewoundTo(const absl::Status& status) {
  uint64_t step = 0;
  if (!absl::IsFailedPrecondition(status) || !absl::StartsWith(status.message(), kRewoundPrefix)) return std::nullopt;
  absl::string_view rest = status.message().substr(kRewoundPrefix.size());
  if (!absl::SimpleAtoi(rest.substr(0, rest.find(' ')), &step)) return std::nullopt;
  return step;
}

}  // namespace ballast
