// Ranks on GPUs and a daemon on one, all played by the tests (fake_cuda.h, fake_gpu.h): what tests of the transports between
// GPUs share.
#pragma once

#include <dlfcn.h>
#include <gtest/gtest.h>
#include <sys/mman.h>
#include <unistd.h>

#include <memory>
#include <string>
#include <vector>

#include "absl/strings/match.h"
#include "proto/gpu/gpu.h"

#include "server/device/gpu_device.h"
#include "tests/client/fake_cuda.h"
#include "tests/client/least_squares.h"
#include "tests/client/real_daemon.h"
#include "tests/client/told_lines.h"
#include "tests/client/transport/team.h"
#include "tests/eventually.h"
#include "tests/server/device/fake_gpu.h"

namespace ballast {

inline FakeCuda& Cuda() {
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

class GpuTeamTest : public ::testing::Test {
 protected:
  explicit GpuTeamTest(TransportChoice transport) : transport_(transport) { Cuda().Reset(); }

  std::vector<std::unique_ptr<Device>> Gpus(int count = 1) {
    std::vector<std::unique_ptr<Device>> devices;
    for (int i = 0; i < count; ++i) {
      devices.push_back(std::make_unique<GpuDevice>(std::make_unique<FakeGpu>(&state_, i), 2));
    }
    return devices;
  }
  std::vector<TeamRank> OnGpus(uint32_t world) const {
    std::vector<TeamRank> team;
    for (uint32_t rank = 0; rank < world; ++rank) {
      const auto gradients = std::make_shared<GpuGradients>(static_cast<int>(rank % 2));
      team.push_back({.transport = transport_, .gpu = static_cast<int>(rank % 2), .place = [gradients](auto g) {
                        return gradients->Place(g);
                      }});
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
    const auto attached = client->Attach({.run_id = "least-squares", .transport = transport_, .gpu = gpu});
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

  // The team's weights are those of as many ranks by gRPC, there too.
  static void ExpectTheBitsOfGrpc(
      const std::string& server, const std::vector<TeamRank>& team, uint32_t micros,
      const SpecChange& change = [](v1::RunSpec*) {}) {
    const auto world = static_cast<uint32_t>(team.size());
    const auto expected = TrainTeam(server, Ranks(world, TransportChoice::kGrpc), micros, nullptr, change);
    EXPECT_EQ(TrainTeam(server, team, micros, nullptr, change), expected);
  }

  const TransportChoice transport_;
  FakeGpuState state_;
  std::string rank_line_;
};

// What reads sums, or makes weights, in other ways than the rest.
inline std::vector<SpecChange> KindsOfGpuRuns() {
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

}  // namespace ballast
