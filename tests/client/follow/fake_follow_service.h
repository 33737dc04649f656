// A daemon with one run, "r", that says to its readers what a test has it say: parts of versions, and how a call ends. What
// is queued goes out in order, to one call after another; a call for which there is nothing stays open, until there is
// another. What is left of a version, and of the end behind it, when its reader has given its call up, is lost. Thread-safe.
#pragma once

#include <grpcpp/grpcpp.h>

#include <deque>
#include <memory>
#include <optional>
#include <string>
#include <vector>

#include "absl/base/thread_annotations.h"
#include "absl/synchronization/mutex.h"

#include "ballast/v1/admin.grpc.pb.h"
#include "ballast/v1/follow.grpc.pb.h"
#include "tests/client/follow/followed_run.h"

namespace ballast {

class FakeFollowService final : public v1::FollowService::Service {
 public:
  explicit FakeFollowService(v1::RunSpec spec = FollowedSpec());
  ~FakeFollowService() override;

  const std::string& address() const { return address_; }
  void Shutdown();  // as if it was killed

  // end: how the call ends behind it, if it does. In one, for a reader that may give the call up before.
  void Say(const VersionParts& parts, const std::optional<grpc::Status>& end = {});
  // The call, or the next one, ends with this. retry_after_ms: trailing metadata; 0: none.
  void End(grpc::Status status, int retry_after_ms = 0);
  void Cut() { End({grpc::StatusCode::UNAVAILABLE, "Connection reset by the test"}); }
  void Amend(v1::RunSpec spec);
  void Delete();  // the call ends, too

  // So many requests, once they have come.
  std::vector<v1::SubscribeRequest> AwaitRequests(size_t count);
  // Returns when all that was queued has gone out.
  void AwaitSaid();

 private:
  class Admin;
  struct Turn {
    std::optional<v1::VersionPart> part;
    grpc::Status end;
    int retry_after_ms = 0;
    uint64_t said = 0;  // Say's calls until then
  };

  grpc::Status Subscribe(grpc::ServerContext*, const v1::SubscribeRequest*,
                         grpc::ServerWriter<v1::VersionPart>*) override;
  void DropBegun() ABSL_EXCLUSIVE_LOCKS_REQUIRED(mu_);

  absl::Mutex mu_;
  v1::RunSpec spec_ ABSL_GUARDED_BY(mu_);
  bool deleted_ ABSL_GUARDED_BY(mu_) = false;
  bool over_ ABSL_GUARDED_BY(mu_) = false;
  std::deque<Turn> turns_ ABSL_GUARDED_BY(mu_);
  uint64_t said_ ABSL_GUARDED_BY(mu_) = 0;
  uint64_t begun_ ABSL_GUARDED_BY(mu_) = 0;  // Turn::said of the part that went out last; 0: an end came after it
  std::vector<v1::SubscribeRequest> requests_ ABSL_GUARDED_BY(mu_);
  std::unique_ptr<Admin> admin_;
  std::unique_ptr<grpc::Server> server_;
  std::string address_;
};

}  // namespace ballast
