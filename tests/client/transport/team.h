// Ranks that train together on a real daemon, each over a transport of its own, and what comes of it.
#pragma once

#include <gtest/gtest.h>

#include <atomic>
#include <functional>
#include <memory>
#include <optional>
#include <random>
#include <string>
#include <thread>
#include <vector>

#include "absl/strings/str_cat.h"
#include "absl/synchronization/mutex.h"
#include "proto/gpu/gpu.h"

#include "tests/client/quiet_client.h"
#include "tests/client/transport/unix_cutter.h"
#include "tests/eventually.h"

namespace ballast {

inline constexpr size_t kTeamElements[] = {30000, 5, 4096, 1, 70001};
inline constexpr uint32_t kTeamTensors = std::size(kTeamElements);
inline constexpr uint32_t kTeamSteps = 5;

// How a rank trains.
struct TeamRank {
  TransportChoice transport = TransportChoice::kAuto;
  std::optional<int> gpu = {};
  // Where a gradient lies when it is pushed, until the next.
  std::function<absl::Span<const std::byte>(absl::Span<const std::byte> gradient)> place = [](auto g) { return g; };
  bool awaits_gpu = false;      // it begins when its gradients go to memory of a GPU
  bool weights_on_gpu = false;  // it has them in the memory of its GPU
};

// Weights of a rank in the memory of its GPU.
class WeightsOnGpu {
 public:
  explicit WeightsOnGpu(int number) : gpu_(Gpu::Open(number).value()) {}
  absl::Status Bind(Client& client, uint32_t tensor, size_t bytes) {
    at_.push_back(gpu_->Allocate(bytes).value());
    return client.BindWeights(tensor, at_.back()->data(), bytes);
  }
  void Read(std::vector<std::vector<std::byte>>* weights) {
    for (size_t i = 0; i < at_.size(); ++i) {
      EXPECT_TRUE(gpu_->Copy((*weights)[i].data(), at_[i]->data(), (*weights)[i].size()).ok());
    }
  }

 private:
  const std::shared_ptr<Gpu> gpu_;
  std::vector<std::unique_ptr<Gpu::Memory>> at_;
};
inline std::vector<TeamRank> Ranks(uint32_t world, TransportChoice transport) {
  return std::vector<TeamRank>(world, TeamRank{transport});
}

// `change`: what is particular about it.
using SpecChange = std::function<void(v1::RunSpec*)>;
inline v1::RunSpec TeamSpec(
    uint32_t world, uint32_t micros, const SpecChange& change = [](v1::RunSpec*) {}) {
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
  change(&spec);
  return spec;
}

inline size_t GradientBytes(const v1::RunSpec& spec, uint32_t tensor) {
  const std::string& of_group = spec.groups(0).gradient();
  const std::string& format = of_group.empty() ? spec.tensors(static_cast<int>(tensor)).dtype() : of_group;
  return kTeamElements[tensor] * (format == "fp32" ? 4 : format == "fp8-e5m2" ? 1 : 2);
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

// Makes the steps of one rank, which is attached, and leaves. Its gradients are those of its number.
inline void TrainAsRank(Client& client, const v1::RunSpec& spec, uint32_t rank, const TeamRank& as,
                        std::vector<std::vector<std::byte>>* weights) {
  const uint32_t micros = spec.accumulation();
  std::mt19937 random(rank + 1);
  std::optional<WeightsOnGpu> on_gpu;
  if (as.weights_on_gpu) on_gpu.emplace(*as.gpu);
  for (uint32_t i = 0; i < kTeamTensors; ++i) {
    std::vector<std::byte>& of = (*weights)[i];
    const absl::Status bound =
        on_gpu ? on_gpu->Bind(client, i, of.size()) : client.BindWeights(i, of.data(), of.size());
    EXPECT_TRUE(bound.ok()) << bound;
  }
  for (uint32_t step = 0; step < kTeamSteps; ++step) {
    ASSERT_TRUE(client.BeginStep({.micro_batches = micros}).ok());
    for (uint32_t micro = 0; micro < micros; ++micro) {
      // Every rank in an order of its own.
      std::vector<uint32_t> order(kTeamTensors);
      for (uint32_t i = 0; i < kTeamTensors; ++i) order[i] = (i + rank) % kTeamTensors;
      for (const uint32_t i : order) {
        std::vector<std::byte> gradient(GradientBytes(spec, i));
        for (size_t b = 1; b < gradient.size(); b += 2) gradient[b] = static_cast<std::byte>(random() % 0x40);
        ASSERT_TRUE(client.Push(i, as.place(gradient)).ok());
      }
      if (micro + 1 < micros) {
        ASSERT_TRUE(client.EndMicro(std::nullopt).ok());
      }
    }
    const auto result = client.EndStep(1.0).get();
    ASSERT_TRUE(result.ok()) << result.status();
    ASSERT_EQ(result->result.outcome(), v1::STEP_OUTCOME_APPLIED);
  }
  client.Detach();  // nothing comes any more
  if (on_gpu) on_gpu->Read(weights);
}

// All weights after some steps of ranks that each have gradients of their own. `team`: by rank. Counts in *cuts, where it
// is given, how often their connections over shared memory were cut.
inline std::vector<float> TrainTeam(
    const std::string& server, const std::vector<TeamRank>& team, uint32_t micros, int* cuts = nullptr,
    const SpecChange& change = [](v1::RunSpec*) {}) {
  const auto world = static_cast<uint32_t>(team.size());
  const v1::RunSpec spec = TeamSpec(world, micros, change);
  std::vector<std::vector<std::vector<std::byte>>> weights(world);
  std::vector<std::thread> ranks;
  std::vector<std::unique_ptr<Client>> clients;
  for (uint32_t rank = 0; rank < world; ++rank) {
    clients.push_back(QuietClient(server));
    const auto created = clients[rank]->CreateRun(spec);
    EXPECT_TRUE(created.ok()) << created.status();
    const auto attached = clients[rank]->Attach({.run_id = spec.run_id(),
                                                 .rank = rank,
                                                 .world = world,
                                                 .transport = team[rank].transport,
                                                 .gpu = team[rank].gpu});
    EXPECT_TRUE(attached.ok()) << attached.status();
    for (uint32_t i = 0; i < kTeamTensors; ++i) weights[rank].emplace_back(kTeamElements[i] * (i % 2 == 0 ? 4 : 2));
    if (team[rank].awaits_gpu) {
      EXPECT_SOON(clients[rank]->shares_gpu(), true);
    }
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
    ranks.emplace_back([&, rank] { TrainAsRank(*clients[rank], spec, rank, team[rank], &weights[rank]); });
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

}  // namespace ballast
