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

  std::unique_ptr<Client> Open(const std::string& server) {
    return Client::Connect({.server = server,
                            .log =
                                [this](const std::string& line) {
                                  absl::MutexLock lock(&mu_);
                                  lines_.push_back(line);
                                }})
        .value();
  }
  std::vector<std::string> Lines() {
    absl::MutexLock lock(&mu_);
    return lines_;
  }
  static AttachOptions Over(TransportChoice transport) { return {.run_id = "least-squares", .transport = transport}; }
  static std::string RankLine(Client& client) {
    const auto run = client.GetRun("least-squares");
    return run.ok() && run->status().ranks_size() > 0 ? run->status().ranks(0) : "";
  }

  absl::Mutex mu_;
  std::vector<std::string> lines_;
};

constexpr size_t kTeamElements[] = {30000, 5, 4096, 1, 70001};
constexpr uint32_t kTeamTensors = std::size(kTeamElements);

v1::RunSpec TeamSpec(uint32_t world, uint32_t micros) {
  v1::RunSpec spec;
  spec.set_run_id(absl::StrCat("team-", absl::Hex(std::random_device{}())));
  for (uint32_t i = 0; i < kTeamTensors; ++i) {
    v1::TensorSpec* tensor = spec.add_tensors();
    tensor->set_name(absl::StrCat("t", i));
    tensor->set_dtype(i % 2 == 0 ? "fp32" : "bf16");
    tensor->add_shape(static_cast<int64_t>(kTeamElements[i]));
  }
  spec.add_groups()->set_rule("adamw");
  spec.set_ranks(world);
  spec.set_accumulation(micros);
  return spec;
}

// Cuts all connections over shared memory of this process at random moments, while it lives.
class Cutter {
 public:
  ~Cutter() {
    done_ = true;
    thread_.join();
  }
  int cuts() const { return cuts_; }

 private:
  std::atomic<bool> done_ = false;
  std::atomic<int> cuts_ = 0;
  std::thread thread_{[this] {
    std::mt19937 random(4);
    absl::Mutex mu;
    absl::MutexLock lock(&mu);
    double most_us = 20000;
    while (!mu.AwaitWithTimeout(absl::Condition(
                                    +[](std::atomic<bool>* d) { return d->load(); }, &done_),
                                absl::Microseconds(static_cast<double>(random() % 1000) / 1000 * most_us))) {
      if (CutSharedMemory() == 0) continue;
      ++cuts_;
      most_us *= 1.05;  // so that a machine that takes long to connect again gets on
    }
  }};
};

// All weights after some steps of ranks that each have gradients of their own. `transports`: by rank. Counts in *cuts, where it
// is given, how often their connections over shared memory were cut.
std::vector<float> TrainTeam(const std::string& server, const std::vector<TransportChoice>& transports, uint32_t micros,
                             int* cuts = nullptr) {
  constexpr uint32_t kSteps = 5;
  const auto world = static_cast<uint32_t>(transports.size());
  const v1::RunSpec spec = TeamSpec(world, micros);
  std::vector<std::vector<std::vector<std::byte>>> weights(world);
  std::vector<std::thread> ranks;
  std::vector<std::unique_ptr<Client>> clients;
  for (uint32_t rank = 0; rank < world; ++rank) {
    clients.push_back(QuietClient(server));
    const auto created = clients[rank]->CreateRun(spec);
    EXPECT_TRUE(created.ok()) << created.status();
    const auto attached =
        clients[rank]->Attach({.run_id = spec.run_id(), .rank = rank, .world = world, .transport = transports[rank]});
    EXPECT_TRUE(attached.ok()) << attached.status();
    for (uint32_t i = 0; i < kTeamTensors; ++i) weights[rank].emplace_back(kTeamElements[i] * (i % 2 == 0 ? 4 : 2));
    if (rank > 0) continue;
    std::vector<TensorView> views;
    for (uint32_t i = 0; i < kTeamTensors; ++i) {
      views.push_back({.tensor = i, .format = i % 2 == 0 ? "fp32" : "bf16", .bytes = weights[0][i]});
    }
    EXPECT_TRUE(clients[0]->LoadWeights(views).ok());
  }
  std::optional<Cutter> cutter;
  if (cuts != nullptr) cutter.emplace();
  for (uint32_t rank = 0; rank < world; ++rank) {
    ranks.emplace_back([&, rank] {
      Client& client = *clients[rank];
      std::mt19937 random(rank + 1);
      for (uint32_t i = 0; i < kTeamTensors; ++i) {
        EXPECT_TRUE(client.BindWeights(i, weights[rank][i].data(), weights[rank][i].size()).ok());
      }
      for (uint32_t step = 0; step < kSteps; ++step) {
        ASSERT_TRUE(client.BeginStep({.micro_batches = micros}).ok());
        for (uint32_t micro = 0; micro < micros; ++micro) {
          // Every rank in an order of its own.
          std::vector<uint32_t> order(kTeamTensors);
          for (uint32_t i = 0; i < kTeamTensors; ++i) order[i] = (i + rank) % kTeamTensors;
          for (const uint32_t i : order) {
            std::vector<std::byte> gradient(weights[rank][i].size());
            for (size_t b = 1; b < gradient.size(); b += 2) gradient[b] = static_cast<std::byte>(random() % 0x40);
            ASSERT_TRUE(client.Push(i, gradient).ok());
          }
          if (micro + 1 < micros) {
            ASSERT_TRUE(client.EndMicro(std::nullopt).ok());
          }
        }
        const auto result = client.EndStep(1.0).get();
        ASSERT_TRUE(result.ok()) << result.status();
        ASSERT_EQ(result->result.outcome(), v1::STEP_OUTCOME_APPLIED);
      }
    });
  }
  for (std::thread& rank : ranks) rank.join();
  if (cuts != nullptr) *cuts += cutter->cuts();
  cutter.reset();
  std::vector<float> all;
  for (uint32_t rank = 1; rank < world; ++rank) EXPECT_EQ(weights[rank], weights[0]) << rank;
  for (const auto& tensor : weights[0]) {
    for (const std::byte b : tensor) all.push_back(static_cast<float>(b));
  }
  EXPECT_NE(all, std::vector<float>(all.size()));  // they were trained
  EXPECT_TRUE(clients[0]->DeleteRun(spec.run_id(), /*force=*/true).ok());
  return all;
}

TEST_F(TransportTest, GiveTheSameBitsForEveryWorldAndMixture) {
  RealDaemon daemon(WithSocket());
  for (const uint32_t world : {1u, 2u, 3u}) {
    for (const uint32_t micros : {1u, 2u}) {
      SCOPED_TRACE(absl::StrCat(world, " ranks, ", micros, " micro-batches"));
      const auto expected = TrainTeam(daemon.address(), std::vector(world, TransportChoice::kGrpc), micros);
      EXPECT_EQ(TrainTeam(daemon.address(), std::vector(world, TransportChoice::kShm), micros), expected);
      std::vector<TransportChoice> mixed(world, TransportChoice::kShm);
      mixed[0] = TransportChoice::kGrpc;
      EXPECT_EQ(TrainTeam(daemon.address(), mixed, micros), expected);
    }
  }
}

// A window of a chunk or two, and ranks that push in different orders.
TEST_F(TransportTest, ASmallWindowNeverHangs) {
  Config config = WithSocket();
  config.limits.credit_bytes = config.limits.chunk_bytes;
  RealDaemon daemon(config);
  const auto expected = TrainTeam(daemon.address(), std::vector(3, TransportChoice::kGrpc), 2);
  EXPECT_EQ(TrainTeam(daemon.address(), std::vector(3, TransportChoice::kShm), 2), expected);
}

TEST_F(TransportTest, SharedMemoryIsTakenWithoutAsking) {
  RealDaemon daemon(WithSocket());
  LeastSquares problem;
  const auto client = Open(daemon.address());
  ASSERT_TRUE(problem.Join(*client, Over(TransportChoice::kAuto)).ok());
  ASSERT_TRUE(problem.Step(*client).ok());
  EXPECT_SOON(RankLine(*client), HasSubstr("transport shm"));
  EXPECT_THAT(Lines(), IsEmpty());
}

TEST_F(TransportTest, GrpcIsTakenOnRequest) {
  RealDaemon daemon(WithSocket());
  LeastSquares problem;
  const auto client = Open(daemon.address());
  ASSERT_TRUE(problem.Join(*client, Over(TransportChoice::kGrpc)).ok());
  ASSERT_TRUE(problem.Step(*client).ok());
  EXPECT_SOON(RankLine(*client), HasSubstr("transport grpc"));
  EXPECT_THAT(Lines(), IsEmpty());
}

// In another container the daemon's path does not exist, or belongs to another daemon.
TEST_F(TransportTest, WithoutTheSocketItIsGrpcAndOneLineSaysWhy) {
  RealDaemon daemon(WithSocket());
  unlink(SocketPath().c_str());
  LeastSquares problem;
  auto client = Open(daemon.address());
  ASSERT_TRUE(problem.Join(*client, Over(TransportChoice::kAuto)).ok());
  for (int i = 0; i < 3; ++i) ASSERT_TRUE(problem.Step(*client).ok());
  EXPECT_SOON(RankLine(*client), HasSubstr("transport grpc"));
  EXPECT_THAT(Lines(), ElementsAre(AllOf(HasSubstr("no shared memory"), HasSubstr("No such file or directory"),
                                         HasSubstr("using gRPC"))));
}

TEST_F(TransportTest, AnotherDaemonAtThePathIsNotTrusted) {
  RealDaemon daemon(WithSocket());
  unlink(SocketPath().c_str());
  RealDaemon other(WithSocket());
  LeastSquares problem;
  const auto client = Open(daemon.address());
  ASSERT_TRUE(problem.Join(*client, Over(TransportChoice::kAuto)).ok());
  ASSERT_TRUE(problem.Step(*client).ok());
  EXPECT_THAT(Lines(), ElementsAre(HasSubstr("knows no session with the token")));
}

TEST_F(TransportTest, ARequiredLaneThatIsNotAvailableIsAnError) {
  RealDaemon without;
  LeastSquares problem;
  auto client = Open(without.address());
  absl::Status refused = problem.Join(*client, Over(TransportChoice::kShm)).status();
  EXPECT_EQ(refused.code(), absl::StatusCode::kFailedPrecondition);
  EXPECT_THAT(std::string(refused.message()), HasSubstr("set its shm_socket"));

  RealDaemon daemon(WithSocket());
  unlink(SocketPath().c_str());
  client = Open(daemon.address());
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
  const auto client = Open(daemon.address());
  ASSERT_TRUE(problem.Join(*client, Over(TransportChoice::kShm)).ok());
  const Cutter cutter;
  WeightsAfter(problem, *client, kSteps / 2);
  EXPECT_SOON(cutter.cuts(), Gt(5));
  EXPECT_EQ(WeightsAfter(problem, *client, kSteps / 2), expected);
}

// What was sent as it was pushed lies in the memory that is cut off.
TEST_F(TransportTest, CutsWhileGradientsAreOnTheirWayChangeNoBit) {
  RealDaemon daemon(WithSocket());
  const auto expected = TrainTeam(daemon.address(), std::vector(2, TransportChoice::kGrpc), 2);
  for (int i = 0, cuts = 0; i < 3 || cuts < 20; ++i) {
    ASSERT_EQ(TrainTeam(daemon.address(), std::vector(2, TransportChoice::kShm), 2, &cuts), expected);
  }
}

// The shared-memory path goes away while a step is open: the rest of the step goes over gRPC.
TEST_F(TransportTest, ACutStepGoesOnOverTheOtherTransport) {
  const std::vector<float> expected = Uncut(3);
  RealDaemon daemon(WithSocket());
  LeastSquares problem;
  const auto client = Open(daemon.address());
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
  EXPECT_THAT(Lines(), ElementsAre(HasSubstr("lost the daemon"), HasSubstr("using gRPC"), HasSubstr("again after")));
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
  auto client = Open(daemon.address());
  ASSERT_TRUE(problem.Join(*client, Over(TransportChoice::kShm)).ok());
  ASSERT_TRUE(problem.Step(*client).ok());
  client.reset();
  client = Open(daemon.address());
  AttachOptions at_once = Over(TransportChoice::kShm);
  at_once.wait_s = 0;
  const auto attachment = problem.Join(*client, at_once);
  ASSERT_TRUE(attachment.ok()) << attachment.status();
  EXPECT_EQ(attachment->resume_step, 2u);
}

}  // namespace
}  // namespace ballast
