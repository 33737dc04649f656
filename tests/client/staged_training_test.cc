// Staged steps from end to end, by clients of a real daemon: measured before they end, clipped by what the end brings,
// open-ended and discarded. The same bits as by the run's own clipping and announced micro-batches, over either
// transport and over connections that are lost.
#include <gmock/gmock.h>
#include <gtest/gtest.h>
#include <unistd.h>

#include <cmath>
#include <thread>

#include "absl/strings/str_cat.h"

#include "tests/client/cutting_proxy.h"
#include "tests/client/least_squares.h"
#include "tests/client/quiet_client.h"
#include "tests/client/real_daemon.h"

namespace ballast {
namespace {

using ::testing::HasSubstr;

constexpr int kStagedSteps = 5, kDiscarded = 3;
constexpr uint32_t kStagedMicros = 3;
constexpr double kMostNorm = 0.5;

Config WithSocket() {
  Config config = RealDaemon::Small();
  config.shm_socket = absl::StrCat(::testing::TempDir(), "ballast-staged-", getpid(), ".sock");
  return config;
}

struct StagedRun {
  uint32_t world = 1;
  bool open_ended = false;  // and measured, and clipped by the step; else announced, and clipped by the run
  TransportChoice transport = TransportChoice::kGrpc;
};

v1::RunSpec StagedSpec(const StagedRun& run) {
  v1::RunSpec spec = LeastSquares::Spec();
  spec.set_commit(v1::COMMIT_MODE_STAGED);
  spec.set_ranks(run.world);
  spec.set_accumulation(kStagedMicros);
  if (!run.open_ended) spec.set_max_grad_norm(kMostNorm);
  return spec;
}

// What a rank has seen of the training.
struct Seen {
  std::vector<double> norms, losses;
  std::vector<float> weights, bias;
  bool operator==(const Seen&) const = default;
};

// One rank's training.
class Rank {
 public:
  Rank(const std::string& server, const StagedRun& run, uint32_t rank)
      : run_(run), rank_(rank), client_(QuietClient(server)) {}

  void Join() {
    ASSERT_TRUE(client_->CreateRun(StagedSpec(run_)).ok());
    const auto attached =
        client_->Attach({.run_id = "least-squares", .rank = rank_, .world = run_.world, .transport = run_.transport});
    ASSERT_TRUE(attached.ok()) << attached.status();
    ASSERT_TRUE((rank_ == 0 ? problem_.UploadAndBind(*client_) : problem_.Bind(*client_)).ok());
  }

  Seen Train() {
    for (int step = 1; step <= kStagedSteps; ++step) {
      const StepValues values{.groups = {{.lr = 0.02}}, .micro_batches = run_.open_ended ? 0 : MicrosOf(step)};
      EXPECT_EQ(client_->BeginStep(values), absl::OkStatus());
      step == kDiscarded ? Discard() : Step(MicrosOf(step));
      if (::testing::Test::HasFailure()) break;
    }
    return {norms_, losses_, problem_.weights(0), problem_.weights(1)};
  }

 private:
  static uint32_t MicrosOf(int step) { return 1 + static_cast<uint32_t>(step) % kStagedMicros; }

  void Push() {
    for (const uint32_t tensor : {1u, 0u}) {
      EXPECT_EQ(client_->Push(tensor, problem_.Gradient(tensor)), absl::OkStatus());
    }
  }

  void Step(uint32_t micros) {
    const double loss = problem_.Backward();
    losses_.push_back(loss);
    Push();
    for (uint32_t micro = 1; micro < micros; ++micro) {
      EXPECT_EQ(client_->EndMicro(loss), absl::OkStatus());
      Push();
    }
    StepEndValues end;
    if (run_.open_ended) {
      const auto measured = client_->MeasureStep(loss).get();
      ASSERT_TRUE(measured.ok()) << measured.status();
      EXPECT_TRUE(measured->measured);
      norms_.push_back(measured->grad_norm);
      EXPECT_EQ(client_->Push(0, problem_.Gradient(0)).code(), absl::StatusCode::kFailedPrecondition);
      end.max_grad_norm = kMostNorm;
    }
    const auto closed = client_->EndStep(loss, end).get();
    ASSERT_TRUE(closed.ok()) << closed.status();
    EXPECT_EQ(closed->result.outcome(), v1::STEP_OUTCOME_APPLIED) << closed->result.detail();
    EXPECT_LT(closed->result.clip_coefficient(), 1);
    if (!run_.open_ended) norms_.push_back(closed->result.grad_norm());
    EXPECT_EQ(closed->result.grad_norm(), norms_.back());
  }

  // The last rank in the middle of its backward; the others make the step, and one of them hears that in vain.
  void Discard() {
    problem_.Backward();
    EXPECT_EQ(client_->Push(1, problem_.Gradient(1)), absl::OkStatus());
    const bool discards = rank_ + 1 == run_.world || !run_.open_ended;
    if (!discards) {
      EXPECT_EQ(client_->Push(0, problem_.Gradient(0)), absl::OkStatus());
      const auto measured = client_->MeasureStep(std::nullopt).get();
      ASSERT_TRUE(measured.ok()) << measured.status();
      EXPECT_FALSE(measured->measured);
      EXPECT_TRUE(std::isnan(measured->grad_norm));
    }
    const auto closed = client_->EndStep({}, {.discard = discards}).get();
    ASSERT_TRUE(closed.ok()) << closed.status();
    EXPECT_EQ(closed->result.outcome(), v1::STEP_OUTCOME_SKIPPED);
    EXPECT_EQ(closed->result.reason(), "discarded");
    EXPECT_TRUE(closed->received.empty());
  }

  const StagedRun run_;
  const uint32_t rank_;
  LeastSquares problem_;
  std::vector<double> norms_, losses_;
  const std::unique_ptr<Client> client_;  // goes before what it writes to
};

// What all ranks saw alike.
Seen TrainRanks(const std::string& server, const StagedRun& run) {
  std::vector<std::unique_ptr<Rank>> ranks;
  for (uint32_t rank = 0; rank < run.world; ++rank) {
    ranks.push_back(std::make_unique<Rank>(server, run, rank));
    ranks.back()->Join();
  }
  std::vector<Seen> seen(run.world);
  std::vector<std::thread> threads;
  for (uint32_t rank = 0; rank < run.world; ++rank) {
    threads.emplace_back([&, rank] { seen[rank] = ranks[rank]->Train(); });
  }
  for (std::thread& thread : threads) thread.join();
  for (const Seen& one : seen) EXPECT_EQ(one, seen[0]);
  return seen[0];
}

Seen TrainAlone(const StagedRun& run) {
  RealDaemon daemon(WithSocket());
  return TrainRanks(daemon.address(), run);
}

TEST(StagedTrainingTest, MeasuredOpenEndedAndDiscardedStepsHaveTheBitsOfAnnouncedOnes) {
  for (const uint32_t world : {1u, 2u, 8u}) {
    SCOPED_TRACE(absl::StrCat(world, " ranks"));
    const Seen announced = TrainAlone({.world = world});
    ASSERT_EQ(announced.norms.size(), static_cast<size_t>(kStagedSteps - 1));
    for (const TransportChoice transport : {TransportChoice::kGrpc, TransportChoice::kShm}) {
      const Seen open = TrainAlone({.world = world, .open_ended = true, .transport = transport});
      EXPECT_EQ(open, announced);
    }
  }
}

TEST(StagedTrainingTest, LostConnectionsChangeNoBit) {
  const Seen expected = TrainAlone({.world = 1});
  for (uint64_t cut = 80'000; cut < 300'000; cut += 21'001) {
    SCOPED_TRACE(absl::StrCat("connections cut after ", cut, " and 37000 bytes"));
    RealDaemon daemon;
    CuttingProxy proxy(daemon.address(), {cut, 37'000});
    ASSERT_EQ(TrainRanks(proxy.address(), {.world = 1, .open_ended = true}), expected);
    EXPECT_EQ(proxy.connections(), 3);
  }
}

// The step goes on after what is refused.
TEST(StagedTrainingTest, WhatARunInReleaseCannotDoIsRefusedByName) {
  RealDaemon daemon;
  LeastSquares problem;
  const auto client = QuietClient(daemon.address());
  ASSERT_TRUE(problem.Join(*client).ok());
  const absl::Status unknown = client->BeginStep({.micro_batches = 0});
  ASSERT_TRUE(client->BeginStep({}).ok());
  problem.Backward();
  for (const uint32_t tensor : {1u, 0u}) ASSERT_TRUE(client->Push(tensor, problem.Gradient(tensor)).ok());
  for (const absl::Status& refused :
       {unknown, client->MeasureStep({}).get().status(), client->EndStep({}, {.max_grad_norm = 1}).get().status(),
        client->EndStep({}, {.discard = true}).get().status()}) {
    EXPECT_EQ(refused.code(), absl::StatusCode::kFailedPrecondition);
    EXPECT_THAT(std::string(refused.message()), HasSubstr("commit = release"));
    EXPECT_THAT(std::string(refused.message()), HasSubstr("COMMIT_MODE_STAGED"));
  }
  const absl::Status zero = client->EndStep({}, {.max_grad_norm = 0}).get().status();
  EXPECT_EQ(zero.code(), absl::StatusCode::kInvalidArgument);
  EXPECT_THAT(std::string(zero.message()), HasSubstr("max_grad_norm is 0"));
  EXPECT_EQ(client->EndStep({}).get()->result.outcome(), v1::STEP_OUTCOME_APPLIED);
}

TEST(StagedTrainingTest, AMeasureOutOfPlaceIsRefusedAndTheStepGoesOn) {
  RealDaemon daemon;
  LeastSquares problem;
  const auto client = QuietClient(daemon.address());
  EXPECT_EQ(client->MeasureStep({}).get().status().code(), absl::StatusCode::kFailedPrecondition);
  ASSERT_TRUE(client->CreateRun(StagedSpec({.world = 1})).ok());
  ASSERT_TRUE(client->Attach({.run_id = "least-squares"}).ok());
  ASSERT_TRUE(problem.UploadAndBind(*client).ok());
  EXPECT_EQ(client->MeasureStep({}).get().status(), absl::FailedPreconditionError("MeasureStep before BeginStep"));
  ASSERT_TRUE(client->BeginStep({.micro_batches = 2}).ok());
  EXPECT_THAT(std::string(client->MeasureStep({}).get().status().message()), HasSubstr("micro-batch 1 of 2"));
  ASSERT_TRUE(client->EndMicro({}).ok());
  EXPECT_EQ(client->MeasureStep({}).get()->grad_norm, 0);  // nothing was pushed
  EXPECT_THAT(std::string(client->MeasureStep({}).get().status().message()), HasSubstr("measured once"));
  EXPECT_EQ(client->EndStep({}).get()->result.outcome(), v1::STEP_OUTCOME_APPLIED);
}

}  // namespace
}  // namespace ballast
