#include "tests/client/follow/fake_follow_service.h"

#include <utility>

namespace ballast {

class FakeFollowService::Admin final : public v1::AdminService::Service {
 public:
  explicit Admin(FakeFollowService* daemon) : daemon_(*daemon) {}

 private:
  grpc::Status GetRun(grpc::ServerContext*, const v1::GetRunRequest* request, v1::GetRunResponse* response) override {
    absl::MutexLock lock(&daemon_.mu_);
    if (request->run_id() != "r" || daemon_.deleted_) {
      return {grpc::StatusCode::NOT_FOUND, "no run '" + request->run_id() + "'"};
    }
    *response->mutable_spec() = daemon_.spec_;
    response->mutable_status()->mutable_plan()->set_chunk_elements(kFollowedChunk);
    return grpc::Status::OK;
  }
  grpc::Status GetServer(grpc::ServerContext*, const v1::GetServerRequest*, v1::GetServerResponse*) override {
    return grpc::Status::OK;
  }

  FakeFollowService& daemon_;
};

FakeFollowService::FakeFollowService(v1::RunSpec spec) : spec_(std::move(spec)), admin_(std::make_unique<Admin>(this)) {
  int port = 0;
  grpc::ServerBuilder builder;
  builder.AddListeningPort("127.0.0.1:0", grpc::InsecureServerCredentials(), &port);
  // As the daemon's: a reader pings for as long as no version comes.
  builder.AddChannelArgument(GRPC_ARG_HTTP2_MIN_RECV_PING_INTERVAL_WITHOUT_DATA_MS, 1000);
  builder.AddChannelArgument(GRPC_ARG_KEEPALIVE_PERMIT_WITHOUT_CALLS, 1);
  builder.RegisterService(this);
  builder.RegisterService(admin_.get());
  server_ = builder.BuildAndStart();
  address_ = "127.0.0.1:" + std::to_string(port);
}

FakeFollowService::~FakeFollowService() { Shutdown(); }

void FakeFollowService::Shutdown() {
  {
    absl::MutexLock lock(&mu_);
    over_ = true;
  }
  server_->Shutdown(std::chrono::system_clock::now());
}

void FakeFollowService::Say(const VersionParts& parts, const std::optional<grpc::Status>& end) {
  absl::MutexLock lock(&mu_);
  ++said_;
  for (const v1::VersionPart& part : parts) turns_.push_back({.part = part, .said = said_});
  if (end) turns_.push_back({.end = *end, .said = said_});
}

void FakeFollowService::End(grpc::Status status, int retry_after_ms) {
  absl::MutexLock lock(&mu_);
  turns_.push_back({.end = std::move(status), .retry_after_ms = retry_after_ms, .said = said_});
}

void FakeFollowService::Amend(v1::RunSpec spec) {
  absl::MutexLock lock(&mu_);
  spec_ = std::move(spec);
}

void FakeFollowService::Delete() {
  {
    absl::MutexLock lock(&mu_);
    deleted_ = true;
  }
  End({grpc::StatusCode::NOT_FOUND, "run 'r' was deleted"});
}

std::vector<v1::SubscribeRequest> FakeFollowService::AwaitRequests(size_t count) {
  absl::MutexLock lock(&mu_);
  const auto there = [&]() ABSL_NO_THREAD_SAFETY_ANALYSIS { return requests_.size() >= count; };
  mu_.Await(absl::Condition(&there));
  return requests_;
}

void FakeFollowService::AwaitSaid() {
  absl::MutexLock lock(&mu_);
  const auto none = [this]() ABSL_NO_THREAD_SAFETY_ANALYSIS { return turns_.empty(); };
  mu_.Await(absl::Condition(&none));
}

void FakeFollowService::DropBegun() {
  while (begun_ != 0 && !turns_.empty() && turns_.front().said == begun_) {
    if (!turns_.front().part) begun_ = 0;
    turns_.pop_front();
  }
}

grpc::Status FakeFollowService::Subscribe(grpc::ServerContext* context, const v1::SubscribeRequest* request,
                                          grpc::ServerWriter<v1::VersionPart>* writer) {
  size_t call = 0;
  {
    absl::MutexLock lock(&mu_);
    requests_.push_back(*request);
    call = requests_.size();
    DropBegun();
  }
  const auto left = [&]() ABSL_NO_THREAD_SAFETY_ANALYSIS { return over_ || call < requests_.size(); };
  const auto something = [&]() ABSL_NO_THREAD_SAFETY_ANALYSIS { return left() || !turns_.empty(); };
  for (;;) {
    Turn turn;
    {
      absl::MutexLock lock(&mu_);
      mu_.Await(absl::Condition(&something));
      if (left()) return {grpc::StatusCode::UNAVAILABLE, "shutting down"};
      turn = std::move(turns_.front());
      turns_.pop_front();
      begun_ = turn.part ? turn.said : 0;
    }
    if (turn.part) {
      writer->Write(*turn.part);
      continue;
    }
    if (turn.retry_after_ms > 0) {
      context->AddTrailingMetadata("ballast-retry-after-ms", std::to_string(turn.retry_after_ms));
    }
    return turn.end;
  }
}

}  // namespace ballast
