#include "server/rpc/peer_identity.h"

#include <grpc/grpc_security_constants.h>

#include "absl/strings/match.h"

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

}  // namespace ballast
