#include "server/rpc/peer_identity.h"

#include <arpa/inet.h>
#include <grpc/grpc_security_constants.h>
#include <netinet/in.h>

#include <algorithm>
#include <array>

#include "absl/strings/match.h"
#include "absl/strings/str_cat.h"
#include "absl/strings/strip.h"

#include "server/base/utf8.h"

namespace ballast {

std::string PeerIdentity(const grpc::ServerContextBase& context) {
  constexpr size_t kMostBytes = 255;
  const auto certificate = context.auth_context();
  if (certificate == nullptr || !certificate->IsPeerAuthenticated()) return "";
  const auto value = [&](const char* name) {
    const auto found = certificate->FindPropertyValues(name);
    return found.empty() ? "" : ValidUtf8(std::string(found[0].data(), found[0].size()), kMostBytes);
  };
  if (std::string id = value(GRPC_PEER_SPIFFE_ID_PROPERTY_NAME); !id.empty()) return id;
  // An authority may let whoever asks for a certificate choose the common name: it is no SPIFFE ID, and counts only where
  // the certificate has no URI, such as a SPIFFE ID that is not well formed.
  const std::string name = value(GRPC_X509_CN_PROPERTY_NAME);
  const bool poses = absl::StartsWithIgnoreCase(name, "spiffe:") || !value(GRPC_PEER_URI_PROPERTY_NAME).empty();
  return poses ? "" : name;
}

std::string PeerAddress(const std::string& peer) {
  absl::string_view rest = peer;
  if (absl::ConsumePrefix(&rest, "ipv4:")) return std::string(rest.substr(0, rest.rfind(':')));
  if (!absl::ConsumePrefix(&rest, "ipv6:%5B")) return "";
  rest = rest.substr(0, rest.find("%5D"));
  const std::string host(rest.substr(0, rest.find('%')));  // without a zone
  in6_addr address{};
  if (inet_pton(AF_INET6, host.c_str(), &address) != 1) return "";
  std::fill_n(&address.s6_addr[8], 8, uint8_t{0});
  std::array<char, INET6_ADDRSTRLEN> text{};
  inet_ntop(AF_INET6, &address, text.data(), text.size());
  return absl::StrCat(text.data(), "/64");
}

}  // namespace ballast
