// TLS of the gRPC port, with the certificates that a CertificateKeeper has at that moment: gRPC asks at each handshake, so
// that a pair that is rotated holds for the next connection, and those that are there go on. All that the daemon uses of
// gRPC's own interface for that is here.
#pragma once

#include <grpcpp/security/server_credentials.h>

#include <memory>

#include "server/tls/certificate_keeper.h"

namespace ballast {

// keeper: outlives the server that has the credentials. require_clients: a client without a certificate of the keeper's
// authorities is turned away; else none is asked for. Handshakes begin on the thread that hands connections to gRPC, and
// must begin on one thread alone: gRPC 1.51 takes a new pair in without a lock against others.
std::shared_ptr<grpc::ServerCredentials> TlsCredentialsOf(const CertificateKeeper* keeper, bool require_clients);

}  // namespace ballast
