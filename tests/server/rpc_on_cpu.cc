#include "tests/server/rpc_fixture.h"

namespace ballast::testing {

absl::StatusOr<std::unique_ptr<Server>> StartOnTestDevice(const Config& config, Metrics* metrics) {
  return Server::Start(config, metrics, "");
}

}  // namespace ballast::testing
