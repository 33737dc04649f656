#include "client/cpp/transport/transport_opener.h"

#include <utility>

#include "absl/algorithm/container.h"
#include "absl/strings/str_cat.h"

#include "client/cpp/transport/grpc_transport.h"
#include "client/cpp/transport/nccl_transport.h"

namespace ballast {
namespace {

// How long to wait for the socket's answer. At the beginning all ranks ask at once, and the daemon makes one rank's
// memory after another's, so the first wait is longer; when a rank resumes, others wait for it.
constexpr double kFirstPatienceS = 10, kPatienceS = 0.5;

}  // namespace

absl::StatusOr<std::shared_ptr<const Nccl>> TransportOpener::NcclOf(const AttachOptions& options) {
  if (options.transport != TransportChoice::kNccl) return nullptr;
  if (!options.gpu) {
    return absl::FailedPreconditionError(
        "the transport nccl is between GPUs: say which is the trainer's, in "
        "AttachOptions.gpu, or choose the transport auto");
  }
  return Nccl::Load();
}

std::unique_ptr<Transport> TransportOpener::OpenNccl(const v1::AttachResponse& grant) {
  if (nccl_ == nullptr || !no_nccl_->empty()) return nullptr;
  const auto on_none = [none = no_nccl_, &connection = connection_](const std::string& why, bool worked) {
    if (!worked) *none = why;
    connection.Log(absl::StrCat("no NCCL with the daemon at ", connection.server(), " (", why, "); ",
                                worked ? "it is connected anew" : "payloads go over shared memory or gRPC"));
  };
  if (absl::c_linear_search(grant.lanes(), "nccl")) {
    return std::make_unique<NcclTransport>(connection_,
                                           NcclTransport::Parts{.nccl = nccl_, .gpu = gpu_, .on_none = on_none});
  }
  on_none(grant.why_no_nccl().empty() ? "the daemon is older, and does not know it" : grant.why_no_nccl(),
          /*worked=*/false);
  return nullptr;
}

absl::StatusOr<std::unique_ptr<ShmTransport>> TransportOpener::OpenShm(const v1::AttachResponse& grant) {
  const double patience_s = std::exchange(asked_, true) ? kPatienceS : kFirstPatienceS;
  const std::string &path = grant.shm_socket(), &token = grant.session_token();
  std::string why_host;
  auto transport = ShmTransport::Open(path, token, patience_s, gpu_, &why_host);
  if (transport.ok() && !why_host.empty()) {
    Tell(absl::StrCat("no GPU memory is shared with the daemon at ", connection_.server(), " (", why_host,
                      "); using host memory"));
  }
  return transport;
}

void TransportOpener::Tell(std::string line) {
  if (told_ == line) return;
  connection_.Log(line);
  told_ = std::move(line);
}

absl::StatusOr<std::unique_ptr<Transport>> TransportOpener::Open(const v1::AttachResponse& grant) {
  if (auto transport = OpenNccl(grant)) return transport;
  const bool offered = !grant.shm_socket().empty();
  if (wish_ != TransportChoice::kGrpc && offered) {
    auto transport = OpenShm(grant);
    if (transport.ok()) return std::unique_ptr<Transport>(*std::move(transport));
    if (RetryAfter(transport.status())) return transport.status();
    const std::string why(transport.status().message());
    if (wish_ == TransportChoice::kShm) {
      return absl::UnavailableError(absl::StrCat("no shared memory with the daemon at ", connection_.server(), ": ",
                                                 why,
                                                 "; run both on one host as one user, or choose the transport auto"));
    }
    Tell(absl::StrCat("no shared memory with the daemon at ", connection_.server(), " (", why, "); using gRPC"));
  }
  if (wish_ == TransportChoice::kShm) {
    return absl::FailedPreconditionError(absl::StrCat("the daemon at ", connection_.server(),
                                                      " offers no shared memory; set its shm_socket, or choose the "
                                                      "transport auto"));
  }
  return std::unique_ptr<Transport>(std::make_unique<GrpcTransport>(connection_));
}

}  // namespace ballast
