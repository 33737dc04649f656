#include "server/base/request_queue.h"

#include <grpcpp/grpcpp.h>
#include <gtest/gtest.h>

#include <atomic>
#include <functional>
#include <memory>
#include <thread>
#include <utility>
#include <vector>

#include "absl/synchronization/blocking_counter.h"
#include "absl/synchronization/notification.h"

#include "ballast/v1/admin.grpc.pb.h"
#include "server/metrics/metrics.h"
#include "server/rpc/admission.h"

namespace ballast {
namespace {

TEST(RequestQueueTest, RequestsBeyondTheirNumberAreRefusedUntilOneIsDone) {
  RequestQueue queue;
  absl::Notification go;
  absl::BlockingCounter done(RequestQueue::kMostRequests);
  for (size_t i = 0; i < RequestQueue::kMostRequests; ++i) {
    const absl::Status taken = queue.Post(1, [&](RequestQueue::Place place) {
      go.WaitForNotification();
      place.reset();
      done.DecrementCount();
    });
    ASSERT_TRUE(taken.ok()) << taken;
  }
  bool ran = false;
  const absl::Status refused = queue.Post(1, [&](RequestQueue::Place) { ran = true; });
  EXPECT_EQ(refused.code(), absl::StatusCode::kResourceExhausted);
  EXPECT_NE(refused.message().find("busy with 256 requests"), std::string::npos) << refused;
  go.Notify();
  done.Wait();
  absl::Notification again;
  EXPECT_TRUE(queue.Post(1, [&](RequestQueue::Place) { again.Notify(); }).ok());
  again.WaitForNotification();
  EXPECT_FALSE(ran);
}

TEST(RequestQueueTest, RequestsBeyondTheirBytesAreRefusedButNeverTheOnlyOne) {
  RequestQueue queue;
  absl::Notification started, go, large_done;
  ASSERT_TRUE(queue
                  .Post(3 * RequestQueue::kMostBytes,
                        [&](RequestQueue::Place place) {
                          started.Notify();
                          go.WaitForNotification();
                          place.reset();
                          large_done.Notify();
                        })
                  .ok());
  started.WaitForNotification();
  EXPECT_EQ(queue.Post(1, [](RequestQueue::Place) {}).code(), absl::StatusCode::kResourceExhausted);
  go.Notify();
  large_done.WaitForNotification();
  EXPECT_TRUE(queue.Post(RequestQueue::kMostBytes, [](RequestQueue::Place) {}).ok());
}

TEST(RequestQueueTest, APlaceIsKeptByWhatIsDoneElsewhere) {
  RequestQueue queue;
  std::vector<RequestQueue::Place> kept;
  absl::Notification taken;
  ASSERT_TRUE(queue
                  .Post(RequestQueue::kMostBytes,
                        [&](RequestQueue::Place place) {
                          kept.push_back(std::move(place));
                          taken.Notify();
                        })
                  .ok());
  taken.WaitForNotification();
  EXPECT_FALSE(queue.Post(1, [](RequestQueue::Place) {}).ok());
  kept.clear();
  EXPECT_TRUE(queue.Post(1, [](RequestQueue::Place) {}).ok());
}

// One call at a time, whose place in the queue is behind what the test posted.
class OneCallInTurn final : public v1::AdminService::CallbackService {
 public:
  explicit OneCallInTurn(RequestQueue* requests) {
    environment_ = {.metrics = &metrics_, .requests = requests, .quotas = &quotas_};
  }
  // When the call is in the queue.
  void AwaitCancelledBy(const std::function<void()>& cancel) const {
    posted_.WaitForNotification();
    cancel();
    while (!context_->IsCancelled()) std::this_thread::yield();
  }
  bool carried_out() const { return carried_out_; }

 private:
  grpc::ServerUnaryReactor* GetRun(grpc::CallbackServerContext* context, const v1::GetRunRequest* request,
                                   v1::GetRunResponse*) override {
    context_ = context;
    auto* reactor =
        AnswerInTurn(environment_, context, "GetRun", "r1", *request, [this](PendingCall call, const auto&) {
          carried_out_ = true;
          call.Finish(absl::OkStatus());
        });
    posted_.Notify();
    return reactor;
  }

  Metrics metrics_{BuildInfo{}};
  Quotas quotas_{0, &metrics_};
  RpcEnvironment environment_;
  grpc::CallbackServerContext* context_ = nullptr;
  absl::Notification posted_;
  std::atomic<bool> carried_out_ = false;
};

std::unique_ptr<grpc::Server> Serve(grpc::Service* service) {
  grpc::ServerBuilder builder;
  builder.RegisterService(service);
  return builder.BuildAndStart();
}

TEST(RequestQueueTest, ACallThatIsCancelledWhileItWaitsIsNotCarriedOut) {
  RequestQueue queue;
  OneCallInTurn service(&queue);
  const auto server = Serve(&service);
  const auto stub = v1::AdminService::NewStub(server->InProcessChannel({}));
  absl::Notification go, behind;
  ASSERT_TRUE(queue.Post(1, [&](RequestQueue::Place) { go.WaitForNotification(); }).ok());
  grpc::ClientContext context;
  v1::GetRunResponse response;
  const v1::GetRunRequest request;
  grpc::Status status;
  absl::Notification answered;
  stub->async()->GetRun(&context, &request, &response, [&](grpc::Status s) {
    status = std::move(s);
    answered.Notify();
  });
  service.AwaitCancelledBy([&] { context.TryCancel(); });
  ASSERT_TRUE(queue.Post(1, [&](RequestQueue::Place) { behind.Notify(); }).ok());
  go.Notify();
  behind.WaitForNotification();
  answered.WaitForNotification();
  EXPECT_EQ(status.error_code(), grpc::StatusCode::CANCELLED);
  EXPECT_FALSE(service.carried_out());
  server->Shutdown();
}

TEST(RequestQueueTest, ACallCountsByTheMemoryThatItTakesAndNotByItsBytes) {
  RequestQueue queue;
  OneCallInTurn service(&queue);
  const auto server = Serve(&service);
  const auto stub = v1::AdminService::NewStub(server->InProcessChannel({}));
  absl::Notification go;
  constexpr uint64_t kLeft = 1 << 20;
  ASSERT_TRUE(
      queue.Post(RequestQueue::kMostBytes - kLeft, [&](RequestQueue::Place) { go.WaitForNotification(); }).ok());
  v1::GetRunRequest request;
  auto* const unknown = request.GetReflection()->MutableUnknownFields(&request);
  for (int i = 0; i < 100'000; ++i) unknown->AddLengthDelimited(1999, "");
  ASSERT_LT(request.ByteSizeLong(), kLeft);
  grpc::ClientContext context;
  v1::GetRunResponse response;
  const grpc::Status status = stub->GetRun(&context, request, &response);
  EXPECT_EQ(status.error_code(), grpc::StatusCode::RESOURCE_EXHAUSTED);
  EXPECT_EQ(context.GetServerTrailingMetadata().count(kRetryAfterKey), 1u);
  EXPECT_FALSE(service.carried_out());
  go.Notify();
  server->Shutdown();
}

}  // namespace
}  // namespace ballast
