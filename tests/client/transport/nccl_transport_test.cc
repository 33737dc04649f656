// Trainers on GPUs and a daemon on one, with NCCL between them, all three played by the tests (fake_cuda.h, fake_gpu.h,
// fake_nccl.h): payloads that go by NCCL have the bits of those that go through the host, and whatever fails of NCCL costs a
// rank no more than the way back to the host.
#include "client/cpp/transport/nccl_transport.h"

#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include <memory>
#include <optional>
#include <string>
#include <thread>
#include <vector>

#include "tests/client/cutting_proxy.h"
#include "tests/client/in_fork.h"
#include "tests/client/quiet_client.h"
#include "tests/client/transport/nccl_daemon.h"
#include "tests/server/no_threads.h"

namespace ballast {
namespace {

using ::testing::AllOf;
using ::testing::Contains;
using ::testing::ElementsAre;
using ::testing::HasSubstr;
using ::testing::IsEmpty;

constexpr int kSystemError = 2;  // ncclResult_t

class NcclTransportTest : public GpuTeamTest {
 protected:
  NcclTransportTest() : GpuTeamTest(TransportChoice::kNccl) { StandIn().Reset(); }

  // Ranks that wait for NCCL before they begin.
  std::vector<TeamRank> ByNccl(uint32_t world) const {
    std::vector<TeamRank> team = OnGpus(world);
    for (TeamRank& rank : team) rank.awaits_gpu = true;
    return team;
  }
  // A client that is attached, and connected by NCCL.
  std::unique_ptr<Client> Connected(const std::string& server, LeastSquares* problem) {
    auto client = told_.Connect(server);
    const auto joined = problem->Join(*client, {.run_id = "least-squares", .transport = transport_, .gpu = 0});
    EXPECT_TRUE(joined.ok()) << joined.status();
    EXPECT_SOON(client->shares_gpu(), true);
    return client;
  }

  ToldLines told_;
};

TEST_F(NcclTransportTest, GivesTheBitsOfTheHosts) {
  RealDaemon on_cpu(RealDaemon::Small()), daemon(WithNccl(), Gpus());
  for (const uint32_t world : {1u, 2u, 4u, 8u}) {
    for (const uint32_t micros : {1u, 2u}) {
      SCOPED_TRACE(absl::StrCat(world, " ranks, ", micros, " micro-batches"));
      const auto expected = TrainTeam(on_cpu.address(), Ranks(world, TransportChoice::kGrpc), micros);
      const int sums = state_.sum_launches;
      const int64_t sent = StandIn().sent();
      EXPECT_EQ(TrainTeam(daemon.address(), ByNccl(world), micros), expected);
      EXPECT_GT(state_.sum_launches, sums);
      EXPECT_GT(StandIn().sent(), sent + (int64_t{world} << 20));
      std::vector<TeamRank> mixed = ByNccl(world);
      mixed.back() = {TransportChoice::kGrpc};
      EXPECT_EQ(TrainTeam(daemon.address(), mixed, micros), expected);
    }
  }
}

TEST_F(NcclTransportTest, SoItIsInRunsOfEveryKind) {
  RealDaemon daemon(WithNccl(), Gpus());
  const std::vector<SpecChange> kinds = KindsOfGpuRuns();
  for (size_t kind = 0; kind < kinds.size(); ++kind) {
    SCOPED_TRACE(absl::StrCat("kind ", kind));
    std::vector<TeamRank> team = ByNccl(2);
    team.back().weights_on_gpu = true;
    ExpectTheBitsOfGrpc(daemon.address(), team, 2, kinds[kind]);
  }
}

TEST_F(NcclTransportTest, SoItIsOnSeveralDaemons) {
  RealDaemon on_cpu(RealDaemon::Small()), one(WithNccl(), Gpus()), other(WithNccl(), Gpus());
  const auto expected = TrainTeam(on_cpu.address(), Ranks(2, TransportChoice::kGrpc), 2);
  const int64_t sent = StandIn().sent();
  EXPECT_EQ(TrainTeam(absl::StrCat(one.address(), ",", other.address()), ByNccl(2), 2), expected);
  EXPECT_GT(StandIn().sent(), sent + (2 << 20));
}

TEST_F(NcclTransportTest, ASmallWindowNeverHangs) {
  Config config = WithNccl();
  config.limits.credit_bytes = config.limits.chunk_bytes;
  RealDaemon daemon(config, Gpus());
  ExpectTheBitsOfGrpc(daemon.address(), ByNccl(3), 2);
}

// Payloads go in messages until both ends have come, which no step waits for.
TEST_F(NcclTransportTest, TrainingBeginsBeforeNcclDoes) {
  RealDaemon daemon(WithNccl(), Gpus());
  const auto expected = TrainTeam(daemon.address(), Ranks(2, TransportChoice::kGrpc), 2);
  for (int i = 0; i < 10; ++i) ASSERT_EQ(TrainTeam(daemon.address(), OnGpus(2), 2), expected);
}

TEST_F(NcclTransportTest, IsTakenWithoutAWordAndLeavesNothingBehind) {
  RealDaemon daemon(WithNccl(), Gpus());
  const FakeCuda::Live none = Cuda().live();
  const int64_t before = state_.live_bytes;
  EXPECT_THAT(LinesOfTraining(daemon.address(), 0), IsEmpty());
  EXPECT_THAT(rank_line_, HasSubstr("transport nccl"));
  EXPECT_TRUE(QuietClient(daemon.address())->DeleteRun("least-squares", /*force=*/true).ok());
  EXPECT_SOON(Cuda().live(), none);
  EXPECT_SOON(StandIn().live(), 0);
  EXPECT_SOON(state_.live_bytes.load(), before);
}

TEST_F(NcclTransportTest, WhatTheDaemonDoesNotOfferIsSaidInOneLine) {
  const auto says = [](const char* why) {
    return ElementsAre(AllOf(HasSubstr("no NCCL with the daemon"), HasSubstr(why), HasSubstr("shared memory or gRPC")));
  };
  {
    Config config = WithNccl();
    config.nccl = false;
    RealDaemon daemon(config, Gpus());
    EXPECT_THAT(LinesOfTraining(daemon.address(), 0), says("start it with --nccl"));
  }
  {
    RealDaemon daemon(WithNccl(), Gpus());
    StandIn().SetVersion(23001);
    EXPECT_THAT(LinesOfTraining(daemon.address(), 0), says("the trainer has NCCL 2.30.1, the daemon 2."));
    StandIn().Reset();
  }
  {
    RealDaemon daemon(WithNccl(), Gpus());
    EXPECT_THAT(LinesOfTraining(daemon.address(), 0, [this] { state_.allocations_left = 0; }), says("is full"));
    state_.allocations_left = 1 << 30;
  }
  {
    RealDaemon daemon(WithNccl(), Gpus());
    std::optional<testing::NoThreads> none;
    EXPECT_THAT(LinesOfTraining(daemon.address(), 0, [&] { none.emplace(); }), says("the system refused a thread"));
  }
  EXPECT_EQ(state_.sum_launches, 0);
}

TEST_F(NcclTransportTest, ADaemonWithoutAGpuOrNcclDoesNotStartWithIt) {
  Metrics metrics{BuildInfo{}};
  Config config = WithNccl();
  config.device = "cpu";
  config.listen = "127.0.0.1:0";
  const auto started = Server::Start(config, &metrics, "", [](const absl::Status&) {});
  EXPECT_EQ(started.status().code(), absl::StatusCode::kFailedPrecondition);
  EXPECT_THAT(std::string(started.status().message()), HasSubstr("NCCL is between GPUs"));
}

TEST_F(NcclTransportTest, ATrainerWithoutAGpuIsRefused) {
  RealDaemon daemon(WithNccl(), Gpus());
  const auto client = QuietClient(daemon.address());
  ASSERT_TRUE(client->CreateRun(LeastSquares::Spec()).ok());
  const auto attached = client->Attach({.run_id = "least-squares", .transport = TransportChoice::kNccl});
  EXPECT_EQ(attached.status().code(), absl::StatusCode::kFailedPrecondition);
  EXPECT_THAT(std::string(attached.status().message()), HasSubstr("AttachOptions.gpu"));
}

// --- loss -----------------------------------------------------------------------------------------------------------

TEST_F(NcclTransportTest, ABrokenNetworkCostsOneLineAndTheNextSessionHasItAgain) {
  RealDaemon daemon(WithNccl(), Gpus());
  LeastSquares problem;
  {
    const auto client = Connected(daemon.address(), &problem);
    ASSERT_TRUE(problem.Step(*client).ok());
    StandIn().Break();
    for (int i = 0; i < 3; ++i) {
      const auto stepped = problem.Step(*client);
      ASSERT_TRUE(stepped.ok()) << stepped.status();
    }
    EXPECT_SOON(client->shares_gpu(), false);
    EXPECT_THAT(told_.lines(), Contains(AllOf(HasSubstr("no NCCL"), HasSubstr("shared memory or gRPC"))));
  }
  const auto client = Connected(daemon.address(), &problem);
  EXPECT_TRUE(problem.Step(*client).ok());
}

TEST_F(NcclTransportTest, WhatHasWorkedIsConnectedAnew) {
  RealDaemon daemon(WithNccl(), Gpus());
  LeastSquares problem;
  const auto client = Connected(daemon.address(), &problem);
  constexpr int64_t kPayloadBytes = 16 << 10;  // at most
  while (StandIn().sent() < static_cast<int64_t>(NcclTransport::kWorked) * kPayloadBytes) {
    ASSERT_TRUE(problem.Step(*client).ok());
  }
  StandIn().Break();
  ASSERT_TRUE(problem.Step(*client).ok());
  EXPECT_THAT(told_.lines(), Contains(AllOf(HasSubstr("no NCCL"), HasSubstr("connected anew"))));
  EXPECT_SOON(client->shares_gpu(), true);
  const int64_t sent = StandIn().sent();
  ASSERT_TRUE(problem.Step(*client).ok());
  EXPECT_GT(StandIn().sent(), sent);
}

// Whatever function of NCCL's fails, at either end and whichever time: the steps are those of a run without NCCL.
TEST_F(NcclTransportTest, WhateverFailsTheStepsAreTheSame) {
  RealDaemon daemon(WithNccl(), Gpus());
  const auto expected = TrainTeam(daemon.address(), Ranks(2, TransportChoice::kGrpc), 2);
  for (const char* function : {"ncclGetUniqueId", "ncclCommInitRankConfig", "ncclCommGetAsyncError", "ncclGroupStart",
                               "ncclGroupEnd", "ncclSend", "ncclRecv", "ncclCommAbort"}) {
    for (const int64_t call : {1, 4, 13, 40}) {
      SCOPED_TRACE(absl::StrCat(function, ", call ", call));
      StandIn().FailCall(function, call, kSystemError);
      ASSERT_EQ(TrainTeam(daemon.address(), OnGpus(2), 2), expected);
      StandIn().FailCall(function, 0, 0);
    }
  }
}

TEST_F(NcclTransportTest, CutsOfTheStreamAreInvisible) {
  RealDaemon on_cpu(RealDaemon::Small()), daemon(WithNccl(), Gpus());
  LeastSquares expected, problem;
  const auto undisturbed = QuietClient(on_cpu.address());
  ASSERT_TRUE(expected.Join(*undisturbed).ok());
  ASSERT_TRUE(problem.Join(*QuietClient(daemon.address())).ok());  // uploads, and leaves
  CuttingProxy proxy(daemon.address(), {9'000, 70'000, 12'000, 90'000, 15'000, 60'000, 10'000, 13'000});
  const auto client = QuietClient(proxy.address());
  const auto joined = problem.Join(*client, {.run_id = "least-squares", .transport = transport_, .gpu = 0});
  ASSERT_TRUE(joined.ok()) << joined.status();
  for (int step = 0; proxy.connections() <= 8; ++step) {
    const auto here = problem.Step(*client), there = expected.Step(*undisturbed);
    ASSERT_TRUE(here.ok()) << here.status();
    ASSERT_EQ(*here, *there) << "step " << step;
  }
  EXPECT_GT(StandIn().sent(), 100'000);
}

TEST_F(NcclTransportTest, AForksEndLeavesTheParentsNcclAlone) {
  RealDaemon daemon(WithNccl(), Gpus());
  LeastSquares problem;
  auto client = Connected(daemon.address(), &problem);
  ASSERT_TRUE(problem.Step(*client).ok());
  ASSERT_TRUE(client->BeginStep({}).ok());
  problem.Backward();
  ASSERT_TRUE(client->Push(0, problem.Gradient(0)).ok());
  EXPECT_TRUE(HoldsInFork([&] {
    const bool refused = absl::IsFailedPrecondition(client->Push(1, problem.Gradient(1)));
    client.reset();
    return refused;
  }));
  ASSERT_TRUE(client->Push(1, problem.Gradient(1)).ok());
  ASSERT_TRUE(client->EndStep({}).get().ok());
  EXPECT_TRUE(client->shares_gpu());
  EXPECT_THAT(told_.lines(), IsEmpty());
}

// What one rank's NCCL waits for is nothing to another's.
TEST_F(NcclTransportTest, ARankThatLeavesTakesNoOtherWithIt) {
  RealDaemon daemon(WithNccl(), Gpus());
  LeastSquares problem, other_problem;
  const auto client = Connected(daemon.address(), &problem);
  {
    const auto leaver = QuietClient(daemon.address());
    v1::RunSpec spec = LeastSquares::Spec();
    spec.set_run_id("other");
    ASSERT_TRUE(leaver->CreateRun(spec).ok());
    ASSERT_TRUE(leaver->Attach({.run_id = "other", .transport = transport_, .gpu = 1}).ok());
    EXPECT_SOON(leaver->shares_gpu(), true);
  }
  EXPECT_TRUE(problem.Step(*client).ok());
  EXPECT_TRUE(client->shares_gpu());
}

// The end of a communicator may take NCCL long.
TEST_F(NcclTransportTest, ALinkThatIsLongInEndingHoldsNobodyUp) {
  RealDaemon daemon(WithNccl(), Gpus());
  LeastSquares problem;
  auto leaver = Connected(daemon.address(), &problem);
  StandIn().HoldAborts(true);
  std::thread leaves([&] { leaver.reset(); });
  EXPECT_TRUE(StandIn().AwaitHeldAborts(4));  // of both links, at both ends, at once
  const auto client = QuietClient(daemon.address());
  const auto joined = problem.Join(*client);
  EXPECT_TRUE(joined.ok()) << joined.status();
  EXPECT_TRUE(problem.Step(*client).ok());
  StandIn().HoldAborts(false);
  leaves.join();
}

}  // namespace
}  // namespace ballast
