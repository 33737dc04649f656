// Who is at the other end of a call, as its certificate says. Thread-safe: functions without a state.
#pragma once

#include <grpcpp/server_context.h>

#include <string>

namespace ballast {

// What a certificate says of whose it is; empty: nothing.
struct CertificateNames {
  std::string spiffe_id, uri, common_name;
};
// The SPIFFE ID; without one, the common name. Empty: it has neither, or one that is longer than 2048 bytes or no UTF-8.
std::string IdentityOf(const CertificateNames& names);
// That of the client's certificate; empty also: it showed none, or there is no TLS. Of certificates whose authority the
// daemon takes, so that it can be trusted.
std::string PeerIdentity(const grpc::ServerContextBase& context);

// The address of a peer as gRPC names it, "ipv4:10.0.0.7:1234": 10.0.0.7; of IPv6 the network, 2001:db8:0:1::/64, since a
// host may have all addresses of its network. Empty: it is at a Unix socket, or not known.
std::string PeerAddress(const std::string& peer);

}  // namespace ballast
