#include "tests/server/rpc/rpc_fixture.h"

namespace ballast::testing {

absl::StatusOr<std::unique_ptr<Server>> StartOnTestDevice(const Config& config, Metrics* metrics) {
  return Server::Start(config, metrics, "");
}

absl::StatusOr<std::unique_ptr<Transport>> OpenTestTransport(const std::string&) {
  return std::unique_ptr<Transport>();
}

}  // namespace ballast::testing
