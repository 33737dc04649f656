#include <unistd.h>

#include "absl/strings/str_cat.h"

#include "client/cpp/transport/shm_transport.h"
#include "tests/server/rpc/rpc_fixture.h"

namespace ballast::testing {
namespace {

// The socket of the server started last.
std::string SocketPath() { return absl::StrCat(::testing::TempDir(), "ballast-rpc-", getpid(), ".sock"); }

}  // namespace

absl::StatusOr<std::unique_ptr<Server>> StartOnTestDevice(const Config& config, Metrics* metrics) {
  Config with_socket = config;
  with_socket.shm_socket = SocketPath();
  return Server::Start(with_socket, metrics, "");
}

absl::StatusOr<std::unique_ptr<Transport>> OpenTestTransport(const std::string& token) {
  if (token.size() != ShmHello().token.size()) return std::unique_ptr<Transport>();  // none that a daemon gives
  auto transport = ShmTransport::Open(SocketPath(), token);
  if (!transport.ok()) return transport.status();
  return std::unique_ptr<Transport>(*std::move(transport));
}

}  // namespace ballast::testing
