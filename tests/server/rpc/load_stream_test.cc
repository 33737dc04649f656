#include "server/rpc/load_stream.h"

#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include <memory>
#include <utility>
#include <vector>

#include "absl/synchronization/notification.h"

#include "server/convert/convert.h"
#include "server/device/cpu_device.h"
#include "server/device/device_pool.h"
#include "tests/server/specs.h"

namespace ballast {
namespace {

// gRPC's side of a call, of which the test is the client.
class LoadCallOfTest final : public grpc::ServerCallbackReader<v1::LoadStateRequest> {
 public:
  explicit LoadCallOfTest(LoadStream* stream) : stream_(stream) { BindReactor(stream); }
  void Finish(grpc::Status status) override { finished = std::move(status); }
  void SendInitialMetadata() override {}
  void Read(v1::LoadStateRequest* message) override { next = message; }

  v1::LoadStateRequest* next = nullptr;  // to be filled in
  grpc::Status finished;

 private:
  grpc::internal::ServerReactor* reactor() override { return stream_; }
  void CallOnDone() override {}

  LoadStream* const stream_;
};

class LoadStreamTest : public ::testing::Test {
 protected:
  void SetUp() override {
    std::vector<std::unique_ptr<Device>> all;
    all.push_back(std::make_unique<CpuDevice>(CpuDevice::Options{.threads = 1}));
    devices_ = std::make_unique<DevicePool>(std::move(all), uint64_t{1} << 30);
    runs_ = std::make_unique<RunRegistry>(
        RunRegistry::Options{.devices = devices_.get(), .metrics = &metrics_, .sessions = &sessions_});
    absl::Notification created, attached;
    RunRegistry::CreateRequest request;
    request.spec = ToRunSpec(testing::MakeSpec("r1", {{"w", {300}, "fp32"}}), {}).value();
    runs_->Create(std::move(request), [&](absl::StatusOr<RunRegistry::Created> made) {
      run_ = made.value().run;
      created.Notify();
    });
    created.WaitForNotification();
    run_->Attach({.fresh = sessions_.NewId()}, [&](absl::StatusOr<ballast::Run::AttachReply> reply, double) {
      session_ = {.run_id = "r1", .id = reply.value().session, .rank = 0};
      attached.Notify();
    });
    attached.WaitForNotification();
  }
  // Whether this upload is one that the run still takes chunks of.
  bool Goes(LoadCall call) {
    absl::Notification answered;
    absl::Status status;
    run_->Load(call, {}, [&](const absl::Status& s) {
      status = s;
      answered.Notify();
    });
    answered.WaitForNotification();
    return status.ok();
  }

  Metrics metrics_{{}};
  Sessions sessions_;
  Quotas quotas_{0, &metrics_};
  std::unique_ptr<DevicePool> devices_;
  std::unique_ptr<RunRegistry> runs_;
  std::shared_ptr<ballast::Run> run_;
  Sessions::Session session_;
};

TEST_F(LoadStreamTest, AStreamCancelledBeforeItBeganIsForgotten) {
  const RpcEnvironment environment{
      .runs = runs_.get(), .sessions = &sessions_, .metrics = &metrics_, .message_bytes = 1 << 20, .quotas = &quotas_};
  v1::LoadStateResponse response;
  LoadStream* stream = LoadStream::Start(environment, &response, "test");
  LoadCallOfTest call(stream);
  ASSERT_NE(call.next, nullptr);
  call.next->set_session_token(sessions_.Issue(session_));

  absl::Notification busy, go_on, over;
  run_->AskStepOpen([&](bool) {
    busy.Notify();
    go_on.WaitForNotification();
  });
  busy.WaitForNotification();
  stream->OnReadDone(true);
  const LoadCall begun{.session = session_.id, .number = static_cast<uint64_t>(sessions_.NewId()) - 1};
  stream->OnCancel();
  EXPECT_EQ(call.finished.error_code(), grpc::StatusCode::CANCELLED);
  go_on.Notify();
  run_->AskStepOpen([&](bool) { over.Notify(); });
  over.WaitForNotification();
  EXPECT_FALSE(Goes(begun));
  stream->OnDone();
}

}  // namespace
}  // namespace ballast
