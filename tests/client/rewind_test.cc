// A client whose run is rewound, by itself or by another: it is told, attaches again, and goes on to the bit.
#include <gmock/gmock.h>
#include <gtest/gtest.h>
#include <unistd.h>

#include <cstring>
#include <map>

#include "absl/strings/str_cat.h"

#include "tests/client/least_squares.h"
#include "tests/client/quiet_client.h"
#include "tests/client/real_daemon.h"
#include "tests/eventually.h"

namespace ballast {
namespace {

using ::testing::Eq;
using ::testing::HasSubstr;

class RewindTest : public ::testing::TestWithParam<TransportChoice> {
 protected:
  void Begin(Client& client) {
    v1::RunSpec spec = LeastSquares::Spec();
    spec.mutable_rewind()->set_snapshots(2);
    spec.mutable_rewind()->set_every(4);
    ASSERT_TRUE(client.CreateRun(spec).ok());
    ASSERT_TRUE(client.Attach(Rank()).ok());
    ASSERT_TRUE(problem_.UploadAndBind(client).ok());
  }
  static AttachOptions Rank() { return {.run_id = "least-squares", .transport = GetParam()}; }
  static v1::RewindRequest To(uint64_t step) {
    v1::RewindRequest request;
    request.set_run_id("least-squares");
    request.set_to_step(step);
    return request;
  }
  static v1::RunState State(Client& client) { return client.GetRun("least-squares")->status().state(); }
  std::vector<double> Train(Client& client, int steps) {
    std::vector<double> losses;
    for (int i = 0; i < steps; ++i) losses.push_back(problem_.Step(client).value());
    return losses;
  }
  // The rank again, with the weights of the step rewound to.
  void GoBack(Client& client, uint64_t step) {
    const auto attachment = client.Attach(Rank());
    ASSERT_TRUE(attachment.ok()) << attachment.status();
    EXPECT_EQ(attachment->resume_step, step + 1);
    EXPECT_EQ(attachment->last_result->step(), step);
    ASSERT_TRUE(problem_.Bind(client).ok());
    const auto sink = [&](uint32_t tensor, uint64_t offset, absl::Span<const std::byte> piece, uint64_t) {
      std::memcpy(reinterpret_cast<std::byte*>(problem_.weights(tensor).data()) + offset, piece.data(), piece.size());
      return absl::OkStatus();
    };
    ASSERT_TRUE(client.Pull("least-squares", {}, sink).ok());
  }

  static Config WithSocket() {
    Config config = RealDaemon::Small();
    config.shm_socket = absl::StrCat(::testing::TempDir(), "ballast-rewind-", getpid(), ".sock");
    return config;
  }

  RealDaemon daemon_{WithSocket()};
  LeastSquares problem_;
};

TEST_P(RewindTest, AClientThatAsksForItGoesOnToTheBit) {
  const auto client = QuietClient(daemon_.address());
  Begin(*client);
  Train(*client, 4);
  const std::vector<double> first = Train(*client, 6);
  const std::vector<float> weights = problem_.weights(0);
  const auto rewound = client->Rewind(To(4));
  ASSERT_TRUE(rewound.ok()) << rewound.status();
  EXPECT_EQ(RewoundTo(client->status()), 4u);
  GoBack(*client, 4);
  EXPECT_EQ(Train(*client, 6), first);
  EXPECT_EQ(problem_.weights(0), weights);
}

// For longer than a lease no call is made: the process lives all the same, and its run is not to be deleted.
TEST(ReturningTest, ATrainerThatMakesNoCallAfterARewindIsNotLost) {
  Config config = RealDaemon::Small();
  config.limits.lease_s = 0.3;
  RealDaemon daemon(config);
  LeastSquares problem;
  const auto client = QuietClient(daemon.address()), other = QuietClient(daemon.address());
  v1::RunSpec spec = LeastSquares::Spec();
  spec.mutable_rewind()->set_snapshots(1);
  spec.mutable_rewind()->set_every(1);
  ASSERT_TRUE(client->CreateRun(spec).ok());
  ASSERT_TRUE(client->Attach({.run_id = "least-squares"}).ok());
  ASSERT_TRUE(problem.UploadAndBind(*client).ok());
  for (int i = 0; i < 2; ++i) ASSERT_TRUE(problem.Step(*client).ok());
  v1::RewindRequest request;
  request.set_run_id("least-squares");
  ASSERT_TRUE(other->Rewind(request).ok());
  // One for each third of the lease, besides the client's own.
  EXPECT_SOON(daemon.metrics(), HasSubstr("ballast_rpc_handled_total{code=\"OK\",method=\"Attach\"} 9\n"));
  EXPECT_THAT(daemon.metrics(), HasSubstr("ballast_run_ranks_lost{run_id=\"least-squares\"} 0\n"));
  EXPECT_EQ(other->GetRun("least-squares")->status().state(), v1::RUN_STATE_TRAINING);
  const absl::Status refused = other->DeleteRun("least-squares", /*force=*/false).status();
  EXPECT_TRUE(absl::IsFailedPrecondition(refused)) << refused;
  EXPECT_THAT(std::string(refused.message()), HasSubstr(") has not come back since the rewind "));
  const auto attached = client->Attach({.run_id = "least-squares"});
  ASSERT_TRUE(attached.ok()) << attached.status();
  ASSERT_TRUE(problem.Bind(*client).ok());
  EXPECT_TRUE(problem.Step(*client).ok());
  client->Detach();
  EXPECT_TRUE(other->DeleteRun("least-squares", /*force=*/false).ok());
}

// The rewind comes while the step waits for its result, and while it is being sent.
TEST_P(RewindTest, AStepUnderWayIsToldOfTheRewind) {
  const auto client = QuietClient(daemon_.address()), other = QuietClient(daemon_.address());
  Begin(*client);
  Train(*client, 4);
  const std::vector<double> first = Train(*client, 2);
  ASSERT_TRUE(client->BeginStep({}).ok());
  problem_.Backward();
  ASSERT_TRUE(client->Push(1, problem_.Gradient(1)).ok());
  ASSERT_TRUE(other->Rewind(To(4)).ok());
  const absl::Status told = client->EndStep({}).get().status();
  EXPECT_EQ(RewoundTo(told), 4u) << told;
  EXPECT_EQ(RewoundTo(client->BeginStep({})), 4u);
  GoBack(*client, 4);
  EXPECT_EQ(Train(*client, 2), first);
}

// Whoever is told of a rewind may be at its end: no step comes after.
TEST_P(RewindTest, ATrainerThatLeavesAfterARewindHasLeftCleanly) {
  const auto other = QuietClient(daemon_.address());
  {
    const auto client = QuietClient(daemon_.address());
    Begin(*client);
    Train(*client, 6);
    ASSERT_TRUE(other->Rewind(To(4)).ok());
    EXPECT_SOON(RewoundTo(client->status()), Eq(4u));
  }
  EXPECT_SOON(State(*other), Eq(v1::RUN_STATE_FINISHED));
}

// The client closes before, or while, it hears of the rewind.
TEST_P(RewindTest, ATrainerThatLeavesDuringARewindHasLeftCleanly) {
  const auto other = QuietClient(daemon_.address());
  for (int i = 0; i < 5; ++i) {
    auto client = QuietClient(daemon_.address());
    if (i == 0) Begin(*client);
    if (i > 0) GoBack(*client, 4);
    Train(*client, 6);
    ASSERT_TRUE(other->Rewind(To(4)).ok());
    client.reset();
    EXPECT_SOON(State(*other), Eq(v1::RUN_STATE_FINISHED));
  }
}

TEST_P(RewindTest, ATrainerThatLeavesAfterARewindTakesTheRankFromNobody) {
  const auto successor = QuietClient(daemon_.address());
  auto client = QuietClient(daemon_.address());
  Begin(*client);
  Train(*client, 6);
  ASSERT_TRUE(successor->Rewind(To(4)).ok());
  ASSERT_TRUE(Soon([&] { return RewoundTo(client->status()).has_value(); }));
  GoBack(*successor, 4);
  client.reset();
  Train(*successor, 2);
  EXPECT_SOON(State(*successor), Eq(v1::RUN_STATE_TRAINING));
}

// What a pull of state brought, by tensor and slot.
struct PulledState {
  std::map<std::pair<uint32_t, std::string>, std::string> bytes;
  std::map<uint32_t, uint64_t> updates;

  absl::Status Take(const ServedPiece& piece) {
    if (piece.slot == "updates") updates[piece.tensor] = piece.updates;
    std::string& to = bytes[{piece.tensor, piece.slot}];
    to.resize(piece.first * sizeof(float));
    to.append(reinterpret_cast<const char*>(piece.codes.data()), piece.codes.size());
    return absl::OkStatus();
  }
  std::vector<TensorView> Views() const {
    std::vector<TensorView> views;
    for (const auto& [at, data] : bytes) {
      const auto& [tensor, slot] = at;
      TensorView view{.tensor = tensor, .format = "fp32", .slot = slot == "master" ? "weights" : slot};
      if (slot == "updates") {
        view.updates = updates.at(tensor);
      } else {
        view.bytes = {reinterpret_cast<const std::byte*>(data.data()), data.size()};
      }
      views.push_back(view);
    }
    return views;
  }
};

// By one client alone; the other is told as of a rewind.
TEST_P(RewindTest, StateThatWasPulledTakesThePlaceOfTheRunsToTheBit) {
  const auto client = QuietClient(daemon_.address()), other = QuietClient(daemon_.address());
  v1::RunSpec spec = LeastSquares::Spec();
  spec.mutable_groups(0)->set_master("fp32");
  spec.mutable_groups(0)->set_state("fp32");
  spec.mutable_groups(0)->set_rounding("nearest");
  ASSERT_TRUE(client->CreateRun(spec).ok());
  ASSERT_TRUE(client->Attach(Rank()).ok());
  ASSERT_TRUE(problem_.UploadAndBind(*client).ok());
  Train(*client, 4);
  PulledState state;
  const std::vector<std::string> slots = {"master", "momentum", "variance", "updates"};
  const auto take = [&](const ServedPiece& piece) { return state.Take(piece); };
  ASSERT_TRUE(other->PullState("least-squares", {}, slots, take).ok());
  EXPECT_EQ(state.updates, (std::map<uint32_t, uint64_t>{{0, 4}, {1, 4}}));
  const std::vector<double> first = Train(*client, 3);
  const auto replaced = client->LoadWeights(state.Views(), /*replace=*/true);
  ASSERT_TRUE(replaced.ok()) << replaced.status();
  EXPECT_EQ(RewoundTo(client->status()), 7u);
  GoBack(*client, 7);
  EXPECT_EQ(Train(*client, 3), first);
  EXPECT_EQ(client->GetRun("least-squares")->status().generation(), 2u);
}

INSTANTIATE_TEST_SUITE_P(Transports, RewindTest, ::testing::Values(TransportChoice::kGrpc, TransportChoice::kShm),
                         [](const auto& transport) {
                           return transport.param == TransportChoice::kShm ? "Shm" : "Grpc";
                         });

}  // namespace
}  // namespace ballast
