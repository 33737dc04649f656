// TLS of the client: its files, checked before they are used, and what is wrong where no connection comes about, which
// gRPC 1.51 does not tell. Thread-safe: functions without a state.
#pragma once

#include <grpcpp/security/credentials.h>

#include <memory>
#include <string>

#include "absl/status/status.h"
#include "absl/status/statusor.h"

#include "client/cpp/client.h"

namespace ballast {

// What a connection to `server` is made with. INVALID_ARGUMENT: the files do not go together, or with this server;
// FAILED_PRECONDITION names the file that is not right, and what to do. With TLS the files are looked at every few
// seconds, and those that are there then hold for the next connection, so that they may be rotated.
absl::StatusOr<std::shared_ptr<grpc::ChannelCredentials>> CredentialsFor(const std::string& server,
                                                                         const ClientTls& tls);

// Why no connection comes about, if the files or the handshake are to blame: one of both ends speaks TLS and the other
// does not, one does not take the other's certificate, or a file is not right. It says which, and what to do. Empty: it is
// something else. Connects to the server; takes some seconds at most.
std::string TlsAccount(const std::string& server, const ClientTls& tls);

}  // namespace ballast
