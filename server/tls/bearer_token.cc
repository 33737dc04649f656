#include "server/tls/bearer_token.h"

#include <openssl/crypto.h>

#include <algorithm>
#include <utility>

#include "absl/strings/ascii.h"
#include "absl/strings/escaping.h"
#include "absl/strings/match.h"
#include "absl/strings/str_cat.h"
#include "absl/strings/strip.h"
#include "proto/tls/certificate_files.h"

#include "server/base/status_macros.h"

namespace ballast {
namespace {

constexpr size_t kLeast = 16, kMost = 4096;

bool Same(std::string_view given, std::string_view token) {
  return given.size() == token.size() && CRYPTO_memcmp(given.data(), token.data(), token.size()) == 0;
}

}  // namespace

absl::StatusOr<std::string> ReadToken(const std::string& file) {
  ASSIGN_OR_RETURN(std::string text, ReadSecretFile(file));
  absl::StripAsciiWhitespace(&text);
  const bool visible = std::all_of(text.begin(), text.end(), [](unsigned char c) { return absl::ascii_isgraph(c); });
  if (visible && text.size() >= kLeast && text.size() <= kMost) return text;
  return absl::FailedPreconditionError(absl::StrCat(file, ": holds no token: one word of ", kLeast, " to ", kMost,
                                                    " visible characters; make one with openssl rand -hex 32"));
}

bool BringsToken(std::string_view authorization, std::string_view token) {
  absl::string_view rest(authorization.data(), authorization.size());
  std::string basic;
  if (absl::StartsWithIgnoreCase(rest, "Basic ")) {
    rest.remove_prefix(6);
    if (!absl::Base64Unescape(rest, &basic)) return false;
    const size_t colon = basic.find(':');
    return colon != std::string::npos && Same(std::string_view(basic).substr(colon + 1), token);
  }
  if (!absl::StartsWithIgnoreCase(rest, "Bearer ")) return false;
  rest.remove_prefix(7);
  return Same({rest.data(), rest.size()}, token);
}

}  // namespace ballast
