// What a run may be called, for the daemon and for whoever writes down names of runs that are not there yet.
#pragma once

#include <algorithm>
#include <cstddef>

#include "absl/strings/ascii.h"
#include "absl/strings/match.h"
#include "absl/strings/string_view.h"
#include "absl/strings/strip.h"

namespace ballast {

inline constexpr absl::string_view kRunNameRule = "1 to 63 of a-z, 0-9 and -, neither first nor last a -";
inline constexpr size_t kMostOfRunName = 63;

// Whether a run's name may begin so.
inline bool BeginsRunName(absl::string_view text) {
  return text.size() <= kMostOfRunName && (text.empty() || text.front() != '-') &&
         std::all_of(text.begin(), text.end(),
                     [](unsigned char c) { return absl::ascii_islower(c) || absl::ascii_isdigit(c) || c == '-'; });
}

inline bool IsRunName(absl::string_view text) { return !text.empty() && text.back() != '-' && BeginsRunName(text); }

// A name, or the beginning of some with a * after it, which stands for any rest.
inline bool IsRunPattern(absl::string_view text) {
  return absl::EndsWith(text, "*") ? BeginsRunName(absl::StripSuffix(text, "*")) : IsRunName(text);
}

}  // namespace ballast
