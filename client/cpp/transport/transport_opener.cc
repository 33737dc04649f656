#include "client/cpp/transport/transport_opener.h"

#include <utility>

#include "absl/strings/str_cat.h"

#include "client/cpp/transport/grpc_transport.h"
#include "client/cpp/transport/shm_transport.h"

namespace ballast {
namespace {

// How long to wait for the socket's answer. At the beginning all ranks ask at once, and the daemon makes one rank's
// memory after another's, so the first wait is longer; when a rank resumes, others wait for it.
constexpr double kFirstPatienceS = 10, kPatienceS = 0.5;

}  // namespace

absl::StatusOr<std::unique_ptr<Transport>> TransportOpener::Open(const v1::AttachResponse& grant) {
  const bool offered = !grant.shm_socket().empty();
  if (wish_ != TransportChoice::kGrpc && offered) {
    const double patience_s = std::exchange(asked_, true) ? kPatienceS : kFirstPatienceS;
    auto transport = ShmTransport::Open(grant.shm_socket(), grant.session_token(), patience_s);
    if (transport.ok()) return std::unique_ptr<Transport>(*std::move(transport));
    const std::string why(transport.status().message());
    if (wish_ == TransportChoice::kShm) {
      return absl::UnavailableError(absl::StrCat("no shared memory with the daemon at ", connection_.server(), ": ",
                                                 why,
                                                 "; run both on one host as one user, or choose the transport auto"));
    }
    if (std::exchange(told_, why) != why) {
      connection_.Log(
          absl::StrCat("no shared memory with the daemon at ", connection_.server(), " (", why, "); using gRPC"));
    }
  }
  if (wish_ == TransportChoice::kShm) {
    return absl::FailedPreconditionError(absl::StrCat("the daemon at ", connection_.server(),
                                                      " offers no shared memory; set its shm_socket, or choose the "
                                                      "transport auto"));
  }
  return std::unique_ptr<Transport>(std::make_unique<GrpcTransport>(connection_));
}

}  // namespace ballast
