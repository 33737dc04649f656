// Addresses of Unix sockets, unix:PATH, as gRPC takes them: it reads a URI, of whose path it decodes %XX, and refuses
// what no URI's path has, such as a space.
#pragma once

#include <string>

#include "absl/strings/ascii.h"
#include "absl/strings/escaping.h"
#include "absl/strings/match.h"
#include "absl/strings/str_cat.h"
#include "absl/strings/string_view.h"

namespace ballast {

inline bool IsUnixAddress(absl::string_view address) {
  return absl::StartsWith(address, "unix:") || absl::StartsWith(address, "unix-abstract:");
}

// Any other address stays as it is.
inline std::string ForGrpc(absl::string_view address) {
  if (!absl::StartsWith(address, "unix:")) return std::string(address);
  std::string encoded;
  for (const char c : address) {
    const absl::string_view one(&c, 1);
    const bool plain =
        absl::ascii_isalnum(static_cast<unsigned char>(c)) || absl::StrContains("-._~!$&'()*+,;=:@/", one);
    plain ? absl::StrAppend(&encoded, one) : absl::StrAppend(&encoded, "%", absl::BytesToHexString(one));
  }
  return encoded;
}

}  // namespace ballast
