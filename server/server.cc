#include "server/server.h"

#include <grpcpp/ext/proto_server_reflection_plugin.h>
#include <grpcpp/grpcpp.h>
#include <grpcpp/health_check_service_interface.h>
#include <grpcpp/impl/server_builder_option.h>

#include <atomic>
#include <chrono>
#include <utility>

#include "absl/strings/numbers.h"
#include "absl/strings/str_cat.h"
#include "absl/strings/strip.h"

#include "server/admin_service.h"
#include "server/cpu_device.h"
#include "server/device_check.h"
#include "server/gpu_device.h"
#include "server/gpus.h"
#include "server/log.h"
#include "server/status_macros.h"
#include "server/trainer_service.h"

namespace ballast {
namespace {

// A strand or a device that has been at one task for longer than this hangs: the largest task, one tensor's update,
// takes some seconds at 100 million elements a second.
constexpr double kStuckS = 120;

// The reflection library adds itself to every server of the process; this keeps or removes it for one.
class ReflectionOption final : public grpc::ServerBuilderOption {
 public:
  explicit ReflectionOption(bool enabled) : enabled_(enabled) {}
  void UpdateArguments(grpc::ChannelArguments*) override {}
  void UpdatePlugins(std::vector<std::unique_ptr<grpc::ServerBuilderPlugin>>* plugins) override {
    std::erase_if(*plugins, [](const auto& plugin) { return plugin->name() == "proto_server_reflection"; });
    if (enabled_) plugins->push_back(std::make_unique<grpc::reflection::ProtoServerReflectionPlugin>());
  }

 private:
  const bool enabled_;
};

std::unique_ptr<Device> OnCpu(const Config& config, std::string remark) {
  return std::make_unique<CpuDevice>(CpuDevice::Options{.threads = config.threads, .remark = std::move(remark)});
}

// A GPU that gives the CPU's bits. Its failures are its user's only from then on.
absl::StatusOr<std::unique_ptr<Device>> CheckedGpu(int number, Server::OnDeviceFailure on_failure) {
  ASSIGN_OR_RETURN(std::unique_ptr<Gpu> gpu, OpenGpu(number));
  const auto checked = std::make_shared<std::atomic<bool>>(false);
  auto device = std::make_unique<GpuDevice>(std::move(gpu),
                                            [checked, on_failure = std::move(on_failure)](const absl::Status& why) {
                                              if (*checked) on_failure(why);
                                            });
  RETURN_IF_ERROR(CheckDevice(device.get()));
  *checked = true;
  return device;
}

// auto: the first GPU, or the CPU with the reason.
absl::StatusOr<std::unique_ptr<Device>> MakeDevice(const Config& config, Server::OnDeviceFailure on_failure) {
  if (config.device == "cpu") return OnCpu(config, "");
  int number = 0;
  absl::string_view name = config.device;
  const bool named = absl::ConsumePrefix(&name, "cuda:") && absl::SimpleAtoi(name, &number);
  absl::StatusOr<std::unique_ptr<Device>> gpu = CheckedGpu(number, std::move(on_failure));
  if (gpu.ok()) return gpu;
  if (!named) return OnCpu(config, std::string(gpu.status().message()));
  return absl::FailedPreconditionError(
      absl::StrCat("device is '", config.device, "', but ", gpu.status().message(), "; set device to cpu or auto"));
}

class GrpcServer final : public Server {
 public:
  GrpcServer(const Config& config, Metrics* metrics, std::unique_ptr<Device> device, uint64_t memory_limit_bytes,
             std::string ops_address)
      : metrics_(metrics),
        device_(std::move(device)),
        runs_({.device = device_.get(),
               .metrics = metrics,
               .sessions = &sessions_,
               .memory_limit_bytes = memory_limit_bytes,
               .max_runs = config.max_runs}),
        trainer_({&runs_, &sessions_, metrics}, config.limits),
        admin_({.environment = {&runs_, &sessions_, metrics},
                .device = device_.get(),
                .limits = config.limits,
                .ops_address = std::move(ops_address)}) {}
  ~GrpcServer() override { Stop(); }

  absl::Status Listen(const Config& config);

  std::string address() const override { return address_; }
  std::string device() const override { return device_->description(); }
  uint64_t memory_limit_bytes() const override { return runs_.memory_limit_bytes(); }
  bool ready() const override { return !stopped_ && !runs_.draining(); }
  bool live() const override { return runs_.busy_s() < kStuckS && device_->busy_s() < kStuckS; }
  int Drain(double timeout_s) override;

 private:
  void Stop();

  Metrics* const metrics_;
  const std::unique_ptr<Device> device_;
  Sessions sessions_;
  Runs runs_;
  TrainerService trainer_;
  AdminService admin_;
  std::string address_;
  std::atomic<bool> stopped_ = false;
  std::unique_ptr<grpc::Server> server_;
};

void SetArguments(const Config& config, grpc::ServerBuilder* builder) {
  // A message that is larger is refused by gRPC before it is in memory.
  builder->SetMaxReceiveMessageSize(static_cast<int>(config.limits.message_bytes));
  builder->SetMaxSendMessageSize(-1);
  // A port in use is an error instead of a share of its connections.
  builder->AddChannelArgument(GRPC_ARG_ALLOW_REUSEPORT, 0);
  // A peer whose machine is gone sends no FIN: pings notice within 8 s, less than a lease. Only while a call is open:
  // an idle client of gRPC looks at its socket every 5 s and would be cut off for answering late.
  builder->AddChannelArgument(GRPC_ARG_KEEPALIVE_TIME_MS, 5000);
  builder->AddChannelArgument(GRPC_ARG_KEEPALIVE_TIMEOUT_MS, 3000);
  builder->AddChannelArgument(GRPC_ARG_KEEPALIVE_PERMIT_WITHOUT_CALLS, 0);
  builder->AddChannelArgument(GRPC_ARG_HTTP2_MAX_PINGS_WITHOUT_DATA, 0);
  builder->AddChannelArgument(GRPC_ARG_HTTP2_MIN_RECV_PING_INTERVAL_WITHOUT_DATA_MS, 1000);
  builder->AddChannelArgument(GRPC_ARG_MAX_CONCURRENT_STREAMS, 64);
  builder->AddChannelArgument(GRPC_ARG_MAX_METADATA_SIZE, 16 << 10);
}

absl::Status GrpcServer::Listen(const Config& config) {
  grpc::EnableDefaultHealthCheckService(true);
  grpc::ServerBuilder builder;
  SetArguments(config, &builder);
  builder.SetOption(std::make_unique<ReflectionOption>(config.reflection));
  int port = 0;
  builder.AddListeningPort(config.listen, grpc::InsecureServerCredentials(), &port);
  builder.RegisterService(&trainer_);
  builder.RegisterService(&admin_);
  server_ = builder.BuildAndStart();
  if (server_ == nullptr || port == 0) {
    return absl::UnavailableError(absl::StrCat("cannot listen on ", config.listen,
                                               ": the address is in use or not this machine's; choose another with "
                                               "listen (port 0 picks a free one), or stop what holds it"));
  }
  server_->GetHealthCheckService()->SetServingStatus("ballast.v1.TrainerService", true);
  const size_t colon = config.listen.rfind(':');
  const bool local = absl::StartsWith(config.listen, "unix:") || absl::StartsWith(config.listen, "unix-abstract:");
  address_ = local ? config.listen : absl::StrCat(config.listen.substr(0, colon), ":", port);
  metrics_->SetState("serving");
  return absl::OkStatus();
}

int GrpcServer::Drain(double timeout_s) {
  metrics_->SetState("draining");
  if (server_ != nullptr) server_->GetHealthCheckService()->SetServingStatus(false);
  const int open = runs_.Drain(timeout_s);
  Stop();
  return open;
}

void GrpcServer::Stop() {
  if (stopped_.exchange(true)) return;
  runs_.End(absl::UnavailableError("the daemon is shutting down"));
  if (server_ == nullptr) return;
  // What is left are calls whose status is on its way; the deadline is for peers that do not read.
  server_->Shutdown(std::chrono::system_clock::now() + std::chrono::seconds(1));
  server_->Wait();
}

uint64_t MemoryLimit(const Config& config, const Device& device) {
  return config.memory_limit != 0 ? config.memory_limit : device.memory_bytes() / 5 * 4;
}

}  // namespace

absl::StatusOr<std::unique_ptr<Server>> Server::Start(const Config& config, Metrics* metrics, std::string ops_address,
                                                      OnDeviceFailure on_device_failure) {
  ASSIGN_OR_RETURN(std::unique_ptr<Device> device, MakeDevice(config, std::move(on_device_failure)));
  return StartOn(std::move(device), config, metrics, std::move(ops_address));
}

absl::StatusOr<std::unique_ptr<Server>> Server::StartOn(std::unique_ptr<Device> device, const Config& config,
                                                        Metrics* metrics, std::string ops_address) {
  const uint64_t limit = MemoryLimit(config, *device);
  auto server = std::make_unique<GrpcServer>(config, metrics, std::move(device), limit, std::move(ops_address));
  RETURN_IF_ERROR(server->Listen(config));
  return server;
}

}  // namespace ballast
