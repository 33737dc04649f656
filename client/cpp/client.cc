#include "client/cpp/client.h"

#include <utility>

#include "absl/strings/match.h"

#include "client/cpp/daemon_client.h"
#include "client/cpp/own_client.h"
#include "client/cpp/parts/parts_client.h"
#include "client/cpp/parts/server_list.h"

namespace ballast {

namespace {

absl::StatusOr<std::unique_ptr<Client>> ConnectTo(ClientOptions options) {
  if (!absl::StrContains(options.server, ',')) return DaemonClient::Connect(std::move(options));
  auto servers = SplitServers(options.server);
  if (!servers.ok()) return servers.status();
  return PartsClient::Connect(std::move(options), *std::move(servers));
}

}  // namespace

absl::StatusOr<std::unique_ptr<Client>> Client::Connect(ClientOptions options) {
  auto client = ConnectTo(std::move(options));
  if (!client.ok()) return client.status();
  return std::make_unique<OwnClient>(*std::move(client));
}

}  // namespace ballast
