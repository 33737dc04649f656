#include "server/server.h"

#include <grpcpp/ext/proto_server_reflection_plugin.h>
#include <grpcpp/grpcpp.h>
#include <grpcpp/health_check_service_interface.h>
#include <grpcpp/impl/server_builder_option.h>
#include <unistd.h>

#include <algorithm>
#include <atomic>
#include <chrono>
#include <random>
#include <utility>
#include <vector>

#include "absl/strings/str_cat.h"
#include "proto/unix_address.h"

#include "server/access/access_control.h"
#include "server/base/descriptors.h"
#include "server/base/log.h"
#include "server/base/status_macros.h"
#include "server/convert/checkpoint_json.h"
#include "server/convert/create_request.h"
#include "server/convert/daemon_status.h"
#include "server/device/device_pool.h"
#include "server/named_files.h"
#include "server/ops/ops_api.h"
#include "server/relay/relays.h"
#include "server/rpc/admin_service.h"
#include "server/rpc/connection_table.h"
#include "server/rpc/follow_service.h"
#include "server/rpc/self_check.h"
#include "server/rpc/tcp_listener.h"
#include "server/rpc/tls_credentials.h"
#include "server/rpc/trainer_service.h"
#include "server/rpc/unix_port.h"
#include "server/shm/shm_listener.h"
#include "server/storage/storage.h"

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

// gRPC asks for a context as soon as it has read a call's headers.
class CountingAllocator final : public grpc::ContextAllocator {
 public:
  explicit CountingAllocator(ConnectionTable* table) : table_(table) {}
  grpc::CallbackServerContext* NewCallbackServerContext() override {
    table_->OnCall();
    return new grpc::CallbackServerContext;
  }
  // Called for a method that does not exist.
  grpc::GenericCallbackServerContext* NewGenericCallbackServerContext() override {
    table_->OnCall();
    return new grpc::GenericCallbackServerContext;
  }
  void Release(grpc::CallbackServerContext* context) override {
    delete context;
    table_->OnCallOver();
  }
  void Release(grpc::GenericCallbackServerContext* context) override {
    delete context;
    table_->OnCallOver();
  }

 private:
  ConnectionTable* const table_;
};

Quota UsualQuota(const Config::Limits& limits) {
  return {.runs = limits.caller_runs,
          .bytes = limits.caller_bytes,
          .streams = limits.caller_streams,
          .requests = limits.caller_requests};
}

class GrpcServer final : public Server {
 public:
  GrpcServer(std::vector<std::unique_ptr<Device>> devices, const Config& config, Metrics* metrics,
             std::string ops_address, std::unique_ptr<Storage> storage, std::unique_ptr<AccessControl> access,
             OnLastFailure on_last_failure)
      : metrics_(metrics),
        storage_(std::move(storage)),
        access_(std::move(access)),
        usual_quota_(UsualQuota(config.limits)),
        quotas_(config.limits.caller_failures, metrics),
        devices_(std::move(devices), config.memory_limit),
        runs_({.devices = &devices_,
               .metrics = metrics,
               .sessions = &sessions_,
               .quotas = &quotas_,
               .max_runs = config.max_runs,
               .tells_of_all = access_ == nullptr,
               .idle_run_timeout_s = config.idle_run_timeout_s,
               .on_last_failure = std::move(on_last_failure),
               .storage = storage_.get(),
               .codec = &JsonCheckpoints(),
               .read_spec = [limits = config.limits](
                                const std::string& json, const std::string& sha256,
                                const std::string& file) { return ToCreateRequest(json, sha256, file, limits); }}),
        relays_(config.relay.on() ? std::make_unique<Relays>(config, &devices_, metrics) : nullptr),
        message_bytes_(config.limits.message_bytes),
        open_timeout_s_(config.limits.open_timeout_s),
        trainer_(environment(), config.limits),
        status_(&devices_, &runs_, relays_.get(), std::move(ops_address), config.ops_http.tls),
        admin_(environment(), config.limits, &status_),
        follow_(environment()) {
    if (storage_ == nullptr) return;
    storage_->command()->Tell(
        [this](const std::string& run_id, std::string_view result) { runs_.OnCopied(run_id, result); });
  }
  ~GrpcServer() override { Stop(); }

  absl::Status Listen(const Config& config, const CertificateKeeper* certificates);

  std::string address() const override { return address_; }
  std::string device() const override { return devices_.description(); }
  uint64_t memory_limit_bytes() const override { return devices_.limit_bytes(); }
  bool ready() const override { return !stopped_ && !runs_.draining(); }
  absl::Status live() const override;
  OpsResponse AnswerApi(const std::string& path, const std::string& query) override { return api_.Answer(path, query); }
  int Drain(double timeout_s) override;
  bool wrote_all() const override { return runs_.wrote_all(); }

 private:
  void Stop();
  absl::Status AddPort(const Config& config, const CertificateKeeper* certificates, grpc::ServerBuilder* builder);
  void Accept(bool tls);
  RpcEnvironment environment() {
    return {&devices_,       &runs_,       &sessions_,    metrics_,        &shm_socket_, message_bytes_,
            open_timeout_s_, &requests_,   &connections_, &disk_requests_, &imports_,    access_.get(),
            &quotas_,        usual_quota_, relays_.get(), &nccl_};
  }
  absl::Status OfferSharedMemory(const std::string& where);

  Metrics* const metrics_;
  const std::unique_ptr<Storage> storage_;       // none: runs are in memory alone
  const std::unique_ptr<AccessControl> access_;  // none: all may do everything
  const Quota usual_quota_;
  Quotas quotas_;
  DevicePool devices_;
  NcclOffer nccl_{&devices_};
  Sessions sessions_;
  RunRegistry runs_;
  const std::unique_ptr<Relays> relays_;  // none: runs train here
  RequestQueue requests_, disk_requests_{"disk requests"}, imports_{"imports"};
  ConnectionTable connections_;
  const uint32_t message_bytes_;
  const double open_timeout_s_;
  TrainerService trainer_;
  DaemonStatus status_;
  AdminService admin_;
  FollowService follow_;
  OpsApi api_{&status_};
  std::string address_;
  std::string shm_socket_;  // set before the first call; empty: no shared memory
  std::atomic<bool> stopped_ = false;
  std::unique_ptr<ShmListener> shm_;
  std::unique_ptr<grpc::Server> server_;
  std::unique_ptr<grpc::experimental::ExternalConnectionAcceptor> acceptor_;
  std::unique_ptr<TcpListener> listener_;  // none: a Unix socket, at which gRPC itself accepts
  std::unique_ptr<SelfCheck> self_check_;
};

void SetArguments(const Config& config, grpc::ServerBuilder* builder) {
  // gRPC refuses a larger message before it is in memory.
  builder->SetMaxReceiveMessageSize(static_cast<int>(std::max(config.limits.message_bytes, config.limits.spec_bytes)));
  builder->SetMaxSendMessageSize(-1);
  // A peer whose machine is gone sends no FIN: pings notice within 8 s, less than a lease. Only while a call is open:
  // an idle client of gRPC looks at its socket every 5 s and would be cut off for answering late.
  builder->AddChannelArgument(GRPC_ARG_KEEPALIVE_TIME_MS, 5000);
  builder->AddChannelArgument(GRPC_ARG_KEEPALIVE_TIMEOUT_MS, 3000);
  builder->AddChannelArgument(GRPC_ARG_KEEPALIVE_PERMIT_WITHOUT_CALLS, 0);
  builder->AddChannelArgument(GRPC_ARG_HTTP2_MAX_PINGS_WITHOUT_DATA, 0);
  builder->AddChannelArgument(GRPC_ARG_HTTP2_MIN_RECV_PING_INTERVAL_WITHOUT_DATA_MS, 1000);
  builder->AddChannelArgument(GRPC_ARG_MAX_CONCURRENT_STREAMS, 64);
  builder->AddChannelArgument(GRPC_ARG_MAX_METADATA_SIZE, 16 << 10);
  // Clients connect anew with their next call, and take no notice.
  if (config.limits.idle_timeout_s > 0) {
    builder->AddChannelArgument(GRPC_ARG_MAX_CONNECTION_IDLE_MS, static_cast<int>(config.limits.idle_timeout_s * 1000));
  }
  // A connection that has not said that it speaks HTTP/2 is closed.
  builder->AddChannelArgument(GRPC_ARG_SERVER_HANDSHAKE_TIMEOUT_MS,
                              static_cast<int>(config.limits.handshake_timeout_s * 1000));
}

absl::Status GrpcServer::Listen(const Config& config, const CertificateKeeper* certificates) {
  if (storage_ != nullptr) {
    metrics_->SetState("restoring");
    runs_.RestoreAll();
  }
  if (relays_ == nullptr) RETURN_IF_ERROR(OfferSharedMemory(config.shm_socket));
  if (config.nccl) RETURN_IF_ERROR(nccl_.Load());
  grpc::EnableDefaultHealthCheckService(true);
  grpc::ServerBuilder builder;
  SetArguments(config, &builder);
  builder.SetOption(std::make_unique<ReflectionOption>(config.reflection));
  RETURN_IF_ERROR(AddPort(config, certificates, &builder));
  ASSIGN_OR_RETURN(const uint32_t connections, MostConnections(config.limits.connections, MostDescriptors()));
  builder.RegisterService(&trainer_);
  builder.RegisterService(&admin_);
  builder.RegisterService(&follow_);
  builder.SetContextAllocator(std::make_unique<CountingAllocator>(&connections_));
  server_ = builder.BuildAndStart();
  if (server_ == nullptr) return absl::UnavailableError(absl::StrCat("cannot listen on ", config.listen));
  connections_.Limit(connections);
  if (listener_ != nullptr) Accept(config.tls.on());
  server_->GetHealthCheckService()->SetServingStatus("ballast.v1.TrainerService", true);
  metrics_->SetState("serving");
  return absl::OkStatus();
}

absl::Status GrpcServer::AddPort(const Config& config, const CertificateKeeper* certificates,
                                 grpc::ServerBuilder* builder) {
  if (config.tls.on() != (certificates != nullptr)) return absl::InternalError("tls without certificates");
  address_ = config.listen;
  if (IsUnixAddress(config.listen)) {
    RETURN_IF_ERROR(ReadyUnixPort(config.listen));
    builder->AddListeningPort(ForGrpc(config.listen), grpc::InsecureServerCredentials());
    return absl::OkStatus();
  }
  ASSIGN_OR_RETURN(listener_, TcpListener::Bind(config.listen));
  address_ = absl::StrCat(config.listen.substr(0, config.listen.rfind(':')), ":", listener_->port());
  using Acceptor = grpc::ServerBuilder::experimental_type::ExternalConnectionType;
  acceptor_ = builder->experimental().AddExternalConnectionAcceptor(
      Acceptor::FROM_FD, config.tls.on() ? TlsCredentialsOf(certificates, config.tls.requires_clients())
                                         : grpc::InsecureServerCredentials());
  return absl::OkStatus();
}

void GrpcServer::Accept(bool tls) {
  listener_->Serve(&connections_, metrics_, tls, [this](int listener_fd, int fd) {
    grpc::experimental::ExternalConnectionAcceptor::NewConnectionParameters connection;
    connection.listener_fd = listener_fd;
    connection.fd = fd;
    acceptor_->HandleNewConnection(&connection);
  });
  self_check_ = std::make_unique<SelfCheck>(listener_->dial_address(), tls);
}

absl::Status GrpcServer::live() const {
  const double relayed_s = relays_ == nullptr ? 0 : relays_->busy_s();
  if (std::max({runs_.busy_s(), devices_.busy_s(), relayed_s}) >= kStuckS) {
    return absl::UnavailableError("a run or the device does not answer");
  }
  return self_check_ == nullptr || stopped_ ? absl::OkStatus() : self_check_->status();
}

// Without the socket trainers use gRPC. It is an error only if the operator has chosen the socket's path.
absl::Status GrpcServer::OfferSharedMemory(const std::string& where) {
  if (where.empty() || where == "off") return absl::OkStatus();
  // Process numbers are not unique where containers share the folder.
  const std::string name = absl::StrCat(getpid(), "-", absl::Hex(std::random_device{}()));
  auto listener = ShmListener::Start(environment(), where, name);
  if (!listener.ok()) {
    const std::string why = absl::StrCat("no shared memory for trainers: ", listener.status().message());
    if (where.back() != '/') return absl::UnavailableError(absl::StrCat(why, "; choose another shm_socket, or off"));
    Log(LogLevel::kWarn, "transport", "trainers of this host use gRPC", {{"err", why}});
    return absl::OkStatus();
  }
  shm_ = *std::move(listener);
  shm_socket_ = shm_->path();
  return absl::OkStatus();
}

int GrpcServer::Drain(double timeout_s) {
  metrics_->SetState("draining");
  if (server_ != nullptr) server_->GetHealthCheckService()->SetServingStatus(false);
  const int open = runs_.Drain(timeout_s);
  // The checkpoints of the drain are the ones to have elsewhere when the machine is to go.
  if (storage_ != nullptr) storage_->command()->Stop(timeout_s);
  Stop();
  return open;
}

void GrpcServer::Stop() {
  if (stopped_.exchange(true)) return;
  if (storage_ != nullptr) storage_->command()->Stop(0);
  const absl::Status why = absl::UnavailableError("the daemon is shutting down");
  runs_.End(why);
  if (relays_ != nullptr) relays_->Stop(why);
  shm_.reset();
  if (self_check_ != nullptr) self_check_->Stop();
  listener_.reset();
  if (server_ == nullptr) return;
  // The calls that are left only have to send their status; the deadline is for peers that do not read.
  server_->Shutdown(std::chrono::system_clock::now() + std::chrono::seconds(1));
  server_->Wait();
}

}  // namespace

absl::StatusOr<std::unique_ptr<Server>> Server::Start(const Config& config, Metrics* metrics, std::string ops_address,
                                                      OnLastFailure on_last_failure,
                                                      const CertificateKeeper* certificates) {
  Config opened = config;
  if (config.relay.on()) opened.device = "cpu";  // which computes nothing
  ASSIGN_OR_RETURN(std::vector<std::unique_ptr<Device>> devices, OpenDevices(opened));
  return StartOn(std::move(devices), config, metrics, std::move(ops_address), std::move(on_last_failure), certificates);
}

absl::StatusOr<std::unique_ptr<Server>> Server::StartOn(std::vector<std::unique_ptr<Device>> devices,
                                                        const Config& config, Metrics* metrics, std::string ops_address,
                                                        OnLastFailure on_last_failure,
                                                        const CertificateKeeper* certificates) {
  std::unique_ptr<AccessControl> access;
  if (!config.access.empty()) {
    auto opened = AccessControl::Open(config.access, UsualQuota(config.limits), metrics);
    if (!opened.ok()) return absl::Status(opened.status().code(), absl::StrCat("access: ", opened.status().message()));
    access = *std::move(opened);
  }
  std::unique_ptr<Storage> storage;
  RETURN_IF_ERROR(CheckStorageNames(config.storage));
  if (config.storage.on()) {
    auto opened = Storage::Open(
        {.fs = SystemFs(),
         .dir = config.storage.dir,
         .threads = static_cast<int>(config.storage.threads),
         .bytes_per_s = config.storage.bytes_per_s,
         .on_published = {.command = config.storage.on_published, .timeout_s = config.storage.on_published_timeout_s},
         .import_dir = ImportDir(config.storage)});
    if (!opened.ok()) {
      return absl::Status(opened.status().code(), absl::StrCat("storage.dir: ", opened.status().message()));
    }
    storage = *std::move(opened);
  }
  auto server = std::make_unique<GrpcServer>(std::move(devices), config, metrics, std::move(ops_address),
                                             std::move(storage), std::move(access), std::move(on_last_failure));
  RETURN_IF_ERROR(server->Listen(config, certificates));
  return server;
}

}  // namespace ballast
