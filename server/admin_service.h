// The operator's calls. Thread-safe; nothing here waits for a step.
#pragma once

#include <grpcpp/grpcpp.h>

#include <string>

#include "ballast/v1/admin.grpc.pb.h"
#include "server/clock.h"
#include "server/config.h"
#include "server/devices.h"
#include "server/rpc.h"

namespace ballast {

class AdminService final : public v1::AdminService::CallbackService {
 public:
  struct Options {
    RpcEnvironment environment;
    Config::Limits limits;
    std::string ops_address;
  };
  explicit AdminService(Options options) : options_(std::move(options)) {}

  // What the reading calls answer.
  v1::GetServerResponse DescribeServer() const;
  v1::ListRunsResponse DescribeRuns() const;
  absl::StatusOr<v1::GetRunResponse> DescribeRun(const std::string& run_id) const;
  absl::StatusOr<v1::GetHistoryResponse> DescribeHistory(const v1::GetHistoryRequest& request) const;

  grpc::ServerUnaryReactor* GetServer(grpc::CallbackServerContext* context, const v1::GetServerRequest* request,
                                      v1::GetServerResponse* response) override;
  grpc::ServerUnaryReactor* ListRuns(grpc::CallbackServerContext* context, const v1::ListRunsRequest* request,
                                     v1::ListRunsResponse* response) override;
  grpc::ServerUnaryReactor* GetRun(grpc::CallbackServerContext* context, const v1::GetRunRequest* request,
                                   v1::GetRunResponse* response) override;
  grpc::ServerUnaryReactor* DeleteRun(grpc::CallbackServerContext* context, const v1::DeleteRunRequest* request,
                                      v1::DeleteRunResponse* response) override;
  grpc::ServerUnaryReactor* Plan(grpc::CallbackServerContext* context, const v1::PlanRequest* request,
                                 v1::PlanResponse* response) override;
  grpc::ServerUnaryReactor* Rewind(grpc::CallbackServerContext* context, const v1::RewindRequest* request,
                                   v1::RewindResponse* response) override;
  grpc::ServerUnaryReactor* GetHistory(grpc::CallbackServerContext* context, const v1::GetHistoryRequest* request,
                                       v1::GetHistoryResponse* response) override;

 private:
  // As it would be placed now.
  v1::RunPlan PlanNow(const RunSpec& spec) const;
  grpc::ServerUnaryReactor* Answer(grpc::CallbackServerContext* context, RpcRecord record, const absl::Status& status);

  const Options options_;
  const double begin_s_ = MonotonicSeconds();
};

}  // namespace ballast
