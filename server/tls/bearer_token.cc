#include "server/tls/bearer_token.h"

#include <openssl/crypto.h>

#include <string>

#include "absl/strings/escaping.h"
#include "absl/strings/match.h"

namespace ballast {
namespace {

bool Same(std::string_view given, std::string_view token) {
  return given.size() == token.size() && CRYPTO_memcmp(given.data(), token.data(), token.size()) == 0;
}

}  // namespace

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
