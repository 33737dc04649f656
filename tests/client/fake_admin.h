// The operator's side of FakeDaemon, for fake_daemon.cc alone.
#pragma once

#include <string>

#include "tests/client/fake_daemon.h"

namespace ballast {

class FakeDaemon::Admin final : public v1::AdminService::Service {
 public:
  explicit Admin(FakeDaemon* daemon) : daemon_(*daemon) {}

 private:
  static grpc::Status Lost() { return {grpc::StatusCode::UNAVAILABLE, "Connection reset by the test"}; }
  // Why a call about the run cannot be answered; OK: it can.
  grpc::Status Enter(const std::string& run_id) {
    if (!daemon_.Passes()) return Lost();
    return run_id == "r" ? grpc::Status::OK : grpc::Status(grpc::StatusCode::NOT_FOUND, "no run '" + run_id + "'");
  }
  grpc::Status Leave() { return daemon_.Passes() ? grpc::Status::OK : Lost(); }
  grpc::Status EnterStorage(const std::string& run_id) {
    if (grpc::Status s = Enter(run_id); !s.ok()) return s;
    if (daemon_.options_.has_storage) return grpc::Status::OK;
    return {grpc::StatusCode::FAILED_PRECONDITION, "this daemon has no storage"};
  }

  grpc::Status GetServer(grpc::ServerContext* context, const v1::GetServerRequest*,
                         v1::GetServerResponse* response) override {
    absl::MutexLock lock(&daemon_.mu_);
    if (!daemon_.server_refusals_.empty()) return Tell(context, &daemon_.server_refusals_);
    response->set_version("0.1.0");
    response->set_uptime_s(daemon_.forgot_ ? 0 : 1e6);
    return grpc::Status::OK;
  }
  grpc::Status ListRuns(grpc::ServerContext* context, const v1::ListRunsRequest*,
                        v1::ListRunsResponse* response) override {
    absl::MutexLock lock(&daemon_.mu_);
    if (!daemon_.list_refusals_.empty()) return Tell(context, &daemon_.list_refusals_);
    if (daemon_.forgot_ && !daemon_.read_back_) return grpc::Status::OK;
    v1::RunStatus* run = response->add_runs();
    run->set_run_id("r");
    run->set_step(daemon_.read_back_.value_or(daemon_.step_ - 1));
    run->set_generation(2);
    run->mutable_durability()->set_restored(daemon_.restored_);
    return grpc::Status::OK;
  }
  grpc::Status GetRun(grpc::ServerContext*, const v1::GetRunRequest* request, v1::GetRunResponse* response) override {
    if (grpc::Status s = Enter(request->run_id()); !s.ok()) return s;
    *response->mutable_spec() = daemon_.options_.spec;
    response->mutable_status()->set_run_id("r");
    response->mutable_status()->mutable_plan()->set_chunk_elements(daemon_.options_.chunk_elements);
    if (daemon_.options_.has_storage) *response->mutable_status()->mutable_durability() = daemon_.options_.durability;
    return Leave();
  }
  grpc::Status DeleteRun(grpc::ServerContext* context, const v1::DeleteRunRequest* request,
                         v1::DeleteRunResponse* response) override {
    if (grpc::Status s = Enter(request->run_id()); !s.ok()) return s;
    {
      absl::MutexLock lock(&daemon_.mu_);
      daemon_.seen_.deletions.push_back(*request);
      if (!daemon_.deletion_refusals_.empty()) return Tell(context, &daemon_.deletion_refusals_);
    }
    response->set_freed_bytes(3 << 19);
    return Leave();
  }
  grpc::Status Checkpoint(grpc::ServerContext*, const v1::CheckpointRequest* request,
                          v1::CheckpointResponse* response) override {
    if (grpc::Status s = EnterStorage(request->run_id()); !s.ok()) return s;
    {
      absl::MutexLock lock(&daemon_.mu_);
      ++daemon_.seen_.checkpoints;
      response->set_step(daemon_.step_ - 1);
    }
    response->set_number(8);
    response->set_folder("/data/runs/r/000000000008-step-0");
    response->set_bytes(3 << 19);
    response->set_seconds(1.5);
    return Leave();
  }
  grpc::Status ListCheckpoints(grpc::ServerContext*, const v1::ListCheckpointsRequest* request,
                               v1::ListCheckpointsResponse* response) override {
    if (grpc::Status s = EnterStorage(request->run_id()); !s.ok()) return s;
    for (const v1::StoredCheckpoint& stored : daemon_.options_.stored) *response->add_checkpoints() = stored;
    return Leave();
  }
  grpc::Status Restore(grpc::ServerContext*, const v1::RestoreRequest* request,
                       v1::RestoreResponse* response) override {
    if (grpc::Status s = EnterStorage(request->run_id()); !s.ok()) return s;
    {
      absl::MutexLock lock(&daemon_.mu_);
      daemon_.seen_.restores.push_back(request->step());
      if (!request->from().empty()) daemon_.seen_.restored_from.push_back(request->from());
    }
    response->set_step(request->step());
    response->set_generation(2);
    return Leave();
  }

  FakeDaemon& daemon_;
};

}  // namespace ballast
