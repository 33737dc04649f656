// When a refused caller may ask again: a note on a status, which gRPC calls hand on as trailing metadata of that name, and the
// shared memory's socket in its ShmGrant.
#pragma once

#include <cmath>
#include <cstdint>
#include <optional>

#include "absl/status/status.h"
#include "absl/strings/cord.h"
#include "absl/strings/numbers.h"
#include "absl/strings/str_cat.h"

namespace ballast {

inline constexpr char kRetryAfterKey[] = "ballast-retry-after-ms";

inline absl::Status WithRetryAfter(absl::Status status, double seconds) {
  status.SetPayload(kRetryAfterKey, absl::Cord(absl::StrCat(static_cast<int64_t>(std::ceil(seconds * 1000)))));
  return status;
}

inline std::optional<int64_t> RetryAfterMsOf(const absl::Status& status) {
  int64_t ms = 0;
  const auto stated = status.GetPayload(kRetryAfterKey);
  return stated && absl::SimpleAtoi(std::string(*stated), &ms) ? std::optional(ms) : std::nullopt;
}

}  // namespace ballast
