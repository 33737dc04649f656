// The transports against each other, on a real daemon: the same bits, whatever carries them and however often it
// breaks.
#include <gmock/gmock.h>
#include <gtest/gtest.h>
#include <unistd.h>

#include <atomic>
#include <cstring>
#include <filesystem>
#include <optional>
#include <random>
#include <thread>

#include "absl/strings/str_cat.h"
#include "absl/synchronization/mutex.h"

#include "tests/client/least_squares.h"
#include "tests/client/quiet_client.h"
#include "tests/client/real_daemon.h"
#include "tests/client/told_lines.h"
#include "tests/client/transport/team.h"
#include "tests/client/transport/unix_cutter.h"
#include "tests/eventually.h"

namespace ballast {
namespace {

using ::testing::AllOf;
using ::testing::Each;
using ::testing::ElementsAre;
using ::testing::Gt;
using ::testing::HasSubstr;
using ::testing::IsEmpty;
using ::testing::SizeIs;

class TransportTest : public ::testing::Test {
 protected:
  static std::string SocketPath() {
    return absl::StrCat(::testing::TempDir(), "ballast-transport-", getpid(), ".sock");
  }
  static Config WithSocket() {
    Config config = RealDaemon::Small();
    config.shm_socket = SocketPath();
    return config;
  }

  static AttachOptions Over(TransportChoice transport) { return {.run_id = "least-squares", .transport = transport}; }
  static std::string RankLine(Client& client) {
    const auto run = client.GetRun("least-squares");
    return run.ok() && run->status().ranks_size() > 0 ? run->status().ranks(0) : "";
  }

  ToldLines told_;
};

TEST_F(TransportTest, GiveTheSameBitsForEveryWorldAndMixture) {
  RealDaemon daemon(WithSocket());
  for (const uint32_t world : {1u, 2u, 3u}) {
    for (const uint32_t micros : {1u, 2u}) {
      SCOPED_TRACE(absl::StrCat(world, " ranks, ", micros, " micro-batches"));
      const auto expected = TrainTeam(daemon.address(), Ranks(world, TransportChoice::kGrpc), micros);
      EXPECT_EQ(TrainTeam(daemon.address(), Ranks(world, TransportChoice::kShm), micros), expected);
      std::vector<TeamRank> mixed = Ranks(world, TransportChoice::kShm);
      mixed[0] = {TransportChoice::kGrpc};
      EXPECT_EQ(TrainTeam(daemon.address(), mixed, micros), expected);
    }
  }
}

// A window of a chunk or two, and ranks that push in different orders.
TEST_F(TransportTest, ASmallWindowNeverHangs) {
  Config config = WithSocket();
  config.limits.credit_bytes = config.limits.chunk_bytes;
  RealDaemon daemon(config);
  const auto expected = TrainTeam(daemon.address(), Ranks(3, TransportChoice::kGrpc), 2);
  EXPECT_EQ(TrainTeam(daemon.address(), Ranks(3, TransportChoice::kShm), 2), expected);
}

TEST_F(TransportTest, SharedMemoryIsTakenWithoutAsking) {
  RealDaemon daemon(WithSocket());
  LeastSquares problem;
  const auto client = told_.Connect(daemon.address());
  ASSERT_TRUE(problem.Join(*client, Over(TransportChoice::kAuto)).ok());
  ASSERT_TRUE(problem.Step(*client).ok());
  EXPECT_SOON(RankLine(*client), HasSubstr("transport shm"));
  EXPECT_THAT(told_.lines(), IsEmpty());
}

TEST_F(TransportTest, GrpcIsTakenOnRequest) {
  RealDaemon daemon(WithSocket());
  LeastSquares problem;
  const auto client = told_.Connect(daemon.address());
  ASSERT_TRUE(problem.Join(*client, Over(TransportChoice::kGrpc)).ok());
  ASSERT_TRUE(problem.Step(*client).ok());
  EXPECT_SOON(RankLine(*client), HasSubstr("transport grpc"));
  EXPECT_THAT(told_.lines(), IsEmpty());
}

// In another container the daemon's path does not exist, or belongs to another daemon.
TEST_F(TransportTest, WithoutTheSocketItIsGrpcAndOneLineSaysWhy) {
  RealDaemon daemon(WithSocket());
  unlink(SocketPath().c_str());
  LeastSquares problem;
  auto client = told_.Connect(daemon.address());
  ASSERT_TRUE(problem.Join(*client, Over(TransportChoice::kAuto)).ok());
  for (int i = 0; i < 3; ++i) ASSERT_TRUE(problem.Step(*client).ok());
  EXPECT_SOON(RankLine(*client), HasSubstr("transport grpc"));
  EXPECT_THAT(told_.lines(), ElementsAre(AllOf(HasSubstr("no shared memory"), HasSubstr("No such file or directory"),
                                               HasSubstr("using gRPC"))));
}

TEST_F(TransportTest, AnotherDaemonAtThePathIsNotTrusted) {
  RealDaemon daemon(WithSocket());
  unlink(SocketPath().c_str());
  RealDaemon other(WithSocket());
  LeastSquares problem;
  const auto client = told_.Connect(daemon.address());
  ASSERT_TRUE(problem.Join(*client, Over(TransportChoice::kAuto)).ok());
  ASSERT_TRUE(problem.Step(*client).ok());
  EXPECT_THAT(told_.lines(), ElementsAre(HasSubstr("knows no session with the token")));
}

TEST_F(TransportTest, ARequiredLaneThatIsNotAvailableIsAnError) {
  RealDaemon without;
  LeastSquares problem;
  auto client = told_.Connect(without.address());
  absl::Status refused = problem.Join(*client, Over(TransportChoice::kShm)).status();
  EXPECT_EQ(refused.code(), absl::StatusCode::kFailedPrecondition);
  EXPECT_THAT(std::string(refused.message()), HasSubstr("set its shm_socket"));

  RealDaemon daemon(WithSocket());
  unlink(SocketPath().c_str());
  client = told_.Connect(daemon.address());
  refused = problem.Join(*client, Over(TransportChoice::kShm)).status();
  EXPECT_EQ(refused.code(), absl::StatusCode::kUnavailable);
  EXPECT_THAT(std::string(refused.message()), HasSubstr("choose the transport auto"));
}

std::vector<float> WeightsAfter(LeastSquares& problem, Client& client, int steps) {
  for (int i = 0; i < steps; ++i) {
    const auto loss = problem.Step(client);
    EXPECT_TRUE(loss.ok()) << loss.status();
    if (!loss.ok()) break;
  }
  return problem.weights(0);
}

std::vector<float> Uncut(int steps) {
  RealDaemon daemon;
  LeastSquares problem;
  const auto client = Client::Connect({.server = daemon.address()}).value();
  EXPECT_TRUE(problem.Join(*client).ok());
  return WeightsAfter(problem, *client, steps);
}

TEST_F(TransportTest, CutsAtAnyMomentChangeNoBit) {
  constexpr int kSteps = 200;
  const std::vector<float> expected = Uncut(kSteps);
  RealDaemon daemon(WithSocket());
  LeastSquares problem;
  const auto client = told_.Connect(daemon.address());
  ASSERT_TRUE(problem.Join(*client, Over(TransportChoice::kShm)).ok());
  const Cutter cutter;
  WeightsAfter(problem, *client, kSteps / 2);
  EXPECT_SOON(cutter.cuts(), Gt(5));
  EXPECT_EQ(WeightsAfter(problem, *client, kSteps / 2), expected);
}

// What was sent as it was pushed lies in the memory that is cut off.
TEST_F(TransportTest, CutsWhileGradientsAreOnTheirWayChangeNoBit) {
  RealDaemon daemon(WithSocket());
  const auto expected = TrainTeam(daemon.address(), Ranks(2, TransportChoice::kGrpc), 2);
  for (int i = 0, cuts = 0; i < 3 || cuts < 20; ++i) {
    ASSERT_EQ(TrainTeam(daemon.address(), Ranks(2, TransportChoice::kShm), 2, &cuts), expected);
  }
}

// The shared-memory path goes away while a step is open: the rest of the step goes over gRPC.
TEST_F(TransportTest, ACutStepGoesOnOverTheOtherTransport) {
  const std::vector<float> expected = Uncut(3);
  RealDaemon daemon(WithSocket());
  LeastSquares problem;
  const auto client = told_.Connect(daemon.address());
  ASSERT_TRUE(problem.Join(*client, Over(TransportChoice::kAuto)).ok());
  ASSERT_TRUE(problem.Step(*client).ok());
  ASSERT_TRUE(client->BeginStep({.groups = {{.lr = 0.02}}}).ok());
  const double loss = problem.Backward();
  ASSERT_TRUE(client->Push(1, problem.Gradient(1)).ok());
  unlink(SocketPath().c_str());
  EXPECT_GT(CutSharedMemory(), 0);
  ASSERT_TRUE(client->Push(0, problem.Gradient(0)).ok());
  const auto result = client->EndStep(loss).get();
  ASSERT_TRUE(result.ok()) << result.status();
  EXPECT_SOON(RankLine(*client), HasSubstr("transport grpc"));
  EXPECT_EQ(WeightsAfter(problem, *client, 1), expected);
  EXPECT_THAT(told_.lines(),
              ElementsAre(HasSubstr("lost the daemon"), HasSubstr("using gRPC"), HasSubstr("again after")));
}

TEST_F(TransportTest, ADaemonThatGoesAwayEndsTheWait) {
  auto daemon = std::make_unique<RealDaemon>(WithSocket());
  LeastSquares problem;
  const auto client =
      Client::Connect({.server = daemon->address(), .reconnect_timeout_s = 0.3, .log = [](const std::string&) {}})
          .value();
  ASSERT_TRUE(problem.Join(*client, Over(TransportChoice::kShm)).ok());
  ASSERT_TRUE(problem.Step(*client).ok());
  ASSERT_TRUE(client->BeginStep({}).ok());
  daemon.reset();
  const absl::Status lost = client->EndStep(1.0).get().status();
  EXPECT_EQ(lost.code(), absl::StatusCode::kUnavailable) << lost;
  EXPECT_FALSE(std::filesystem::exists(SocketPath()));
}

// A clean end releases the rank at once, over this transport too.
TEST_F(TransportTest, AClientThatLeavesReleasesItsRank) {
  RealDaemon daemon(WithSocket());
  LeastSquares problem;
  auto client = told_.Connect(daemon.address());
  ASSERT_TRUE(problem.Join(*client, Over(TransportChoice::kShm)).ok());
  ASSERT_TRUE(problem.Step(*client).ok());
  client.reset();
  client = told_.Connect(daemon.address());
  AttachOptions at_once = Over(TransportChoice::kShm);
  at_once.wait_s = 0;
  const auto attachment = problem.Join(*client, at_once);
  ASSERT_TRUE(attachment.ok()) << attachment.status();
  EXPECT_EQ(attachment->resume_step, 2u);
}

}  // namespace
}  // namespace ballast
