// Readers of a run of DozenTensors, and what they are to have.
#pragma once

#include <gtest/gtest.h>

#include <memory>
#include <optional>
#include <string>
#include <vector>

#include "tests/client/follow/served_bits.h"
#include "tests/client/parts/parts_team.h"

namespace ballast {

constexpr uint32_t kDozen = 12;

// How a run is served, and its readers follow it: "" as it is served; or an average.
struct ServedAndFollowed {
  std::string serving = {}, format = {};
  std::optional<double> average = {};
};

inline Training FollowedDozen(const ServedAndFollowed& formats = {}, uint32_t world = 1) {
  Training training{.spec = DozenTensors(), .world = world};
  training.spec.set_ranks(world);
  training.spec.mutable_groups(0)->set_serving(formats.serving);
  training.spec.mutable_follow();
  if (!formats.format.empty()) training.spec.mutable_follow()->add_formats(formats.format);
  if (formats.average) {
    training.spec.add_averages(*formats.average);
    training.spec.mutable_follow()->set_averages(true);
  }
  training.spec.mutable_rewind()->set_snapshots(3);
  training.spec.mutable_rewind()->set_every(2);
  return training;
}

// The same steps, of a run that serves what the readers of this one follow.
inline Training ServedAsFollowed(Training training) {
  v1::FollowSpec* const follow = training.spec.mutable_follow();
  if (follow->formats().empty()) return training;
  training.spec.mutable_groups(0)->set_serving(follow->formats(0));
  follow->clear_formats();
  return training;
}

inline std::unique_ptr<Subscriber> FollowParts(const std::string& server, const ServedAndFollowed& how = {},
                                               bool marks_changed = false) {
  auto reader = Subscriber::Open(
      {.server = server, .log = [](const std::string&) {}},
      {.run_id = "dozen", .marks_changed = marks_changed, .average = how.average, .format = how.format});
  EXPECT_TRUE(reader.ok()) << reader.status();
  return reader.ok() ? *std::move(reader) : nullptr;
}

// After each step from 0 on, of the same training on one daemon; of the average, what its reader has there.
inline std::vector<ServedBits> BitsOfSteps(const Training& training, std::optional<double> average = {}) {
  const Daemons daemons(1);
  std::vector<std::unique_ptr<PartsRank>> ranks;
  for (uint32_t r = 0; r < training.world; ++r) {
    ranks.push_back(std::make_unique<PartsRank>(daemons.addresses(), training, r));
    EXPECT_EQ(ranks.back()->Join(), absl::OkStatus());
  }
  const auto reader = average ? FollowParts(daemons.addresses(), {.average = average}) : nullptr;
  const auto look = [&](int step) {
    if (reader == nullptr) return Pulled(ranks[0]->client(), training.spec);
    Reach(*reader, static_cast<uint64_t>(step));
    return Here(*reader);
  };
  std::vector<ServedBits> bits = {look(0)};
  for (int step = 1; step <= training.steps; ++step) {
    std::vector<std::thread> threads;
    for (auto& rank : ranks) threads.emplace_back([&rank, step] { rank->Train(step, step); });
    for (std::thread& thread : threads) thread.join();
    bits.push_back(look(step));
  }
  return bits;
}

}  // namespace ballast
