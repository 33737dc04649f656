// The words of an access file that both ends know: who writes a grant, and who reads it.
#pragma once

#include <algorithm>
#include <array>
#include <cstdint>

#include "absl/strings/ascii.h"
#include "absl/strings/string_view.h"

namespace ballast {

// Each includes those before it.
inline constexpr std::array<absl::string_view, 4> kScopeNames = {"observe", "pull", "push", "admin"};

// A grant's quotas; 0 stands for any number. All but most_bytes are counts, up to kMostOfQuota.
inline constexpr std::array<absl::string_view, 4> kQuotaNames = {"most_runs", "most_bytes", "most_streams",
                                                                 "most_requests"};
inline constexpr uint64_t kMostOfQuota = 1'000'000;

// Of letters, digits and . _ -, at most 128.
inline bool IsGrantName(absl::string_view text) {
  return !text.empty() && text.size() <= 128 && std::all_of(text.begin(), text.end(), [](unsigned char c) {
    return absl::ascii_isalnum(c) || c == '.' || c == '_' || c == '-';
  });
}

}  // namespace ballast
