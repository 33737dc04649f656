// Trainers on a GPU and a daemon on one, both played by the tests (fake_cuda.h, fake_gpu.h): gradients and weights in memory
// that they share have the bits of those that go through the host, and what cannot be shared goes there, with a line that
// says why.
#include <gmock/gmock.h>
#include <gtest/gtest.h>
#include <unistd.h>

#include <memory>
#include <string>
#include <thread>
#include <vector>

#include "tests/client/quiet_client.h"
#include "tests/client/transport/gpu_team.h"

namespace ballast {
namespace {

using ::testing::AllOf;
using ::testing::ElementsAre;
using ::testing::HasSubstr;
using ::testing::IsEmpty;

constexpr int kOutOfReach = 2;  // of the fake's GPUs

class GpuTransportTest : public GpuTeamTest {
 protected:
  GpuTransportTest() : GpuTeamTest(TransportChoice::kShm) {}

  static Config WithSocket() {
    Config config = RealDaemon::Small();
    config.shm_socket = absl::StrCat(::testing::TempDir(), "ballast-gpu-", getpid(), ".sock");
    return config;
  }
};

TEST_F(GpuTransportTest, SharedMemoryGivesTheBitsOfTheHosts) {
  RealDaemon on_cpu(RealDaemon::Small()), daemon(WithSocket(), Gpus());
  for (const uint32_t world : {1u, 3u, 8u}) {
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

TEST_F(GpuTransportTest, SoItIsInRunsOfEveryKind) {
  RealDaemon daemon(WithSocket(), Gpus());
  const std::vector<SpecChange> kinds = KindsOfGpuRuns();
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

// Weights that are bound in a GPU's memory, by every way there.
TEST_F(GpuTransportTest, WeightsMayBeOnTheGpuInRunsOfEveryKind) {
  RealDaemon daemon(WithSocket(), Gpus());
  std::vector<TeamRank> team = OnGpus(3);
  for (TeamRank& rank : team) rank.weights_on_gpu = true;
  team[1].transport = TransportChoice::kGrpc;
  team[2].gpu = kOutOfReach;
  team[2].place = [](auto g) { return g; };
  for (const SpecChange& kind : KindsOfGpuRuns()) {
    ExpectTheBitsOfGrpc(daemon.address(), team, 2, kind);
  }
}

TEST_F(GpuTransportTest, ASmallWindowNeverHangs) {
  Config config = WithSocket();
  config.limits.credit_bytes = config.limits.chunk_bytes;
  RealDaemon daemon(config, Gpus());
  ExpectTheBitsOfGrpc(daemon.address(), OnGpus(3), 2);
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
