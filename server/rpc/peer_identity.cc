#include "server/rpc/peer_identity.h"

#include <grpc/grpc_security_constants.h>

#include "server/base/utf8.h"

namespace ballast {

std::string PeerIdentity(const grpc::ServerContextBase& context) {
  constexpr size_t kMostBytes = 255;
  const auto certificate = context.auth_context();
  if (certificate == nullptr || !certificate->IsPeerAuthenticated()) return "";
  for (const char* name : {GRPC_PEER_SPIFFE_ID_PROPERTY_NAME, GRPC_X509_CN_PROPERTY_NAME}) {
    const auto found = certificate->FindPropertyValues(name);
    if (!found.empty()) return ValidUtf8(std::string(found[0].data(), found[0].size()), kMostBytes);
  }
  return "";
}

}  // namespace ballast
