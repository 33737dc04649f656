// Ranks by NCCL that are processes, and are killed: what the tests of threads cannot show. The daemon is this process.
#include <dlfcn.h>
#include <gmock/gmock.h>
#include <gtest/gtest.h>
#include <signal.h>
#include <spawn.h>
#include <sys/wait.h>

#include <algorithm>
#include <cstring>
#include <random>
#include <string>
#include <thread>
#include <vector>

#include "tests/client/constant_team.h"
#include "tests/client/fake_nccl.h"
#include "tests/client/quiet_client.h"
#include "tests/client/transport/gpu_team.h"

extern char** environ;

namespace ballast {
namespace {

class TrainerProcess {
 public:
  TrainerProcess(const std::string& server, uint32_t rank, uint32_t world) {
    std::string words[] = {NCCL_TRAINER, server, absl::StrCat(rank), absl::StrCat(world)};
    char* const arguments[] = {words[0].data(), words[1].data(), words[2].data(), words[3].data(), nullptr};
    EXPECT_EQ(posix_spawn(&process_, words[0].c_str(), nullptr, nullptr, arguments, environ), 0);
  }
  ~TrainerProcess() {
    kill(process_, SIGKILL);
    waitpid(process_, nullptr, 0);
  }
  TrainerProcess(const TrainerProcess&) = delete;
  TrainerProcess& operator=(const TrainerProcess&) = delete;

 private:
  pid_t process_ = 0;
};

// What a run has of each tensor.
struct Trained {
  uint64_t updates = 0;
  std::vector<float> weights;
};

std::vector<Trained> TrainedBy(Client& client) {
  std::vector<Trained> held(ConstantTeam::kTensors);
  for (uint32_t i = 0; i < ConstantTeam::kTensors; ++i) held[i].weights.resize(ConstantTeam::kElements[i]);
  const std::string slots[] = {"weights", "updates"};
  const absl::Status pulled = client.PullState(ConstantTeam::kRun, {}, slots, [&](const ServedPiece& piece) {
    Trained& of = held[piece.tensor];
    if (piece.slot == "updates") of.updates = piece.updates;
    if (piece.slot == "weights") std::memcpy(of.weights.data() + piece.first, piece.codes.data(), piece.codes.size());
    return absl::OkStatus();
  });
  EXPECT_TRUE(pulled.ok()) << pulled;
  return held;
}

// The weights of each tensor after as many updates as `held` says, by ranks that nobody disturbs, over gRPC.
std::vector<std::vector<float>> Undisturbed(const std::string& server, uint32_t world,
                                            const std::vector<Trained>& held) {
  std::vector<std::vector<float>> weights(held.size());
  uint64_t steps = 0;
  for (const Trained& of : held) steps = std::max(steps, of.updates);
  std::vector<std::unique_ptr<Client>> clients;
  std::vector<ConstantTeam> teams;
  for (uint32_t rank = 0; rank < world; ++rank) {
    clients.push_back(QuietClient(server));
    const absl::Status joined = teams.emplace_back(rank).Join(
        *clients[rank], {.rank = rank, .world = world, .transport = TransportChoice::kGrpc});
    EXPECT_TRUE(joined.ok()) << joined;
  }
  std::vector<std::thread> ranks;
  for (uint32_t rank = 0; rank < world; ++rank) {
    ranks.emplace_back([&, rank] {
      for (uint64_t step = 1; step <= steps; ++step) {
        const absl::Status stepped = teams[rank].Step(*clients[rank]);
        ASSERT_TRUE(stepped.ok()) << stepped;
        for (uint32_t i = 0; i < held.size() && rank == 0; ++i) {
          if (held[i].updates == step) weights[i] = teams[0].weights(i);
        }
      }
    });
  }
  for (std::thread& rank : ranks) rank.join();
  return weights;
}

TEST(NcclProcessesTest, RanksThatAreKilledAndStartedAgainLoseNothing) {
  constexpr uint32_t kWorld = 8;
  constexpr int kKills = 12;
  Cuda().Reset();
  FakeGpuState state;
  std::vector<std::unique_ptr<Device>> gpu;
  gpu.push_back(std::make_unique<GpuDevice>(std::make_unique<FakeGpu>(&state), 2));
  ASSERT_NE(dlopen(FAKE_NCCL, RTLD_NOW | RTLD_LOCAL), nullptr);
  Config config = RealDaemon::Small();
  config.shm_socket = "off";
  config.nccl = true;
  RealDaemon daemon(config, std::move(gpu)), on_cpu(RealDaemon::Small());
  const auto watcher = QuietClient(daemon.address());
  const auto step = [&] {
    const auto run = watcher->GetRun(ConstantTeam::kRun);
    return run.ok() ? run->status().step() : 0;
  };
  std::vector<std::unique_ptr<TrainerProcess>> ranks;
  for (uint32_t r = 0; r < kWorld; ++r) {
    ranks.push_back(std::make_unique<TrainerProcess>(daemon.address(), r, kWorld));
  }
  std::mt19937 random(7);
  for (int i = 0; i < kKills; ++i) {
    const uint64_t before = step();
    ASSERT_TRUE(Soon([&] { return step() >= before + 3; })) << "after " << i << " kills, at step " << before;
    const uint32_t r = static_cast<uint32_t>(random() % kWorld);
    ranks[r].reset();
    ranks[r] = std::make_unique<TrainerProcess>(daemon.address(), r, kWorld);
  }
  EXPECT_GT(state.sum_launches, 0);
  ranks.clear();
  EXPECT_SOON(Cuda().live(), FakeCuda::Live{});
  const std::vector<Trained> held = TrainedBy(*watcher);
  const auto expected = Undisturbed(on_cpu.address(), kWorld, held);
  for (uint32_t i = 0; i < ConstantTeam::kTensors; ++i) {
    EXPECT_GT(held[i].updates, 3 * kKills / 2);
    EXPECT_EQ(held[i].weights, expected[i]) << "tensor " << i << " after " << held[i].updates << " updates";
  }
}

}  // namespace
}  // namespace ballast
