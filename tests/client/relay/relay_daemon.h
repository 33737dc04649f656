// A daemon that is a relay, in this process, for tests; and bare calls to one.
#pragma once

#include <grpcpp/grpcpp.h>

#include <memory>
#include <optional>
#include <string>
#include <utility>
#include <vector>

#include "absl/strings/match.h"
#include "absl/strings/numbers.h"
#include "absl/strings/str_cat.h"
#include "absl/strings/str_split.h"

#include "ballast/v1/admin.grpc.pb.h"
#include "ballast/v1/follow.grpc.pb.h"
#include "ballast/v1/trainer.grpc.pb.h"
#include "client/cpp/follow/followed_weights.h"
#include "tests/client/real_daemon.h"

namespace ballast {

inline Config RelayOf(const std::string& upstream, std::vector<std::string> runs = {"least-squares"}) {
  Config config = RealDaemon::Small();
  config.relay = {.upstream = upstream, .runs = std::move(runs)};
  return config;
}

// The series of /metrics with this name and labels; none: there is no such line.
inline std::optional<double> MetricOf(const RealDaemon& daemon, const std::string& series) {
  const std::string text = daemon.metrics();
  for (const absl::string_view line : absl::StrSplit(text, '\n')) {
    double value = 0;
    if (absl::StartsWith(line, series + " ") && absl::SimpleAtod(line.substr(series.size() + 1), &value)) return value;
  }
  return std::nullopt;
}

// What a client of its own says to the daemon.
struct BareClient {
  explicit BareClient(const std::string& server)
      : channel(grpc::CreateChannel(server, grpc::InsecureChannelCredentials())),
        admin(v1::AdminService::NewStub(channel)),
        trainer(v1::TrainerService::NewStub(channel)),
        follow(v1::FollowService::NewStub(channel)) {}
  v1::GetRunResponse GetRun(const std::string& run_id) const {
    grpc::ClientContext context;
    v1::GetRunRequest request;
    request.set_run_id(run_id);
    v1::GetRunResponse response;
    error = admin->GetRun(&context, request, &response);
    return response;
  }
  v1::RunStatus Listed(const std::string& run_id) const {
    grpc::ClientContext context;
    v1::ListRunsResponse response;
    error = admin->ListRuns(&context, {}, &response);
    for (const v1::RunStatus& run : response.runs()) {
      if (run.run_id() == run_id) return run;
    }
    return {};
  }
  std::string Failure(const std::string& run_id) const { return Listed(run_id).relay().failure(); }

  std::shared_ptr<grpc::Channel> channel;
  std::unique_ptr<v1::AdminService::Stub> admin;
  std::unique_ptr<v1::TrainerService::Stub> trainer;
  std::unique_ptr<v1::FollowService::Stub> follow;
  mutable grpc::Status error;  // of the last call
};

}  // namespace ballast
