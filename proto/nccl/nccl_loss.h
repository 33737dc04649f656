// When NCCL counts as lost between a trainer and its daemon, and how the wire says so: by the message of an UNAVAILABLE, which
// ends the Train stream. The trainer resumes it, with NCCL or without.
#pragma once

#include <cstdint>

#include "absl/status/status.h"
#include "absl/strings/match.h"
#include "absl/strings/str_cat.h"
#include "absl/strings/string_view.h"

namespace ballast {

inline constexpr double kNcclConnectS = 60;  // until both ends have come
// Until so many bytes that the other end has told of are there: what moves at all is faster than 10 MB/s.
inline double NcclPatienceS(uint64_t bytes) { return 30 + static_cast<double>(bytes) / 10e6; }

inline constexpr absl::string_view kNcclLostPrefix = "NCCL is lost: ";

inline absl::Status NcclLostError(absl::string_view why) {
  return absl::UnavailableError(absl::StrCat(kNcclLostPrefix, why));
}

inline bool IsNcclLost(const absl::Status& status) {
  return absl::IsUnavailable(status) && absl::StartsWith(status.message(), kNcclLostPrefix);
}

}  // namespace ballast
