// NCCL beside a Train stream, message by message: a trainer of bad faith against a real daemon, and a daemon of bad faith
// against a client's transport.
#include <gmock/gmock.h>
#include <grpcpp/grpcpp.h>
#include <gtest/gtest.h>

#include <functional>
#include <memory>
#include <string>
#include <thread>
#include <utility>
#include <vector>

#include "absl/strings/str_cat.h"
#include "absl/synchronization/mutex.h"
#include "absl/time/time.h"

#include "client/cpp/stream/session.h"
#include "client/cpp/transport/connection.h"
#include "client/cpp/transport/nccl_transport.h"
#include "tests/client/quiet_client.h"
#include "tests/client/transport/nccl_daemon.h"

namespace ballast {
namespace {

using ::testing::HasSubstr;

// A rank that says what it likes.
class RawTrainer {
 public:
  explicit RawTrainer(const std::string& server)
      : connection_(Connection::Open({.server = server, .log = [](const std::string&) {}}).value()) {
    options_.takeover = true;
    grant_ = TakeRank(*connection_, options_).value();
    stream_ = connection_->trainer().Train(&context_);
  }
  ~RawTrainer() { context_.TryCancel(); }

  const v1::AttachResponse& grant() const { return grant_; }
  // What Opened says of NCCL; without ids: two that are good.
  v1::NcclSlots Open(v1::NcclIds ids = {}) {
    const auto nccl = Nccl::Load().value();
    if (ids.gradients().empty()) ids.set_gradients(nccl->MakeId().value());
    if (ids.weights().empty()) ids.set_weights(nccl->MakeId().value());
    v1::TrainRequest open;
    open.mutable_open()->set_session_token(grant_.session_token());
    *open.mutable_open()->mutable_nccl() = ids;
    stream_->Write(open);
    v1::TrainResponse response;
    if (!stream_->Read(&response)) return {};
    const auto gpu = Gpu::Open(0).value();
    auto gradients = NcclLink::Open(nccl, gpu, ids.gradients(), NcclLink::Side::kSends);
    auto weights = NcclLink::Open(nccl, gpu, ids.weights(), NcclLink::Side::kReceives);
    if (gradients.ok()) gradients_ = *std::move(gradients);
    if (weights.ok()) weights_ = *std::move(weights);
    return response.opened().nccl();
  }
  bool Write(const v1::TrainRequest& request) { return stream_->Write(request); }
  void Begin() {
    v1::TrainRequest request;
    request.mutable_step_begin()->set_step(grant_.resume_step());
    Write(request);
    request.mutable_micro_begin()->set_last(true);
    Write(request);
  }
  // That so many bytes come by NCCL.
  void Tell(uint32_t bytes, uint32_t slot) {
    v1::TrainRequest request;
    request.mutable_gradient()->set_format("fp32");
    request.mutable_gradient()->mutable_nccl()->set_bytes(bytes);
    request.mutable_gradient()->mutable_nccl()->set_slot(slot);
    Write(request);
  }
  // Reads to the stream's end.
  absl::Status End() {
    v1::TrainResponse response;
    while (stream_->Read(&response)) continue;
    return FromGrpc(stream_->Finish());
  }

 private:
  AttachOptions options_{.run_id = "least-squares", .transport = TransportChoice::kNccl};
  std::unique_ptr<Connection> connection_;
  v1::AttachResponse grant_;
  grpc::ClientContext context_;
  std::unique_ptr<grpc::ClientReaderWriter<v1::TrainRequest, v1::TrainResponse>> stream_;
  std::unique_ptr<NcclLink> gradients_, weights_;
};

class NcclWireTest : public GpuTeamTest {
 protected:
  NcclWireTest() : GpuTeamTest(TransportChoice::kNccl) {
    LeastSquares problem;
    EXPECT_TRUE(problem.Join(*QuietClient(daemon_.address())).ok());  // loads, and leaves
  }
  RealDaemon daemon_{(StandIn().Reset(), WithNccl()), Gpus()};
};

// --- a trainer ------------------------------------------------------------------------------------------------------

TEST_F(NcclWireTest, AGradientThatNoSlotCanTakeIsSaid) {
  const v1::NcclSlots slots = RawTrainer(daemon_.address()).Open();
  const auto most = static_cast<uint32_t>(slots.gradient_slot_bytes());
  for (const auto& [bytes, slot, why] :
       {std::tuple(16u, slots.gradient_slots(), "which is not free"), std::tuple(16u, ~0u, "which is not free"),
        std::tuple(0u, 0u, "a gradient of 0 bytes by NCCL"), std::tuple(most + 1, 0u, "wanted 1 to")}) {
    RawTrainer trainer(daemon_.address());
    trainer.Open();
    trainer.Begin();
    trainer.Tell(bytes, slot);
    const absl::Status end = trainer.End();
    EXPECT_TRUE(absl::IsInvalidArgument(end)) << end;
    EXPECT_THAT(std::string(end.message()), HasSubstr(why));
  }
}

TEST_F(NcclWireTest, IdsOfAnotherSizeAreSaid) {
  for (const bool of_gradients : {false, true}) {
    RawTrainer trainer(daemon_.address());
    v1::NcclIds ids;
    (of_gradients ? ids.mutable_gradients() : ids.mutable_weights())->assign(127, 'i');
    trainer.Open(ids);
    const absl::Status end = trainer.End();
    EXPECT_TRUE(absl::IsInvalidArgument(end)) << end;
    EXPECT_THAT(std::string(end.message()), HasSubstr("an id of 127 bytes, wanted 128"));
  }
}

TEST_F(NcclWireTest, WhatWaitsBehindAGradientThatDoesNotComeIsBounded) {
  constexpr int kMany = 50;
  RawTrainer trainer(daemon_.address());
  trainer.Open();
  trainer.Begin();
  trainer.Tell(16, 0);
  v1::TrainRequest large;
  large.mutable_gradient()->mutable_data()->resize(256 << 10);
  absl::Mutex mu;
  int written = 0;
  std::thread writer([&] {
    while (trainer.Write(large)) {
      absl::MutexLock lock(&mu);
      ++written;
    }
  });
  const auto all = [&] { return written >= kMany; };
  {
    absl::MutexLock lock(&mu);
    EXPECT_FALSE(mu.AwaitWithTimeout(absl::Condition(&all), absl::Seconds(2)));
  }
  StandIn().Break();
  EXPECT_TRUE(absl::IsUnavailable(trainer.End()));
  writer.join();
  EXPECT_LT(written, kMany);
}

// --- a daemon -------------------------------------------------------------------------------------------------------

// Answers Open with what it is told to, and ends no stream of its own.
class ScriptedDaemon final : public v1::TrainerService::Service {
 public:
  explicit ScriptedDaemon(std::vector<v1::TrainResponse> responses) : responses_(std::move(responses)) {
    grpc::ServerBuilder builder;
    builder.AddListeningPort("127.0.0.1:0", grpc::InsecureServerCredentials(), &port_);
    builder.RegisterService(this);
    server_ = builder.BuildAndStart();
  }
  ~ScriptedDaemon() override { server_->Shutdown(std::chrono::system_clock::now()); }

  grpc::Status Train(grpc::ServerContext*,
                     grpc::ServerReaderWriter<v1::TrainResponse, v1::TrainRequest>* stream) override {
    v1::TrainRequest request;
    stream->Read(&request);
    for (const v1::TrainResponse& response : responses_) stream->Write(response);
    while (stream->Read(&request)) continue;
    return grpc::Status::OK;
  }
  // How a trainer's stream ends, that reads all of it.
  absl::Status Served(std::string* why_none) {
    const auto connection =
        Connection::Open({.server = absl::StrCat("127.0.0.1:", port_), .log = [](const std::string&) {}}).value();
    NcclTransport transport(*connection, {.nccl = Nccl::Load().value(),
                                          .gpu = Gpu::Open(0).value(),
                                          .on_none = [&](const std::string& why, bool) { *why_none = why; }});
    v1::TrainRequest open;
    open.mutable_open();
    transport.Start(open);
    v1::TrainResponse response;
    absl::Span<const std::byte> data;
    while (transport.Read(&response, &data)) continue;
    return transport.Finish();
  }

 private:
  const std::vector<v1::TrainResponse> responses_;
  int port_ = 0;
  std::unique_ptr<grpc::Server> server_;
};

v1::TrainResponse OpenedWith(uint32_t slots, uint64_t gradient_bytes, uint64_t weight_bytes) {
  v1::TrainResponse response;
  v1::NcclSlots& nccl = *response.mutable_opened()->mutable_nccl();
  nccl.set_gradient_slots(slots);
  nccl.set_gradient_slot_bytes(gradient_bytes);
  nccl.set_weight_slot_bytes(weight_bytes);
  return response;
}

TEST_F(NcclWireTest, SlotsOfADaemonThatNoneHasAreRefused) {
  for (const auto& opened :
       {OpenedWith(~0u, 0, 0), OpenedWith(~0u, 1, 1), OpenedWith(1u << 10, uint64_t{1} << 54, 1 << 20),
        OpenedWith(4, 1 << 20, uint64_t{1} << 61)}) {
    std::string why;
    const absl::Status end = ScriptedDaemon({opened}).Served(&why);
    EXPECT_TRUE(absl::IsUnavailable(end)) << end;
    EXPECT_THAT(why, HasSubstr("the daemon told of slots that none has"));
  }
  EXPECT_EQ(StandIn().live(), 0);
}

TEST_F(NcclWireTest, WeightsBeforeOpenedAreRefused) {
  v1::TrainResponse weights;
  weights.mutable_weights()->mutable_nccl()->set_bytes(16);
  std::string why;
  EXPECT_TRUE(absl::IsUnavailable(ScriptedDaemon({weights}).Served(&why)));
  EXPECT_THAT(why, HasSubstr("before it had answered Open"));
}

}  // namespace
}  // namespace ballast
