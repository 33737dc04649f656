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
namespace {

// Cut short, or with its bytes replaced, it would be another's.
std::string WholeOrNobody(const std::string& name) {
  constexpr size_t kMostBytes = 2048;  // of a SPIFFE ID
  return name.size() <= kMostBytes && ValidUtf8(name) == name ? name : "";
}

}  // namespace

std::string IdentityOf(const CertificateNames& names) {
  if (!names.spiffe_id.empty()) return WholeOrNobody(names.spiffe_id);
  // An authority may let whoever asks for a certificate choose the common name: it is no SPIFFE ID, and counts only where
  // the certificate has no URI, such as a SPIFFE ID that is not well formed.
  const bool poses = absl::StartsWithIgnoreCase(names.common_name, "spiffe:") || !names.uri.empty();
  return poses ? "" : WholeOrNobody(names.common_name);
}

std::string PeerIdentity(const grpc::ServerContextBase& context) {
  const auto certificate = context.auth_context();
  if (certificate == nullptr || !certificate->IsPeerAuthenticated()) return "";
  const auto value = [&](const char* name) {
    const auto found = certificate->FindPropertyValues(name);
    return found.empty() ? "" : std::string(found[0].data(), found[0].size());
  };
  return IdentityOf({.spiffe_id = value(GRPC_PEER_SPIFFE_ID_PROPERTY_NAME),
                     .uri = value(GRPC_PEER_URI_PROPERTY_NAME),
                     .common_name = value(GRPC_X509_CN_PROPERTY_NAME)});
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
