// Ranks that push their gradients in different orders, and keep nothing that cannot leave: no order makes them wait for one
// another for ever, and none changes a bit.
#include <gmock/gmock.h>
#include <gtest/gtest.h>
#include <unistd.h>

#include <algorithm>
#include <numeric>
#include <random>
#include <string>
#include <thread>
#include <tuple>
#include <vector>

#include "absl/strings/str_cat.h"

#include "tests/client/real_daemon.h"
#include "tests/client/told_lines.h"

namespace ballast {
namespace {

using ::testing::IsEmpty;

constexpr uint32_t kOrderedRanks = 3, kOrderedTensors = 12;

uint64_t OrderedElements(uint32_t tensor) { return 1 + tensor * 7919 % 40000; }

v1::RunSpec OrdersSpec(uint32_t micros) {
  v1::RunSpec spec;
  spec.set_run_id("orders");
  spec.set_ranks(kOrderedRanks);
  spec.set_accumulation(micros);
  for (uint32_t i = 0; i < kOrderedTensors; ++i) {
    v1::TensorSpec* const tensor = spec.add_tensors();
    tensor->set_name(absl::StrCat("t", i));
    tensor->set_dtype("fp32");
    tensor->add_shape(static_cast<int64_t>(OrderedElements(i)));
  }
  spec.add_groups()->set_rule("adamw");
  return spec;
}

// One rank, whose gradients depend on rank, step, micro-batch and tensor alone.
class OrderedRank {
 public:
  OrderedRank(Client& client, AttachOptions options) : client_(client), options_(std::move(options)) {
    for (uint32_t i = 0; i < kOrderedTensors; ++i) weights_.emplace_back(OrderedElements(i), 1.0f);
  }
  const std::vector<std::vector<float>>& weights() const { return weights_; }

  absl::Status Join() {
    const auto attached = client_.Attach(options_);
    if (!attached.ok()) return attached.status();
    std::vector<TensorView> views;
    for (uint32_t i = 0; i < kOrderedTensors; ++i) {
      views.push_back({.tensor = i, .format = "fp32", .bytes = Bytes(weights_[i])});
      if (auto s = client_.BindWeights(i, weights_[i].data(), views[i].bytes.size()); !s.ok()) return s;
    }
    return options_.rank == 0 ? client_.LoadWeights(views).status() : absl::OkStatus();
  }

  absl::Status Train(uint32_t micros, std::mt19937* random) {
    for (uint32_t step = 1; step <= 3; ++step) {
      if (auto s = client_.BeginStep({.micro_batches = micros}); !s.ok()) return s;
      for (uint32_t micro = 0; micro < micros; ++micro) {
        if (auto s = PushAll(step * micros + micro, random); !s.ok()) return s;
        if (micro + 1 == micros) break;
        if (auto s = client_.EndMicro({}); !s.ok()) return s;
      }
      const auto result = client_.EndStep({}).get();
      if (!result.ok()) return result.status();
    }
    return absl::OkStatus();
  }

 private:
  absl::Status PushAll(uint32_t number, std::mt19937* random) {
    std::vector<uint32_t> order(kOrderedTensors);
    std::iota(order.begin(), order.end(), 0);
    std::shuffle(order.begin(), order.end(), *random);
    for (const uint32_t tensor : order) {
      const std::vector<float> gradient(
          OrderedElements(tensor), static_cast<float>(options_.rank + 3 * number) - 0.25f * static_cast<float>(tensor));
      if (auto s = client_.Push(tensor, Bytes(gradient)); !s.ok()) return s;
    }
    return absl::OkStatus();
  }

  static absl::Span<const std::byte> Bytes(const std::vector<float>& values) {
    return {reinterpret_cast<const std::byte*>(values.data()), values.size() * sizeof(float)};
  }

  Client& client_;
  const AttachOptions options_;
  std::vector<std::vector<float>> weights_;
};

struct Orders {
  TransportChoice transport = TransportChoice::kGrpc;
  uint32_t micros = 1;
  uint64_t buffer = 0;
  uint32_t seed = 0;
};

// The weights that all ranks end with.
std::vector<std::vector<float>> TrainedInOrders(const Orders& of) {
  Config config = RealDaemon::Small();
  config.limits.credit_bytes = 16 << 10;
  config.shm_socket = absl::StrCat(::testing::TempDir(), "ballast-orders-", getpid(), ".sock");
  RealDaemon daemon(config);
  ToldLines told;
  std::vector<std::unique_ptr<Client>> clients;
  std::vector<std::unique_ptr<OrderedRank>> ranks;
  for (uint32_t rank = 0; rank < kOrderedRanks; ++rank) {
    clients.push_back(told.Connect(daemon.address()));
    EXPECT_TRUE(clients.back()->CreateRun(OrdersSpec(of.micros)).ok());
    AttachOptions options{.run_id = "orders", .rank = rank, .world = kOrderedRanks, .transport = of.transport};
    options.gradient_buffer_bytes = of.buffer;
    options.gradient_wait_s = 120;
    ranks.push_back(std::make_unique<OrderedRank>(*clients.back(), options));
  }
  for (const auto& rank : ranks) EXPECT_TRUE(rank->Join().ok());
  std::vector<std::thread> training;
  for (uint32_t rank = 0; rank < kOrderedRanks; ++rank) {
    training.emplace_back([&, rank] {
      std::mt19937 random(of.seed + rank);
      const absl::Status trained = ranks[rank]->Train(of.micros, &random);
      EXPECT_TRUE(trained.ok()) << "rank " << rank << ": " << trained;
    });
  }
  for (std::thread& rank : training) rank.join();
  for (const auto& rank : ranks) EXPECT_EQ(rank->weights(), ranks[0]->weights());
  EXPECT_THAT(told.lines(), IsEmpty());
  return ranks[0]->weights();
}

class GradientOrdersTest : public ::testing::TestWithParam<std::tuple<TransportChoice, uint32_t>> {};

TEST_P(GradientOrdersTest, NoneKeepsRanksWithoutABufferFromEndingAStep) {
  const auto [transport, micros] = GetParam();
  const auto expected = TrainedInOrders({.transport = transport, .micros = micros, .buffer = uint64_t{1} << 30});
  for (uint32_t seed = 1; seed <= 4; ++seed) {
    SCOPED_TRACE(absl::StrCat("orders of seed ", seed));
    EXPECT_EQ(TrainedInOrders({.transport = transport, .micros = micros, .buffer = 0, .seed = 100 * seed}), expected);
  }
}

INSTANTIATE_TEST_SUITE_P(All, GradientOrdersTest,
                         ::testing::Combine(::testing::Values(TransportChoice::kGrpc, TransportChoice::kShm),
                                            ::testing::Values(1, 3)),
                         [](const auto& test) {
                           const bool grpc = std::get<0>(test.param) == TransportChoice::kGrpc;
                           return absl::StrCat(grpc ? "Grpc" : "SharedMemory", std::get<1>(test.param), "Micro");
                         });

}  // namespace
}  // namespace ballast
