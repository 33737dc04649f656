// Ranks that hold shards, against one rank that holds whole tensors: the same bits, whatever the number of ranks, the
// transport, and what is cut in between.
#include <gmock/gmock.h>
#include <gtest/gtest.h>
#include <unistd.h>

#include "tests/client/cutting_proxy.h"
#include "tests/client/quiet_client.h"
#include "tests/client/real_daemon.h"
#include "tests/client/sharded_team.h"
#include "tests/eventually.h"

namespace ballast {
namespace {

using ::testing::HasSubstr;

using Team = std::vector<std::unique_ptr<ShardedRank>>;

// All that the daemon has of a run, by tensor and slot, and what it says of its last step.
struct Kept {
  std::map<std::pair<uint32_t, std::string>, std::string> slots;
  std::map<uint32_t, uint64_t> updates;
  double grad_norm = 0;
  std::vector<double> rms;
  bool operator==(const Kept&) const = default;
};

class ShardTest : public ::testing::TestWithParam<TransportChoice> {
 protected:
  static Config WithSocket() {
    Config config = RealDaemon::Small();
    config.shm_socket = absl::StrCat(::testing::TempDir(), "ballast-shard-", getpid(), ".sock");
    return config;
  }

  // Ranks of world `parts` * `replicas`; of the replicas the first contributes.
  Team Attach(const ShardedSpec& spec, uint32_t parts, uint32_t replicas = 1, const std::string& first_at = "") {
    Team team;
    for (uint32_t rank = 0; rank < parts * replicas; ++rank) {
      const ShardedRank::Place place{.part = rank % parts, .parts = parts, .contributes = rank < parts};
      const bool elsewhere = rank == 0 && !first_at.empty();
      team.push_back(std::make_unique<ShardedRank>(elsewhere ? first_at : daemon_.address(), spec, place));
      const auto attachment =
          team.back()->Attach(rank, parts * replicas, elsewhere ? TransportChoice::kGrpc : GetParam());
      EXPECT_TRUE(attachment.ok()) << attachment.status();
      if (!attachment.ok()) return team;
      if (attachment->weights_loaded || rank > 0) continue;
      EXPECT_TRUE(team[0]->Load(spec).ok());
    }
    return team;
  }
  Team Start(const ShardedSpec& spec, uint32_t parts, uint32_t replicas = 1, const std::string& first_at = "") {
    const auto created = daemon_client_->CreateRun(SpecOf(spec));
    EXPECT_TRUE(created.ok()) << created.status();
    return Attach(spec, parts, replicas, first_at);
  }

  // One step of all ranks, and that what landed is the daemon's weights. Tensor `step` modulo their number has no
  // gradient, in all micro-batches but the last where there are several.
  void Step(const ShardedSpec& spec, Team* team, uint64_t step) {
    for (auto& rank : *team) ASSERT_TRUE(rank->client().BeginStep({.micro_batches = spec.micros}).ok());
    for (uint32_t micro = 0; micro < spec.micros; ++micro) {
      for (uint32_t i = kSharded; i-- > 0;) {
        if (i == step % kSharded && (spec.micros == 1 || micro + 1 < spec.micros)) continue;
        const std::string gradient = ValuesOf(spec.dtype, i, step * 100 + micro);
        for (auto& rank : *team) ASSERT_TRUE(rank->Push(i, gradient).ok());
      }
      if (micro + 1 == spec.micros) break;
      for (auto& rank : *team) ASSERT_TRUE(rank->client().EndMicro(std::nullopt).ok());
    }
    std::vector<std::future<absl::StatusOr<StepResult>>> results;
    for (auto& rank : *team) results.push_back(rank->client().EndStep(std::nullopt));
    for (auto& result : results) {
      const auto done = result.get();
      ASSERT_TRUE(done.ok()) << done.status();
      EXPECT_EQ(done->result.step(), step);
      EXPECT_EQ(done->result.outcome(), v1::STEP_OUTCOME_APPLIED);
    }
    ExpectLanded(spec, team, step);
  }
  void ExpectLanded(const ShardedSpec& spec, Team* team, uint64_t step) {
    const Kept kept = Keep(spec.run_id);
    for (auto& rank : *team) {
      for (uint32_t i = 0; i < kSharded; ++i) {
        if (i == step % kSharded && spec.micros == 1) continue;  // nothing came
        const ShardPiece held = rank->Held(i);
        EXPECT_EQ(rank->landed(i), kept.slots.at({i, "weights"}).substr(held.first, held.size()))
            << "tensor " << i << " of part " << rank->place().part;
      }
    }
  }
  Kept Keep(const std::string& run_id) {
    Kept kept;
    const std::vector<std::string> slots = {"weights", "master", "momentum", "variance", "updates"};
    const auto take = [&](const ServedPiece& piece) {
      if (piece.slot == "updates") kept.updates[piece.tensor] = piece.updates;
      std::string& to = kept.slots[{piece.tensor, piece.slot}];
      if (piece.first == 0) to.clear();
      to.append(reinterpret_cast<const char*>(piece.codes.data()), piece.codes.size());
      return absl::OkStatus();
    };
    const absl::Status pulled = daemon_client_->PullState(run_id, {}, slots, take);
    EXPECT_TRUE(pulled.ok()) << pulled;
    const auto run = daemon_client_->GetRun(run_id);
    EXPECT_TRUE(run.ok()) << run.status();
    kept.grad_norm = run->status().last_result().grad_norm();
    for (const v1::LayerStatistics& layer : run->status().layers()) kept.rms.push_back(layer.rms_ratio());
    EXPECT_GT(kept.grad_norm, 0);
    EXPECT_EQ(kept.rms.size(), kSharded);
    return kept;
  }
  // What one rank makes of the same gradients with whole tensors.
  std::vector<Kept> Alone(ShardedSpec spec, uint64_t steps) {
    spec.run_id = absl::StrCat(spec.run_id, "-alone");
    spec.ranks = 1;
    Team team = Start(spec, 1);
    std::vector<Kept> kept(1);
    for (uint64_t step = 1; step <= steps; ++step) {
      Step(spec, &team, step);
      kept.push_back(Keep(spec.run_id));
    }
    return kept;
  }
  void ExpectSame(const Kept& got, const Kept& wanted) {
    EXPECT_EQ(got.updates, wanted.updates);
    EXPECT_EQ(got.grad_norm, wanted.grad_norm);
    EXPECT_EQ(got.rms, wanted.rms);
    for (const auto& [at, bytes] : wanted.slots) {
      EXPECT_TRUE(got.slots.at(at) == bytes) << at.second << " of tensor " << at.first << " differ";
    }
  }

  RealDaemon daemon_{WithSocket()};
  std::unique_ptr<Client> daemon_client_ = QuietClient(daemon_.address());
};
INSTANTIATE_TEST_SUITE_P(Transports, ShardTest, ::testing::Values(TransportChoice::kGrpc, TransportChoice::kShm),
                         [](const auto& param) {
                           return param.param == TransportChoice::kShm ? std::string("Shm") : std::string("Grpc");
                         });

TEST_P(ShardTest, TheBitsAreThoseOfOneRankWithWholeTensors) {
  for (const char* dtype : {"fp32", "bf16"}) {
    for (const auto commit : {v1::COMMIT_MODE_RELEASE, v1::COMMIT_MODE_STAGED}) {
      const ShardedSpec base{
          .run_id = absl::StrCat(dtype, "-", static_cast<int>(commit)), .dtype = dtype, .commit = commit};
      const std::vector<Kept> alone = Alone(base, 3);
      for (const uint32_t world : {2u, 4u, 8u}) {
        SCOPED_TRACE(absl::StrCat(base.run_id, ", ", world, " ranks"));
        ShardedSpec spec = base;
        spec.run_id = absl::StrCat(base.run_id, "-", world);
        Team team = Start(spec, world);
        for (uint64_t step = 1; step <= 3; ++step) {
          Step(spec, &team, step);
          if (HasFatalFailure()) return;
          ExpectSame(Keep(spec.run_id), alone[step]);
        }
        team.clear();
        ASSERT_TRUE(daemon_client_->DeleteRun(spec.run_id, /*force=*/true).ok());
      }
    }
  }
}

// Zeros keep their sign where a micro-batch lacks a tensor.
TEST_P(ShardTest, MicroBatchesAreSummedAsWithOneRank) {
  const ShardedSpec spec{.dtype = "bf16", .micros = 3};
  const std::vector<Kept> alone = Alone(spec, 2);
  Team team = Start(spec, 4);
  for (uint64_t step = 1; step <= 2; ++step) {
    Step(spec, &team, step);
    ExpectSame(Keep(spec.run_id), alone[step]);
  }
}

TEST_P(ShardTest, AnotherWorldGoesOnWithTheSameBits) {
  const ShardedSpec spec;
  const std::vector<Kept> alone = Alone(spec, 6);
  uint64_t step = 0;
  Start(spec, 8).clear();
  for (const uint32_t world : {8u, 3u, 1u}) {
    SCOPED_TRACE(absl::StrCat(world, " ranks"));
    Team team = Attach(spec, world);
    for (int i = 0; i < 2; ++i) Step(spec, &team, ++step);
    ExpectSame(Keep(spec.run_id), alone[step]);
  }
}

TEST_P(ShardTest, ReplicasReceiveWhatOthersContribute) {
  for (const auto commit : {v1::COMMIT_MODE_RELEASE, v1::COMMIT_MODE_STAGED}) {
    const ShardedSpec spec{.run_id = absl::StrCat("replicas-", static_cast<int>(commit)), .commit = commit};
    const std::vector<Kept> alone = Alone(spec, 2);
    Team team = Start(spec, 4, /*replicas=*/2);
    for (uint64_t step = 1; step <= 2; ++step) {
      Step(spec, &team, step);
      ExpectSame(Keep(spec.run_id), alone[step]);
    }
    EXPECT_THAT(std::string(team[4]->client().Push(3, {}).message()),
                HasSubstr("rank 4 holds elements [0, 3275) of it and contributes nothing"));
  }
}

TEST_P(ShardTest, ARewindIsFollowedToTheSameBits) {
  const ShardedSpec spec;
  Team team = Start(spec, 4);
  for (uint64_t step = 1; step <= 3; ++step) Step(spec, &team, step);
  const Kept third = Keep(spec.run_id);
  v1::RewindRequest back;
  back.set_run_id(spec.run_id);
  back.set_steps_back(1);
  ASSERT_TRUE(daemon_client_->Rewind(back).ok());
  for (uint32_t rank = 0; rank < team.size(); ++rank) {
    ASSERT_TRUE(Soon([&] { return !team[rank]->client().status().ok(); }));
    EXPECT_EQ(RewoundTo(team[rank]->client().status()), 2u);
    ASSERT_TRUE(team[rank]->Attach(rank, 4, GetParam()).ok());
  }
  Step(spec, &team, 3);
  ExpectSame(Keep(spec.run_id), third);
}

TEST_P(ShardTest, APullBringsTheShardAlone) {
  const ShardedSpec spec;
  Team team = Start(spec, 3);
  for (uint64_t step = 1; step <= 2; ++step) Step(spec, &team, step);
  const Kept kept = Keep(spec.run_id);
  for (auto& rank : team) {
    std::map<uint32_t, std::string> weights, momenta;
    std::map<uint32_t, uint64_t> updates;
    const auto sink = [&](uint32_t tensor, uint64_t offset, absl::Span<const std::byte> piece, uint64_t) {
      weights[tensor].resize(offset);
      weights[tensor].append(reinterpret_cast<const char*>(piece.data()), piece.size());
      return absl::OkStatus();
    };
    ASSERT_TRUE(rank->client().Pull(spec.run_id, {}, sink, 0, {}, rank->shards()).ok());
    const auto take = [&](const ServedPiece& piece) {
      if (piece.slot == "updates") updates[piece.tensor] = piece.updates;
      std::string& to = momenta[piece.tensor];
      if (piece.slot != "momentum") return absl::OkStatus();
      EXPECT_EQ(piece.first * 4, rank->Held(piece.tensor).first + to.size());
      to.append(reinterpret_cast<const char*>(piece.codes.data()), piece.codes.size());
      return absl::OkStatus();
    };
    const std::vector<std::string> slots = {"updates", "momentum"};
    ASSERT_TRUE(rank->client().PullState(spec.run_id, {}, slots, take, 0, rank->shards()).ok());
    for (uint32_t i = 0; i < kSharded; ++i) {
      const ShardPiece held = rank->Held(i);
      EXPECT_EQ(weights[i], kept.slots.at({i, "weights"}).substr(held.first, held.size())) << i;
      EXPECT_EQ(momenta[i], kept.slots.at({i, "momentum"}).substr(held.first, held.size())) << i;
      EXPECT_EQ(updates.count(i), held.size() > 0 ? 1u : 0u);
      EXPECT_EQ(updates[i], held.size() > 0 ? kept.updates.at(i) : 0u);
    }
    const std::vector<uint32_t> one = {3};
    const std::vector<uint64_t> digests = {1};
    EXPECT_THAT(std::string(rank->client().Pull(spec.run_id, one, sink, 0, digests, rank->shards()).message()),
                HasSubstr("digests are of whole tensors"));
  }
}

// Connections that break after so many bytes, in the middle of shards.
TEST_P(ShardTest, ALostConnectionChangesNoBit) {
  const ShardedSpec spec;
  const std::vector<Kept> alone = Alone(spec, 3);
  CuttingProxy proxy(daemon_.address(), {250'000, 90'000, 60'000, 130'000});
  Team team = Start(spec, 2, 1, proxy.address());
  for (uint64_t step = 1; step <= 3; ++step) {
    Step(spec, &team, step);
    ExpectSame(Keep(spec.run_id), alone[step]);
  }
  EXPECT_GE(proxy.connections(), 3);
}

TEST_P(ShardTest, WhatCannotBeIsRefusedByName) {
  const ShardedSpec spec;
  v1::RunSpec narrow = SpecOf(spec);
  narrow.mutable_groups(0)->set_serving("int8-row");
  ASSERT_TRUE(daemon_client_->CreateRun(narrow).ok());
  const auto refusal = [&](Shards shards, uint32_t world = 2) {
    AttachOptions options{.run_id = spec.run_id, .world = world, .transport = GetParam()};
    options.shards = std::move(shards);
    return std::string(daemon_client_->Attach(options).status().message());
  };
  EXPECT_THAT(refusal({Shard{0, 1}}), HasSubstr("shards: got 1, wanted one for each of the run's 5 tensors"));
  EXPECT_THAT(refusal({{}, Shard{3, 8}, {}, {}, {}}),
              HasSubstr("shards: [3, 8) of tensor 'layers.1.w', which has 7 elements"));
  EXPECT_THAT(refusal({{}, {}, Shard{0, 4000}, {}, {}}), HasSubstr("served in int8-row, which has scales"));
  EXPECT_THAT(refusal({{}, {}, Shard{4096, 4097}, {}, {}}, 1),
              HasSubstr("no rank contributes to chunk 0 of tensor 2 'layers.2.w'"));

  const ShardedSpec other{.run_id = "other"};
  ASSERT_TRUE(daemon_client_->CreateRun(SpecOf(other)).ok());
  ShardedRank half(daemon_.address(), other, {.part = 0, .parts = 2}),
      gap(daemon_.address(), other, {.part = 1, .parts = 3});
  ASSERT_TRUE(half.Attach(0, 2, GetParam()).ok());
  EXPECT_THAT(std::string(gap.Attach(1, 2, GetParam()).status().message()),
              HasSubstr("no rank contributes to elements"));
  ShardedRank replica(daemon_.address(), other, {.part = 1, .parts = 2, .contributes = false});
  EXPECT_THAT(std::string(replica.Attach(1, 2, GetParam()).status().message()), HasSubstr("no rank contributes to"));
  EXPECT_THAT(std::string(half.client().Push(3, {}).message()), HasSubstr("(6419 x fp32)"));
}

}  // namespace
}  // namespace ballast
