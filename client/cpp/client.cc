#include "client/cpp/client.h"

#include <utility>

#include "absl/strings/str_split.h"

#include "client/cpp/daemon_client.h"
#include "client/cpp/parts/parts_client.h"

namespace ballast {

absl::StatusOr<std::unique_ptr<Client>> Client::Connect(ClientOptions options) {
  std::vector<std::string> servers = absl::StrSplit(options.server, ',');
  if (servers.size() > 1) return PartsClient::Connect(std::move(options), servers);
  return DaemonClient::Connect(std::move(options));
}

}  // namespace ballast
