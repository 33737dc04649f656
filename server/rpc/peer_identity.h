// Who is at the other end of a call, as its certificate says. Thread-safe: functions without a state.
#pragma once

#include <grpcpp/server_context.h>

#include <string>

namespace ballast {

// The SPIFFE ID of the client's certificate; without one, its common name; empty: it showed none, or there is no TLS. Of
// certificates whose authority the daemon takes, so that it can be trusted; cut to 255 bytes of UTF-8.
std::string PeerIdentity(const grpc::ServerContextBase& context);

// The address of a peer as gRPC names it, "ipv4:10.0.0.7:1234": 10.0.0.7; of IPv6 the network, 2001:db8:0:1::/64, since a
// host may have all addresses of its network. Empty: it is at a Unix socket, or not known.
std::string PeerAddress(const std::string& peer);

}  // namespace ballast
