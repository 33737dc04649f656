// Every test of the wire once more, on a GPU of host memory and threads.
#include "server/device/gpu_device.h"
#include "tests/server/device/fake_gpu.h"
#include "tests/server/rpc/rpc_fixture.h"

namespace ballast::testing {

absl::StatusOr<std::unique_ptr<Server>> StartOnTestDevice(const Config& config, Metrics* metrics) {
  static FakeGpuState state;  // of all servers: they outlive no test
  std::vector<std::unique_ptr<Device>> devices;
  devices.push_back(std::make_unique<GpuDevice>(std::make_unique<FakeGpu>(&state), 2));
  return Server::StartOn(std::move(devices), config, metrics, "",
                         [](const absl::Status& why) { ADD_FAILURE() << why; });
}

absl::StatusOr<std::unique_ptr<Transport>> OpenTestTransport(const std::string&) {
  return std::unique_ptr<Transport>();
}

}  // namespace ballast::testing
