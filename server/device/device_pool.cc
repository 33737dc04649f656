#include "server/device/device_pool.h"

#include <algorithm>
#include <utility>

#include "absl/strings/str_cat.h"
#include "absl/strings/str_join.h"

#include "server/base/host.h"
#include "server/base/log.h"
#include "server/base/status_macros.h"
#include "server/config/config_check.h"
#include "server/device/cpu_device.h"
#include "server/device/device_check.h"
#include "server/device/gpu_device.h"
#include "server/device/gpu_discovery.h"

namespace ballast {
namespace {

std::unique_ptr<Device> OpenCpu(const Config& config, std::string remark) {
  return std::make_unique<CpuDevice>(CpuDevice::Options{.threads = config.threads, .remark = std::move(remark)});
}

absl::StatusOr<std::unique_ptr<Device>> OpenCheckedGpu(const Config& config, uint32_t number) {
  ASSIGN_OR_RETURN(std::unique_ptr<GpuDriver> gpu, OpenGpu(number));
  auto device = std::make_unique<GpuDevice>(std::move(gpu), config.threads);
  RETURN_IF_ERROR(CheckDevice(device.get()));
  return device;
}

// Opens all of them; an error is that of the first that cannot be used.
absl::StatusOr<std::vector<std::unique_ptr<Device>>> OpenGpus(const Config& config,
                                                              const std::vector<uint32_t>& numbers) {
  std::vector<std::unique_ptr<Device>> gpus;
  for (const uint32_t number : numbers) {
    ASSIGN_OR_RETURN(std::unique_ptr<Device> gpu, OpenCheckedGpu(config, number));
    gpus.push_back(std::move(gpu));
  }
  return gpus;
}

absl::StatusOr<std::vector<uint32_t>> AllGpus() {
  const GpuSurvey survey = SurveyGpus();
  if (survey.names.empty()) return survey.why_none;
  std::vector<uint32_t> numbers;
  for (uint32_t n = 0; n < survey.names.size(); ++n) numbers.push_back(n);
  return numbers;
}

absl::StatusOr<std::vector<std::unique_ptr<Device>>> OpenNamedGpus(const Config& config) {
  std::vector<uint32_t> numbers;
  if (config.device == kAllGpus) {
    ASSIGN_OR_RETURN(numbers, AllGpus());
  } else {
    numbers = GpuNumbers(config.device).value_or(std::vector<uint32_t>{});
  }
  return OpenGpus(config, numbers);
}

}  // namespace

std::unique_ptr<Device> GpuOrCpu(absl::StatusOr<std::unique_ptr<Device>> gpu, const Config& config) {
  if (gpu.ok()) return *std::move(gpu);
  const std::string why(gpu.status().message());
  if (!absl::IsNotFound(gpu.status())) {
    Log(LogLevel::kWarn, "gpu_unusable", "the GPU cannot be used; computing on the CPU", {{"err", why}});
  }
  return OpenCpu(config, why);
}

absl::StatusOr<std::vector<std::unique_ptr<Device>>> OpenDevices(const Config& config) {
  std::vector<std::unique_ptr<Device>> devices;
  if (config.device == "cpu") {
    devices.push_back(OpenCpu(config, ""));
    return devices;
  }
  if (config.device == "auto") {
    devices.push_back(GpuOrCpu(OpenCheckedGpu(config, 0), config));
    return devices;
  }
  auto gpus = OpenNamedGpus(config);
  if (gpus.ok()) return gpus;
  return absl::FailedPreconditionError(
      absl::StrCat("device is '", config.device, "': ", gpus.status().message(), "; set device to cpu or auto"));
}

uint64_t DevicePool::State::free_bytes() const {
  return failure.ok() ? limit_bytes - std::min(limit_bytes, reserved_bytes() + shared_bytes) : 0;
}

DevicePool::DevicePool(std::vector<std::unique_ptr<Device>> devices, uint64_t limit_bytes)
    : devices_(std::move(devices)) {
  for (const auto& device : devices_) {
    states_.push_back({.label = device->label(),
                       .description = device->description(),
                       .limit_bytes = limit_bytes != 0 ? limit_bytes : device->memory_bytes() / 5 * 4,
                       .on_host = device->on_host()});
  }
}

std::vector<DevicePool::State> DevicePool::Read() const {
  absl::MutexLock lock(&mu_);
  std::vector<State> states = states_;
  for (size_t i = 0; i < states.size(); ++i) states[i].shared_bytes = devices_[i]->shared_bytes();
  return states;
}

std::vector<uint64_t> DevicePool::FreeBytes() const {
  std::vector<uint64_t> free;
  for (const State& state : Read()) free.push_back(state.free_bytes());
  return free;
}

uint64_t DevicePool::limit_bytes() const {
  uint64_t bytes = 0;
  for (const State& state : Read()) bytes += state.failure.ok() ? state.limit_bytes : 0;
  return bytes;
}

uint64_t DevicePool::reserved_bytes() const {
  uint64_t bytes = 0;
  for (const State& state : Read()) bytes += state.failure.ok() ? state.reserved_bytes() : 0;
  return bytes;
}

std::optional<uint64_t> DevicePool::host_limit_bytes() const {
  return devices_[0]->on_host() ? std::nullopt : std::optional<uint64_t>(MachineMemoryBytes() / 5 * 4);
}

std::optional<uint64_t> DevicePool::host_free_bytes() const {
  const std::optional<uint64_t> limit = host_limit_bytes();
  if (!limit) return std::nullopt;
  uint64_t reserved = 0;
  for (const State& state : Read()) reserved += state.reserved.beside_device();
  return *limit - std::min(*limit, reserved);
}

uint64_t DevicePool::free_bytes() const {
  uint64_t bytes = 0;
  for (const State& state : Read()) bytes += state.free_bytes();
  return bytes;
}

std::vector<Device*> DevicePool::Of(const Placement& placement) const {
  std::vector<Device*> devices;
  for (const size_t d : placement.devices) devices.push_back(at(d));
  return devices;
}

double DevicePool::busy_s() const {
  double most = 0;
  for (const auto& device : devices_) most = std::max(most, device->busy_s());
  return most;
}

std::string DevicePool::description() const {
  return absl::StrJoin(Read(), "; ", [](std::string* out, const State& state) {
    absl::StrAppend(out, state.description);
    if (!state.failure.ok()) absl::StrAppend(out, " (failed: ", state.failure.message(), ")");
  });
}

template <typename Change>
void DevicePool::ForShards(const Plan& plan, Change change) {
  absl::MutexLock lock(&mu_);
  for (size_t s = 0; s < plan.shards.size(); ++s) {
    change(&states_[plan.placement.devices[s]].reserved, plan.shards[s].bytes);
  }
}

void DevicePool::Reserve(const Plan& plan) {
  ForShards(plan, [](PlanBytes* reserved, const PlanBytes& bytes) { *reserved += bytes; });
}

void DevicePool::Release(const Plan& plan) {
  ForShards(plan, [](PlanBytes* reserved, const PlanBytes& bytes) { *reserved -= bytes; });
}

bool DevicePool::Fail(size_t device, const absl::Status& why) {
  absl::MutexLock lock(&mu_);
  states_[device].failure = why;
  return std::any_of(states_.begin(), states_.end(), [](const State& state) { return state.failure.ok(); });
}

}  // namespace ballast
