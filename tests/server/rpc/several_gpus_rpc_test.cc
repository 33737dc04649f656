// Runs on several GPUs of one daemon: spread over them, and what becomes of them when one fails.
#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include "absl/synchronization/notification.h"

#include "server/convert/convert.h"
#include "server/device/gpu_device.h"
#include "server/plan/plan.h"
#include "tests/server/device/fake_gpu.h"
#include "tests/server/rpc/rpc_fixture.h"

namespace ballast::testing {
namespace {

using ::testing::ElementsAre;
using ::testing::HasSubstr;
using ::testing::UnorderedElementsAre;

constexpr size_t kGpus = 3;

v1::RunSpec SixTensors(const std::string& run_id) {
  v1::RunSpec spec = MakeSpec(
      run_id,
      {{"a", {200, 100}}, {"b", {100, 64}, "fp32"}, {"c", {200, 100}}, {"d", {7}}, {"e", {200, 100}}, {"f", {5000}}});
  spec.mutable_groups(0)->set_serving("int8-row");
  return spec;
}

class SeveralGpusRpcTest : public RpcTest {
 protected:
  void Start(uint64_t limit_bytes) {
    std::vector<std::unique_ptr<Device>> devices;
    for (size_t i = 0; i < kGpus; ++i) {
      devices.push_back(std::make_unique<GpuDevice>(std::make_unique<FakeGpu>(&gpus_[i], static_cast<int>(i))));
    }
    Config config = DefaultConfig();
    config.memory_limit = limit_bytes;
    Connect(config, Server::StartOn(std::move(devices), config, &metrics_, "", [this](const absl::Status& why) {
              last_failure_ = why;
              none_left_.Notify();
            }));
  }
  ~SeveralGpusRpcTest() override { server_.reset(); }  // before the GPUs' state

  static uint64_t Need(const v1::RunSpec& spec) {
    return MakePlan(ToRunSpec(spec, DefaultConfig().limits).value()).bytes.on_device();
  }
  void Break(size_t gpu) {
    absl::MutexLock lock(&gpus_[gpu].mu);
    gpus_[gpu].failure = absl::InternalError("an illegal address was met");
  }
  size_t GpuOf(const std::string& run_id) {
    const v1::RunStatus status = Status(run_id);
    EXPECT_EQ(status.plan().devices_size(), 1);
    return static_cast<size_t>(status.plan().devices(0).back() - '0');
  }
  v1::GetServerResponse GetServer() {
    grpc::ClientContext context;
    v1::GetServerResponse response;
    EXPECT_TRUE(admin_->GetServer(&context, {}, &response).ok());
    return response;
  }

  FakeGpuState gpus_[kGpus];
  absl::Status last_failure_;
  absl::Notification none_left_;
};

TEST_F(SeveralGpusRpcTest, ARunThatIsTooLargeForOneIsSpreadAndKeepsItsBits) {
  const v1::RunSpec spec = SixTensors("large");
  const uint64_t limit = Need(spec) - 1;
  Start(limit);
  Trainer t = StartTrainer(spec);
  EXPECT_THAT(Status("large").plan().devices(), UnorderedElementsAre("cuda:0", "cuda:1", "cuda:2"));
  ExpectSteps(&t, 1, 6);
  for (const FakeGpuState& gpu : gpus_) EXPECT_GT(gpu.update_launches, 0);
  const v1::GetServerResponse server = GetServer();
  EXPECT_EQ(server.memory_limit_bytes(), kGpus * limit);
  uint64_t reserved = 0;
  for (const v1::DeviceStatus& device : server.devices()) {
    EXPECT_GT(device.memory_reserved_bytes(), 0u);
    EXPECT_LE(device.memory_reserved_bytes(), limit);
    reserved += device.memory_reserved_bytes();
  }
  EXPECT_EQ(server.memory_reserved_bytes(), reserved);
  const v1::RunStatus status = Status("large");
  EXPECT_EQ(status.bytes().SerializeAsString(), status.plan().server().SerializeAsString());
}

TEST_F(SeveralGpusRpcTest, ASpreadRunGoesBackOnAllOfThemAndItsSnapshotsTakeNoneOfTheirMemory) {
  v1::RunSpec spec = SixTensors("large");
  const uint64_t limit = Need(spec) - 1;
  spec.mutable_rewind()->set_snapshots(3);
  spec.mutable_rewind()->set_every(2);
  Start(limit);
  Trainer t = StartTrainer(spec);
  ExpectSteps(&t, 1, 5);
  uint64_t reserved = 0;
  const v1::GetServerResponse server = GetServer();
  for (const v1::DeviceStatus& device : server.devices()) reserved += device.memory_reserved_bytes();
  const v1::ByteCounts bytes = Status("large").bytes();
  EXPECT_GT(bytes.snapshots(), 0u);
  EXPECT_EQ(reserved, bytes.weights() + bytes.momentum() + bytes.variance() + bytes.gradients() + bytes.staging());
  EXPECT_THAT(metrics_.Serialize(), HasSubstr("ballast_host_memory_used_bytes{device=\"cuda:0\",kind=\"snapshots\"}"));
  v1::RewindRequest request;
  request.set_run_id("large");
  request.set_to_step(2);
  grpc::ClientContext context;
  v1::RewindResponse rewound;
  ASSERT_TRUE(admin_->Rewind(&context, request, &rewound).ok());
  t.reference = std::make_unique<Reference>(t.spec);
  for (uint32_t i = 0; i < t.spec.tensors.size(); ++i) {
    t.reference->Load(i, Weights(t.spec, i));
    for (const uint64_t step : {1, 2}) t.reference->Update(i, step, Gradient(t.spec, i, step));
  }
  t.wire = std::make_unique<Wire>(trainer_.get());
  ASSERT_TRUE(t.wire->Open(AttachFresh("large").session_token()));
  ExpectSteps(&t, 3, 5);
}

TEST_F(SeveralGpusRpcTest, ARuleOverMatricesIsRefusedByNameWithoutALibrary) {
  gpus_[1].products = "";
  v1::RunSpec spec = MakeSpec("r1", {{"a", {20, 10}}});
  spec.mutable_groups(0)->set_rule("muon");
  Start(Need(spec));
  const absl::Status status = CreateRun(spec).status();
  EXPECT_EQ(status.code(), absl::StatusCode::kFailedPrecondition);
  EXPECT_THAT(std::string(status.message()), HasSubstr("run 'r1' has a rule over matrices, which this daemon cannot "
                                                       "multiply: cuda:1: cuBLAS is not found; start it with "
                                                       "device = cpu, or choose another rule"));
}

TEST_F(SeveralGpusRpcTest, ARuleOverMatricesIsRefusedWhereGpusGiveOtherBits) {
  gpus_[2].products = "products of another GPU";
  v1::RunSpec spec = MakeSpec("r1", {{"a", {20, 10}}});
  spec.mutable_groups(0)->set_rule("muon");
  Start(Need(spec));
  EXPECT_THAT(std::string(CreateRun(spec).status().message()),
              HasSubstr("products of a fake GPU or products of another GPU; start a daemon for each kind of GPU"));
}

TEST_F(SeveralGpusRpcTest, ARunThatFitsNowhereIsRefusedWithTheRoomOfEachGpu) {
  const v1::RunSpec spec = SixTensors("large");
  Start(Need(spec) / 4);
  const absl::Status status = CreateRun(spec).status();
  EXPECT_EQ(status.code(), absl::StatusCode::kResourceExhausted);
  const std::string room = absl::StrCat(Need(spec) / 4, " of ", Need(spec) / 4, " free");
  EXPECT_THAT(std::string(status.message()),
              HasSubstr(absl::StrCat("cuda:0 has ", room, "; cuda:1 has ", room, "; cuda:2 has ", room)));
}

TEST_F(SeveralGpusRpcTest, AFailedGpuTakesItsRunsAndNoOthers) {
  Start(1 << 24);
  Trainer lost = StartTrainer(SixTensors("lost"));
  Trainer other = StartTrainer(SixTensors("other"));
  ASSERT_NE(GpuOf("lost"), GpuOf("other"));
  ExpectSteps(&lost, 1, 2);
  const size_t failed = GpuOf("lost");
  Break(failed);
  lost.wire->Begin(3);
  SendAll(lost, 0, 3);
  const grpc::Status end = lost.wire->Finish();
  EXPECT_EQ(end.error_code(), grpc::StatusCode::DATA_LOSS);
  EXPECT_EQ(end.error_message(), "run 'lost' is lost: an illegal address was met; create it anew and load the weights");
  const v1::RunStatus status = Status("lost");
  EXPECT_EQ(status.state(), v1::RUN_STATE_FAILED);
  EXPECT_EQ(status.failure(), end.error_message());
  v1::AttachRequest request;
  request.set_run_id("lost");
  v1::AttachResponse response;
  EXPECT_EQ(Attach(request, &response).error_code(), grpc::StatusCode::DATA_LOSS);

  ExpectSteps(&other, 1, 4);
  const std::string label = absl::StrCat("{device=\"cuda:", failed, "\"}");
  EXPECT_THAT(metrics_.Serialize(), HasSubstr(absl::StrCat("ballast_gpu_failures_total", label, " 1\n")));
  EXPECT_THAT(metrics_.Serialize(), HasSubstr(absl::StrCat("ballast_gpu_memory_limit_bytes", label, " 0\n")));
  EXPECT_EQ(GetServer().memory_limit_bytes(), 2u << 24);

  // The same trainer, started again.
  Trainer again = StartTrainer(SixTensors("lost"));
  EXPECT_NE(GpuOf("lost"), failed);
  EXPECT_EQ(Status("lost").state(), v1::RUN_STATE_WAITING);
  ExpectSteps(&again, 1, 2);
  EXPECT_FALSE(none_left_.HasBeenNotified());
}

TEST_F(SeveralGpusRpcTest, AnUploadToAFailingGpuEnds) {
  Start(1 << 24);
  ASSERT_TRUE(CreateRun(SixTensors("r")).ok());
  const std::string token = AttachFresh("r").session_token();
  Break(GpuOf("r"));
  v1::LoadStateResponse response;
  EXPECT_EQ(LoadAll(ToRunSpec(SixTensors("r"), config_.limits).value(), token, &response).error_code(),
            grpc::StatusCode::DATA_LOSS);
}

TEST_F(SeveralGpusRpcTest, TheFailureOfTheLastGpuIsReported) {
  Start(1 << 24);
  for (size_t i = 0; i < kGpus; ++i) {
    const std::string run_id = absl::StrCat("r", i);
    Trainer t = StartTrainer(SixTensors(run_id));
    EXPECT_FALSE(none_left_.HasBeenNotified());
    Break(GpuOf(run_id));
    t.wire->Begin(1);
    SendAll(t, 0, 1);
    EXPECT_EQ(t.wire->Finish().error_code(), grpc::StatusCode::DATA_LOSS);
  }
  none_left_.WaitForNotification();
  EXPECT_THAT(std::string(last_failure_.message()), HasSubstr("illegal address"));
  EXPECT_EQ(CreateRun(SixTensors("r9")).status().code(), absl::StatusCode::kResourceExhausted);
  EXPECT_EQ(server_->Drain(10), 0);
}

}  // namespace
}  // namespace ballast::testing
