#include <gmock/gmock.h>
#include <grpcpp/generic/generic_stub.h>
#include <gtest/gtest.h>

#include <atomic>
#include <chrono>
#include <filesystem>
#include <limits>
#include <thread>

#include "absl/strings/str_cat.h"
#include "proto/unix_address.h"

#include "tests/server/rpc/rpc_fixture.h"

namespace ballast::testing {
namespace {

using ::testing::AllOf;
using ::testing::Contains;
using ::testing::HasSubstr;

class AdminRpcTest : public RpcTest {
 protected:
  void SetUp() override { StartServer(); }

  grpc::Status Delete(const std::string& run_id, bool force, v1::DeleteRunResponse* response) {
    grpc::ClientContext context;
    v1::DeleteRunRequest request;
    request.set_run_id(run_id);
    request.set_force(force);
    return admin_->DeleteRun(&context, request, response);
  }
  v1::GetServerResponse GetServer() {
    grpc::ClientContext context;
    v1::GetServerResponse response;
    EXPECT_TRUE(admin_->GetServer(&context, {}, &response).ok());
    return response;
  }
  // A unary call by name, without its stub: bytes in, bytes out.
  grpc::Status CallByName(const std::string& method, const std::string& request, std::string* response) {
    grpc::TemplatedGenericStub<grpc::ByteBuffer, grpc::ByteBuffer> stub(channel_);
    grpc::ClientContext context;
    grpc::CompletionQueue queue;
    const grpc::Slice slice(request);
    const grpc::ByteBuffer in(&slice, 1);
    grpc::ByteBuffer out;
    grpc::Status status;
    const auto call = stub.PrepareUnaryCall(&context, method, in, &queue);
    call->StartCall();
    call->Finish(&out, &status, nullptr);
    void* tag = nullptr;
    bool ok = false;
    queue.Next(&tag, &ok);
    grpc::Slice joined;
    if (status.ok() && out.DumpToSingleSlice(&joined).ok()) {
      response->assign(reinterpret_cast<const char*>(joined.begin()), joined.size());
    }
    return status;
  }
};

TEST_F(AdminRpcTest, CreateRunIsIdempotentAndNamesADifference) {
  const auto first = CreateRun(SmallSpec());
  ASSERT_TRUE(first.ok()) << first.status();
  EXPECT_TRUE(first->created());
  EXPECT_EQ(first->spec_sha256().size(), 64u);
  const auto again = CreateRun(SmallSpec());
  ASSERT_TRUE(again.ok());
  EXPECT_FALSE(again->created());
  EXPECT_EQ(again->spec_sha256(), first->spec_sha256());
  v1::RunSpec other = SmallSpec();
  other.set_seed(8);
  const auto refused = CreateRun(other);
  EXPECT_EQ(refused.status().code(), absl::StatusCode::kFailedPrecondition);
  EXPECT_THAT(std::string(refused.status().message()), HasSubstr("seed is 7, asked for is 8"));
}

TEST_F(AdminRpcTest, LiveBytesAreThePlannedBytes) {
  grpc::ClientContext context;
  v1::PlanRequest request;
  *request.mutable_spec() = SmallSpec();
  v1::PlanResponse planned;
  ASSERT_TRUE(admin_->Plan(&context, request, &planned).ok());
  const auto created = CreateRun(SmallSpec());
  ASSERT_TRUE(created.ok());
  const v1::ByteCounts live = Status("r1").bytes();
  EXPECT_EQ(live.SerializeAsString(), planned.plan().server().SerializeAsString());
  EXPECT_EQ(live.SerializeAsString(), created->plan().server().SerializeAsString());
  const uint64_t sum =
      live.weights() + live.momentum() + live.variance() + live.gradients() + live.staging() + live.client_state();
  EXPECT_EQ(GetServer().memory_reserved_bytes(), sum);
  v1::DeleteRunResponse deleted;
  ASSERT_TRUE(Delete("r1", false, &deleted).ok());
  EXPECT_EQ(deleted.freed_bytes(), sum);
  EXPECT_EQ(GetServer().memory_reserved_bytes(), 0u);
}

TEST_F(AdminRpcTest, TooMuchMemoryIsRefusedWithBothNumbers) {
  const auto refused = CreateRun(MakeSpec("big", {{"w", {1 << 20, 1 << 10}}}));
  EXPECT_EQ(refused.status().code(), absl::StatusCode::kResourceExhausted);
  const std::string message(refused.status().message());
  EXPECT_THAT(message, HasSubstr("run 'big' needs "));
  EXPECT_THAT(message, HasSubstr("weights 3221225472"));
  EXPECT_THAT(message, HasSubstr("1073741824 of 1073741824 free"));
  EXPECT_TRUE(CreateRun(SmallSpec()).ok());
}

TEST_F(AdminRpcTest, MoreThanCanBeCountedIsRefusedWithBothNumbers) {
  const auto refused = CreateRun(UncountableSpec());
  EXPECT_EQ(refused.status().code(), absl::StatusCode::kResourceExhausted);
  EXPECT_THAT(std::string(refused.status().message()),
              AllOf(HasSubstr("run 'r1' needs at least 18446744073709551615 bytes"), HasSubstr(" free; delete a run")));
  EXPECT_EQ(GetServer().memory_reserved_bytes(), 0u);
}

// The run's weights are small, but each of its ranks may bring 100,000 chunks a micro-batch.
TEST_F(AdminRpcTest, AccountsTooLargeAreRefusedWithBothNumbers) {
  server_.reset();
  Config config = DefaultConfig();
  config.limits.credit_bytes = 1 << 20;
  StartServer(config);
  v1::RunSpec spec = MakeSpec("many", {});
  for (int i = 0; i < 100000; ++i) {
    v1::TensorSpec* tensor = spec.add_tensors();
    tensor->set_name(absl::StrCat(i));
    tensor->set_dtype("fp32");
  }
  spec.set_ranks(64);
  spec.set_accumulation(1024);
  const auto refused = CreateRun(spec);
  EXPECT_EQ(refused.status().code(), absl::StatusCode::kResourceExhausted) << refused.status();
  EXPECT_THAT(std::string(refused.status().message()), HasSubstr("1073741824 of 1073741824 free"));
  EXPECT_EQ(GetServer().memory_reserved_bytes(), 0u);
}

TEST_F(AdminRpcTest, MemoryTheSystemRefusesIsAnErrorAndLeavesNothing) {
  server_.reset();
  Config config = DefaultConfig();
  config.memory_limit = std::numeric_limits<uint64_t>::max();
  StartServer(config);
  const auto refused = CreateRun(MakeSpec("big", {{"w", {int64_t{1} << 40}}, {"x", {int64_t{1} << 40}}}));
  EXPECT_EQ(refused.status().code(), absl::StatusCode::kResourceExhausted) << refused.status();
  EXPECT_EQ(GetServer().memory_reserved_bytes(), 0u);
  EXPECT_TRUE(CreateRun(SmallSpec()).ok());
}

TEST_F(AdminRpcTest, MaxRunsIsKept) {
  server_.reset();
  Config config = DefaultConfig();
  config.max_runs = 1;
  StartServer(config);
  ASSERT_TRUE(CreateRun(SmallSpec()).ok());
  v1::RunSpec other = SmallSpec();
  other.set_run_id("r2");
  EXPECT_THAT(std::string(CreateRun(other).status().message()), HasSubstr("max_runs is 1"));
  v1::DeleteRunResponse deleted;
  ASSERT_TRUE(Delete("r1", false, &deleted).ok());
  EXPECT_TRUE(CreateRun(other).ok());
}

TEST_F(AdminRpcTest, DeleteIsRefusedWhileATrainerIsAttached) {
  Trainer t = StartTrainer(SmallSpec());
  v1::DeleteRunResponse deleted;
  const grpc::Status refused = Delete("r1", false, &deleted);
  EXPECT_EQ(refused.error_code(), grpc::FAILED_PRECONDITION);
  EXPECT_THAT(refused.error_message(), HasSubstr("force"));
  Step(&t, 1);
  ASSERT_TRUE(Delete("r1", true, &deleted).ok());
  EXPECT_EQ(t.wire->Finish().error_code(), grpc::NOT_FOUND);
  EXPECT_EQ(Delete("r1", true, &deleted).error_code(), grpc::NOT_FOUND);
  // The id may be used again, and the old token is nobody's.
  ASSERT_TRUE(CreateRun(SmallSpec()).ok());
  Wire wire(trainer_.get());
  EXPECT_FALSE(wire.Open(t.token));
  EXPECT_EQ(wire.Finish().error_code(), grpc::NOT_FOUND);
}

TEST_F(AdminRpcTest, ListsAndShowsRuns) {
  ASSERT_TRUE(CreateRun(SmallSpec()).ok());
  grpc::ClientContext context;
  v1::ListRunsResponse list;
  ASSERT_TRUE(admin_->ListRuns(&context, {}, &list).ok());
  ASSERT_EQ(list.runs_size(), 1);
  EXPECT_EQ(list.runs(0).run_id(), "r1");
  EXPECT_EQ(list.runs(0).state(), v1::RUN_STATE_WAITING);
  grpc::ClientContext other;
  v1::GetRunRequest request;
  request.set_run_id("r1");
  v1::GetRunResponse run;
  ASSERT_TRUE(admin_->GetRun(&other, request, &run).ok());
  EXPECT_EQ(run.spec().tensors_size(), 3);
  EXPECT_EQ(run.spec().groups(0).master(), "split24");
}

TEST_F(AdminRpcTest, GetServerTellsWhatTheRegistryHolds) {
  const v1::GetServerResponse server = GetServer();
  EXPECT_THAT(server.rules(), Contains("adamw"));
  EXPECT_THAT(server.masters(), Contains("split24"));
  EXPECT_THAT(server.states(), Contains("companded8"));
  EXPECT_THAT(server.wire_formats(), Contains("bf16"));
  EXPECT_THAT(server.device(), HasSubstr("cpu, 2 threads"));
  EXPECT_EQ(server.state(), "serving");
  EXPECT_EQ(server.memory_limit_bytes(), 1u << 30);
}

// The most that a spec may ask for: 64 layers with long names, and as many patterns and instructions as are taken.
v1::RunSpec HostileSpec() {
  v1::RunSpec spec = MakeSpec("hostile", {});
  for (int layer = 0; layer < 64; ++layer) {
    v1::TensorSpec* t = spec.add_tensors();
    t->set_name(absl::StrCat(std::string(120, 'a'), ".", layer));
    t->add_shape(64);  // two dimensions and 4,096 elements: watched for RMS_t, or its thresholds were refused at once
    t->add_shape(64);
    t->set_dtype("fp32");
  }
  for (int i = 0; i < 1024; ++i) {
    v1::LayerThreshold* t = spec.mutable_spikes()->add_layers();
    t->set_layer(absl::StrCat("a*(a|aa)*.*[0-9]"));
    t->set_rms_threshold(3);
  }
  return spec;
}

// gRPC's threads belong to the streams. The bound of a step is far above what it takes.
TEST_F(AdminRpcTest, StepsGoOnWhileHostilePlansAreMade) {
  Trainer t = StartTrainer(SmallSpec());
  v1::PlanRequest request;
  *request.mutable_spec() = HostileSpec();
  std::atomic<bool> over = false;
  std::atomic<int> planned = 0;
  std::vector<std::thread> hostile;
  for (int i = 0; i < 6; ++i) {
    hostile.emplace_back([&] {
      while (!over) {
        grpc::ClientContext context;
        v1::PlanResponse response;
        const grpc::Status status = admin_->Plan(&context, request, &response);
        const bool told = context.GetServerTrailingMetadata().contains("ballast-retry-after-ms");
        EXPECT_TRUE(status.ok() || (status.error_code() == grpc::RESOURCE_EXHAUSTED && told)) << status.error_message();
        planned += status.ok() ? 1 : 0;
      }
    });
  }
  for (uint64_t step = 1; step <= 20 || planned < 6; ++step) {
    const auto begin = std::chrono::steady_clock::now();
    Step(&t, step);
    EXPECT_LT(std::chrono::steady_clock::now() - begin, std::chrono::seconds(10)) << "step " << step;
  }
  over = true;
  for (std::thread& thread : hostile) thread.join();
}

TEST_F(AdminRpcTest, HealthIsServedForBothNames) {
  for (const std::string& name : {std::string(), std::string("ballast.v1.TrainerService")}) {
    std::string response;
    const std::string request = name.empty() ? "" : "\x0a" + std::string(1, static_cast<char>(name.size())) + name;
    ASSERT_TRUE(CallByName("/grpc.health.v1.Health/Check", request, &response).ok()) << name;
    EXPECT_EQ(response, std::string("\x08\x01")) << name;  // status: SERVING
  }
}

TEST_F(AdminRpcTest, ReflectionIsThereOnlyWhenAsked) {
  constexpr char kMethod[] = "/grpc.reflection.v1alpha.ServerReflection/ServerReflectionInfo";
  std::string response;
  EXPECT_EQ(CallByName(kMethod, "", &response).error_code(), grpc::UNIMPLEMENTED);
  server_.reset();
  Config config = DefaultConfig();
  config.reflection = true;
  StartServer(config);
  ASSERT_TRUE(CallByName(kMethod, std::string("\x3a\x01*", 3), &response).ok());  // list_services: "*"
  EXPECT_THAT(response, HasSubstr("ballast.v1.TrainerService"));
}

TEST_F(AdminRpcTest, APortInUseIsAnErrorNamingIt) {
  Config config = DefaultConfig();
  config.listen = server_->address();
  const auto second = Server::Start(config, &metrics_, "");
  ASSERT_FALSE(second.ok());
  EXPECT_THAT(std::string(second.status().message()), HasSubstr(server_->address()));
}

TEST_F(AdminRpcTest, AGpuThatIsNotThereIsAnErrorWithTheFix) {
  Config config = DefaultConfig();
  config.device = "cuda:0";
  const auto server = Server::Start(config, &metrics_, "");
  ASSERT_FALSE(server.ok());
  EXPECT_THAT(std::string(server.status().message()), HasSubstr("set device to cpu or auto"));
}

TEST_F(AdminRpcTest, AUnixSocketWillDoWhateverItsPath) {
  Config config = DefaultConfig();
  const std::string path = ::testing::TempDir() + "/ballast %41? " + std::to_string(::getpid()) + ".sock";
  config.listen = "unix:" + path;
  auto server = Server::Start(config, &metrics_, "");
  ASSERT_TRUE(server.ok()) << server.status();
  EXPECT_EQ((*server)->address(), config.listen);
  EXPECT_TRUE(std::filesystem::is_socket(path));
  const auto stub =
      v1::AdminService::NewStub(grpc::CreateChannel(ForGrpc(config.listen), grpc::InsecureChannelCredentials()));
  grpc::ClientContext context;
  v1::GetServerResponse response;
  EXPECT_TRUE(stub->GetServer(&context, {}, &response).ok());
}

TEST_F(AdminRpcTest, DrainLetsTheOpenStepFinishThenEndsTheStream) {
  Trainer t = StartTrainer(SmallSpec());
  t.wire->Begin(1);
  SendAll(t, 0, 1);
  bool told = false;
  uint64_t credit = 0;
  while (credit < 60000) credit += t.wire->Read()->credit().bytes();  // the step is open over there
  int left_open = -1;
  std::thread drain([&] { left_open = server_->Drain(60); });
  while (!told) told = t.wire->Read()->has_drain();
  EXPECT_FALSE(server_->ready());
  SendAll(t, 1, 1);
  SendAll(t, 2, 1);
  t.wire->EndStep();
  const StepAnswer answer = ReadStep(t.wire.get());
  ASSERT_TRUE(answer.result);
  EXPECT_EQ(answer.result->outcome(), v1::STEP_OUTCOME_APPLIED);
  EXPECT_EQ(t.wire->Finish().error_code(), grpc::UNAVAILABLE);
  drain.join();
  EXPECT_EQ(left_open, 0);
}

TEST_F(AdminRpcTest, WhileTheDaemonEndsNoRunIsCreatedAndNoRankAttached) {
  Trainer t = StartTrainer(SmallSpec());
  t.wire->Begin(1);
  t.wire->Chunk(Chunks(t.spec, 0, Gradient(t.spec, 0, 1))[0]);
  while (!t.wire->Read()->has_credit()) {
  }
  std::thread drain([&] { server_->Drain(600); });
  while (!t.wire->Read()->has_drain()) {
  }
  const absl::Status created = CreateRun(MakeSpec("r2", {{"w", {4}}})).status();
  EXPECT_EQ(created.code(), absl::StatusCode::kUnavailable);
  EXPECT_THAT(std::string(created.message()), HasSubstr("no new run begins"));
  v1::AttachRequest request;
  request.set_run_id(t.spec.run_id);
  request.set_world(1);
  request.set_protocol_max(1);
  v1::AttachResponse response;
  const grpc::Status attached = Attach(request, &response);
  EXPECT_EQ(attached.error_code(), grpc::UNAVAILABLE);
  EXPECT_THAT(attached.error_message(), HasSubstr("attach to the next one"));
  v1::ListRunsResponse runs;
  grpc::ClientContext context;
  ASSERT_TRUE(admin_->ListRuns(&context, {}, &runs).ok());
  EXPECT_EQ(runs.runs_size(), 1);
  for (uint32_t tensor = 0; tensor < 3; ++tensor) SendAll(t, tensor, 1);
  t.wire->EndStep();
  EXPECT_TRUE(ReadStep(t.wire.get()).result);
  drain.join();
}

TEST_F(AdminRpcTest, DrainGivesUpOnAStepThatDoesNotFinish) {
  Trainer t = StartTrainer(SmallSpec());
  t.wire->Begin(1);
  t.wire->Chunk(Chunks(t.spec, 0, Gradient(t.spec, 0, 1))[0]);
  while (!t.wire->Read()->has_credit()) {
  }
  EXPECT_EQ(server_->Drain(0), 1);
  EXPECT_EQ(t.wire->Finish().error_code(), grpc::UNAVAILABLE);
}

TEST_F(AdminRpcTest, AnIdleServerDrainsAtOnce) {
  EXPECT_TRUE(server_->ready());
  EXPECT_TRUE(server_->live().ok());
  EXPECT_EQ(server_->Drain(60), 0);
}

}  // namespace
}  // namespace ballast::testing
