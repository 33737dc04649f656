// Trainers on a GPU and a daemon on one, both played by the tests (fake_cuda.h, fake_gpu.h): gradients and weights in memory
// that they share have the bits of those that go through the host, and what cannot be shared goes there, with a line that
// says why.
#include <dlfcn.h>
#include <gmock/gmock.h>
#include <gtest/gtest.h>
#include <sys/mman.h>
#include <unistd.h>

#include <functional>
#include <memory>
#include <string>
#include <thread>
#include <vector>

#include "absl/strings/match.h"
#include "proto/gpu/gpu.h"

#include "server/device/gpu_device.h"
#include "tests/client/fake_cuda.h"
#include "tests/client/least_squares.h"
#include "tests/client/quiet_client.h"
#include "tests/client/real_daemon.h"
#include "tests/client/told_lines.h"
#include "tests/client/transport/team.h"
#include "tests/eventually.h"
#include "tests/server/device/fake_gpu.h"

namespace ballast {
namespace {

using ::testing::AllOf;
using ::testing::ElementsAre;
using ::testing::HasSubstr;
using ::testing::IsEmpty;

constexpr int kOutOfReach = 2;  // of the fake's GPUs

FakeCuda& Cuda() {
  static void* const library = dlopen(FAKE_CUDA, RTLD_NOW | RTLD_LOCAL);  // found by its name from then on
  static FakeCuda* const cuda = reinterpret_cast<FakeCudaFunction>(dlsym(library, "FakeCudaOfTests"))();
  return *cuda;
}

// Gradients of a rank in the memory of its GPU, each where the one before was.
class GpuGradients {
 public:
  explicit GpuGradients(int number) : gpu_(Gpu::Open(number).value()), memory_(memfd_create("trainer", MFD_CLOEXEC)) {
    EXPECT_EQ(ftruncate(memory_, kBytes), 0);
    at_ = gpu_->Import(memory_, kBytes).value();
  }
  ~GpuGradients() { close(memory_); }
  absl::Span<const std::byte> Place(absl::Span<const std::byte> gradient) {
    EXPECT_TRUE(gpu_->Copy(at_->data(), gradient.data(), gradient.size()).ok());
    return {at_->data(), gradient.size()};
  }

 private:
  static constexpr uint64_t kBytes = 2 << 20;
  const std::shared_ptr<Gpu> gpu_;
  const int memory_;
  std::unique_ptr<Gpu::Memory> at_;
};

class GpuTransportTest : public ::testing::Test {
 protected:
  GpuTransportTest() { Cuda().Reset(); }

  static Config WithSocket() {
    Config config = RealDaemon::Small();
    config.shm_socket = absl::StrCat(::testing::TempDir(), "ballast-gpu-", getpid(), ".sock");
    return config;
  }
  std::vector<std::unique_ptr<Device>> Gpus(int count = 1) {
    std::vector<std::unique_ptr<Device>> devices;
    for (int i = 0; i < count; ++i) {
      devices.push_back(std::make_unique<GpuDevice>(std::make_unique<FakeGpu>(&state_, i), 2));
    }
    return devices;
  }
  std::vector<TeamRank> OnGpus(uint32_t world) {
    std::vector<TeamRank> team;
    for (uint32_t rank = 0; rank < world; ++rank) {
      const auto gradients = std::make_shared<GpuGradients>(static_cast<int>(rank % 2));
      team.push_back({.transport = TransportChoice::kShm,
                      .gpu = static_cast<int>(rank % 2),
                      .place = [gradients](auto g) { return gradients->Place(g); }});
    }
    return team;
  }
  // Trains a little on GPU number `gpu`, with gradients in host memory, and returns the client's lines.
  std::vector<std::string> LinesOfTraining(
      const std::string& server, int gpu, const std::function<void()>& before_attach = [] {}) {
    ToldLines told;
    const auto client = told.Connect(server);
    LeastSquares problem;
    EXPECT_TRUE(client->CreateRun(LeastSquares::Spec()).ok());
    before_attach();
    const auto attached = client->Attach({.run_id = "least-squares", .gpu = gpu});
    EXPECT_TRUE(attached.ok()) << attached.status();
    EXPECT_TRUE(problem.UploadAndBind(*client).ok());
    for (int i = 0; i < 3; ++i) {
      const auto stepped = problem.Step(*client);
      EXPECT_TRUE(stepped.ok()) << stepped.status();
    }
    EXPECT_TRUE(Soon([&] {
      rank_line_ = client->GetRun("least-squares")->status().ranks(0);
      return absl::StrContains(rank_line_, "transport");
    })) << rank_line_;
    return told.lines();
  }

  FakeGpuState state_;
  std::string rank_line_;
};

TEST_F(GpuTransportTest, SharedMemoryGivesTheBitsOfTheHosts) {
  RealDaemon on_cpu(RealDaemon::Small()), daemon(WithSocket(), Gpus());
  for (const uint32_t world : {1u, 2u, 3u}) {
    for (const uint32_t micros : {1u, 2u}) {
      SCOPED_TRACE(absl::StrCat(world, " ranks, ", micros, " micro-batches"));
      const auto expected = TrainTeam(on_cpu.address(), Ranks(world, TransportChoice::kGrpc), micros);
      const int sums = state_.sum_launches;
      EXPECT_EQ(TrainTeam(daemon.address(), OnGpus(world), micros), expected);
      EXPECT_GT(state_.sum_launches, sums);
      std::vector<TeamRank> mixed = OnGpus(world);
      mixed.back() = {TransportChoice::kGrpc};
      EXPECT_EQ(TrainTeam(daemon.address(), mixed, micros), expected);
      mixed.front() = {TransportChoice::kShm};  // in host memory
      EXPECT_EQ(TrainTeam(daemon.address(), mixed, micros), expected);
    }
  }
}

// What reads sums, or makes weights, in other ways than the rest.
std::vector<SpecChange> KindsOfRuns() {
  const auto formats = [](const char* gradient, const char* serving) {
    return [=](v1::RunSpec* s) {
      s->mutable_groups(0)->set_gradient(gradient);
      s->mutable_groups(0)->set_serving(serving);
    };
  };
  const auto rule = [](const char* name) { return [=](v1::RunSpec* s) { s->mutable_groups(0)->set_rule(name); }; };
  return {
      [](v1::RunSpec* s) { s->set_commit(v1::COMMIT_MODE_STAGED), s->set_max_grad_norm(0.5); },
      [](v1::RunSpec* s) { s->mutable_tensor_clip()->set_warmup_steps(1); },
      [](v1::RunSpec* s) { s->mutable_spikes()->set_curvature(true); },
      [](v1::RunSpec* s) { s->set_commit(v1::COMMIT_MODE_STAGED), s->mutable_spikes()->set_curvature(true); },
      [](v1::RunSpec* s) { s->mutable_rewind()->set_snapshots(2), s->add_averages(0.9); },
      [](v1::RunSpec* s) {
        s->add_groups()->set_rule("muon");
        v1::TensorSpec* const matrix = s->mutable_tensors(0);
        matrix->set_group(1);
        matrix->set_shape(0, 300);
        matrix->add_shape(100);
      },
      rule("stable_adamw"),
      rule("collage_plus"),
      formats("fp16", "int8-tensor"),
      formats("fp8-e5m2", "fp8-e4m3"),
  };
}

TEST_F(GpuTransportTest, SoItIsInRunsOfEveryKind) {
  RealDaemon daemon(WithSocket(), Gpus());
  const std::vector<SpecChange> kinds = KindsOfRuns();
  for (size_t kind = 0; kind < kinds.size(); ++kind) {
    for (const uint32_t world : {1u, 2u}) {
      SCOPED_TRACE(absl::StrCat("kind ", kind, ", ", world, " ranks and micro-batches"));
      const auto expected =
          TrainTeam(daemon.address(), Ranks(world, TransportChoice::kGrpc), world, nullptr, kinds[kind]);
      const int sums = state_.sum_launches;
      EXPECT_EQ(TrainTeam(daemon.address(), OnGpus(world), world, nullptr, kinds[kind]), expected);
      EXPECT_GT(state_.sum_launches, sums);
    }
  }
}

TEST_F(GpuTransportTest, ASmallWindowNeverHangs) {
  Config config = WithSocket();
  config.limits.credit_bytes = config.limits.chunk_bytes;
  RealDaemon daemon(config, Gpus());
  const auto expected = TrainTeam(daemon.address(), Ranks(3, TransportChoice::kGrpc), 2);
  EXPECT_EQ(TrainTeam(daemon.address(), OnGpus(3), 2), expected);
}

// Chunks that lie in the GPU's memory when the connection is lost are summed from there, or sent again from the host.
TEST_F(GpuTransportTest, CutsAreInvisible) {
  RealDaemon daemon(WithSocket(), Gpus());
  const auto expected = TrainTeam(daemon.address(), Ranks(2, TransportChoice::kGrpc), 2);
  int cuts = 0;
  for (int i = 0; i < 20 || cuts < 20; ++i) {
    ASSERT_EQ(TrainTeam(daemon.address(), OnGpus(2), 2, &cuts), expected);
  }
}

TEST_F(GpuTransportTest, NothingIsLeftBehind) {
  RealDaemon daemon(WithSocket(), Gpus());
  const FakeCuda::Live none = Cuda().live();
  const int64_t before = state_.live_bytes;
  TrainTeam(daemon.address(), OnGpus(2), 1);
  EXPECT_EQ(Cuda().live(), none);
  EXPECT_SOON(state_.live_bytes.load(), before);
}

TEST_F(GpuTransportTest, SharingIsTakenWithoutAWord) {
  RealDaemon daemon(WithSocket(), Gpus());
  EXPECT_THAT(LinesOfTraining(daemon.address(), 0), IsEmpty());
  EXPECT_GT(state_.sum_launches, 0);
  EXPECT_THAT(rank_line_, HasSubstr("transport gpu"));
}

TEST_F(GpuTransportTest, WhatCannotBeSharedGoesThroughTheHostAndOneLineSaysWhy) {
  const auto says = [](const char* why) {
    return ElementsAre(AllOf(HasSubstr("no GPU memory is shared"), HasSubstr(why), HasSubstr("using host memory")));
  };
  {
    RealDaemon daemon(WithSocket());
    EXPECT_THAT(LinesOfTraining(daemon.address(), 0), says("device is the host's processors"));
  }
  {
    RealDaemon daemon(WithSocket(), Gpus());
    EXPECT_THAT(LinesOfTraining(daemon.address(), kOutOfReach), says("cannot reach"));
    EXPECT_EQ(state_.sum_launches, 0);
  }
  {
    state_.shares = false;
    RealDaemon daemon(WithSocket(), Gpus());
    EXPECT_THAT(LinesOfTraining(daemon.address(), 0), says("older than 11.2"));
    state_.shares = true;
  }
  {
    RealDaemon daemon(WithSocket(), Gpus());
    EXPECT_THAT(LinesOfTraining(daemon.address(), 0, [this] { state_.allocations_left = 0; }), says("is full"));
  }
}

TEST_F(GpuTransportTest, AGpuThatIsNotThereIsAnError) {
  RealDaemon daemon(WithSocket(), Gpus());
  const auto client = QuietClient(daemon.address());
  ASSERT_TRUE(client->CreateRun(LeastSquares::Spec()).ok());
  const auto attached = client->Attach({.run_id = "least-squares", .gpu = 7});
  EXPECT_EQ(attached.status().code(), absl::StatusCode::kNotFound);
  EXPECT_THAT(std::string(attached.status().message()), HasSubstr("cuda:7"));
}

// Whatever call of the driver's fails: the trainer ends with its error, or goes through the host, and another may take the
// rank.
TEST_F(GpuTransportTest, AFailedDriverEndsTheTrainerAndNobodyElse) {
  RealDaemon daemon(WithSocket(), Gpus());
  int failed = 0;
  for (int64_t call = 1;; ++call) {
    LeastSquares problem;
    const auto client = QuietClient(daemon.address());
    ASSERT_TRUE(client->CreateRun(LeastSquares::Spec()).ok());
    const int64_t before = Cuda().calls();
    Cuda().FailCall(call, 700);  // an illegal address
    const auto joined = problem.Join(*client, {.run_id = "least-squares", .takeover = true, .gpu = 0});
    absl::Status end = joined.status();
    for (int i = 0; i < 2 && end.ok(); ++i) end = problem.Step(*client).status();
    const bool reached = Cuda().calls() - before >= call;
    Cuda().FailCall(0, 0);
    if (!end.ok()) {
      ++failed;
      EXPECT_THAT(std::string(end.message()), HasSubstr("700")) << call;
    }
    if (!reached) break;
  }
  EXPECT_GT(failed, 5);
}

TEST_F(GpuTransportTest, ATrainerWhoseDriverHasFailedLeavesItsRankToAnother) {
  Config config = WithSocket();
  config.limits.lease_s = 0.2;
  RealDaemon daemon(config, Gpus());
  LeastSquares problem;
  problem.Backward();
  const auto client = QuietClient(daemon.address()), other = QuietClient(daemon.address());
  ASSERT_TRUE(problem.Join(*client, {.run_id = "least-squares", .gpu = 0}).ok());
  ASSERT_TRUE(client->BeginStep({}).ok());
  Cuda().ShutDown();
  EXPECT_FALSE(client->Push(0, problem.Gradient(0)).ok());
  EXPECT_SOON(other->Attach({.run_id = "least-squares"}).status().code(), absl::StatusCode::kOk);
}

TEST_F(GpuTransportTest, WeightsGoStraightToWhereTheyAreBound) {
  RealDaemon daemon(WithSocket(), Gpus());
  const auto client = QuietClient(daemon.address());
  LeastSquares problem;
  ASSERT_TRUE(problem.Join(*client, {.run_id = "least-squares", .gpu = 0}).ok());
  Cuda().HoldCopies(problem.weights(0).data());
  std::thread step([&] { EXPECT_TRUE(problem.Step(*client).ok()); });
  EXPECT_TRUE(Cuda().AwaitHeld());
  Cuda().HoldCopies(nullptr);
  step.join();
}

}  // namespace
}  // namespace ballast
