// What readers and Pull have of a run of DozenTensors, to compare.
#pragma once

#include <gtest/gtest.h>

#include <map>
#include <memory>
#include <string>

#include "client/cpp/follow/subscriber.h"
#include "tests/client/parts/parts_team.h"

namespace ballast {

constexpr double kSoonS = 60;
constexpr uint32_t kDozen = 12;

// By tensor: codes, then scales.
using ServedBits = std::map<uint32_t, std::string>;

inline Training FollowedDozen(const std::string& serving = "", uint32_t world = 1) {
  Training training{.spec = DozenTensors(), .world = world};
  training.spec.set_ranks(world);
  training.spec.mutable_groups(0)->set_serving(serving);
  training.spec.mutable_follow();
  training.spec.mutable_rewind()->set_snapshots(3);
  training.spec.mutable_rewind()->set_every(2);
  return training;
}

inline std::string BytesOfScales(const std::map<uint64_t, float>& scales) {
  std::string bytes;
  for (const auto& [row, scale] : scales) bytes.append(reinterpret_cast<const char*>(&scale), sizeof(scale));
  return bytes;
}

// Of the run as it is.
inline ServedBits Pulled(Client& client, const v1::RunSpec& spec) {
  ServedBits bits;
  std::map<uint32_t, std::map<uint64_t, float>> scales;  // by row
  const auto sink = [&](const ServedPiece& piece) {
    const auto& shape = spec.tensors(static_cast<int>(piece.tensor)).shape();
    const bool rows = shape.size() > 1 && *shape.rbegin() > 1;
    const uint64_t row = rows ? piece.first / static_cast<uint64_t>(*shape.rbegin()) : 0;
    bits[piece.tensor].append(reinterpret_cast<const char*>(piece.codes.data()), piece.codes.size());
    for (size_t i = 0; i < piece.scales.size(); ++i) scales[piece.tensor][row + i] = piece.scales[i];
    return absl::OkStatus();
  };
  EXPECT_EQ(client.PullServed(spec.run_id(), {}, sink), absl::OkStatus());
  for (auto& [tensor, bytes] : bits) bytes += BytesOfScales(scales[tensor]);
  return bits;
}

// Of the version that is here.
inline ServedBits Here(const Subscriber& reader) {
  ServedBits bits;
  for (uint32_t i = 0; i < kDozen; ++i) {
    const auto served = reader.Served(i);
    EXPECT_TRUE(served.ok()) << served.status();
    if (!served.ok()) return {};
    bits[i].assign(reinterpret_cast<const char*>(served->codes.data()), served->codes.size());
    bits[i].append(reinterpret_cast<const char*>(served->scales.data()), served->scales.size() * sizeof(float));
  }
  return bits;
}

inline std::unique_ptr<Subscriber> FollowParts(const std::string& server, bool marks_changed = false) {
  auto reader = Subscriber::Open({.server = server, .log = [](const std::string&) {}},
                                 {.run_id = "dozen", .marks_changed = marks_changed});
  EXPECT_TRUE(reader.ok()) << reader.status();
  return reader.ok() ? *std::move(reader) : nullptr;
}

// The version of this step, or a later one.
inline FollowedVersion Reach(Subscriber& reader, uint64_t step, uint64_t generation = 1) {
  for (;;) {
    const auto version = reader.Next(kSoonS);
    EXPECT_TRUE(version.ok() && *version) << version.status() << " on the way to step " << step;
    if (!version.ok() || !*version) return {};
    if ((*version)->step >= step && (*version)->generation >= generation) return **version;
  }
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
