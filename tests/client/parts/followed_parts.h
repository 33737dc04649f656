// Readers of a run of DozenTensors, and what they are to have.
#pragma once

#include <gtest/gtest.h>

#include <memory>
#include <string>
#include <vector>

#include "tests/client/follow/served_bits.h"
#include "tests/client/parts/parts_team.h"

namespace ballast {

constexpr uint32_t kDozen = 12;

inline Training FollowedDozen(const std::string& serving = "", uint32_t world = 1) {
  Training training{.spec = DozenTensors(), .world = world};
  training.spec.set_ranks(world);
  training.spec.mutable_groups(0)->set_serving(serving);
  training.spec.mutable_follow();
  training.spec.mutable_rewind()->set_snapshots(3);
  training.spec.mutable_rewind()->set_every(2);
  return training;
}

inline std::unique_ptr<Subscriber> FollowParts(const std::string& server, bool marks_changed = false) {
  auto reader = Subscriber::Open({.server = server, .log = [](const std::string&) {}},
                                 {.run_id = "dozen", .marks_changed = marks_changed});
  EXPECT_TRUE(reader.ok()) << reader.status();
  return reader.ok() ? *std::move(reader) : nullptr;
}

// After each step from 0 on, of the same training on one daemon.
inline std::vector<ServedBits> BitsOfSteps(const Training& training) {
  const Daemons daemons(1);
  std::vector<std::unique_ptr<PartsRank>> ranks;
  for (uint32_t r = 0; r < training.world; ++r) {
    ranks.push_back(std::make_unique<PartsRank>(daemons.addresses(), training, r));
    EXPECT_EQ(ranks.back()->Join(), absl::OkStatus());
  }
  std::vector<ServedBits> bits = {Pulled(ranks[0]->client(), training.spec)};
  for (int step = 1; step <= training.steps; ++step) {
    std::vector<std::thread> threads;
    for (auto& rank : ranks) threads.emplace_back([&rank, step] { rank->Train(step, step); });
    for (std::thread& thread : threads) thread.join();
    bits.push_back(Pulled(ranks[0]->client(), training.spec));
  }
  return bits;
}

}  // namespace ballast
