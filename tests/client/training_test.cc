// The client against a real daemon: what it trains, what it may not do, and that a lost connection changes no bit.
#include <gmock/gmock.h>
#include <gtest/gtest.h>
#include <unistd.h>

#include <cstring>

#include "absl/strings/str_cat.h"
#include "proto/checksum.h"

#include "tests/client/cutting_proxy.h"
#include "tests/client/least_squares.h"
#include "tests/client/quiet_client.h"
#include "tests/client/real_daemon.h"
#include "tests/eventually.h"

namespace ballast {
namespace {

using ::testing::ElementsAre;
using ::testing::Ge;
using ::testing::HasSubstr;

TEST(TrainingTest, FiftyStepsLowerTheLossAndPullReturnsTheTrainersWeights) {
  RealDaemon daemon;
  LeastSquares problem;
  const auto client = QuietClient(daemon.address());
  ASSERT_TRUE(problem.Join(*client).ok());
  const double first = problem.Step(*client).value();
  for (int i = 1; i < 50; ++i) ASSERT_TRUE(problem.Step(*client).ok());
  EXPECT_LT(problem.Backward(), 0.2 * first);

  std::vector<float> pulled[] = {problem.weights(0), problem.weights(1)};
  for (std::vector<float>& tensor : pulled) std::fill(tensor.begin(), tensor.end(), -1.f);
  const auto sink = [&](uint32_t tensor, uint64_t offset, absl::Span<const std::byte> piece, uint64_t step) {
    EXPECT_EQ(step, 50u);
    std::memcpy(reinterpret_cast<std::byte*>(pulled[tensor].data()) + offset, piece.data(), piece.size());
    return absl::OkStatus();
  };
  ASSERT_TRUE(client->Pull("least-squares", {}, sink).ok());
  EXPECT_EQ(pulled[0], problem.weights(0));
  EXPECT_EQ(pulled[1], problem.weights(1));
}

TEST(TrainingTest, ASecondProcessGoesOnWhereTheFirstStopped) {
  RealDaemon daemon;
  LeastSquares problem;
  auto client = QuietClient(daemon.address());
  ASSERT_EQ(problem.Join(*client)->resume_step, 1u);
  for (int i = 0; i < 5; ++i) ASSERT_TRUE(problem.Step(*client).ok());
  client.reset();  // releases the rank at once
  client = QuietClient(daemon.address());
  const auto attachment = problem.Join(*client, {.run_id = "least-squares", .wait_s = 0});
  ASSERT_TRUE(attachment.ok()) << attachment.status();
  EXPECT_EQ(attachment->resume_step, 6u);
  EXPECT_TRUE(attachment->weights_loaded);
  EXPECT_EQ(attachment->last_result->step(), 5u);
  EXPECT_THAT(attachment->digests,
              ElementsAre(WeightDigest(problem.WeightBytes(0)), WeightDigest(problem.WeightBytes(1))));
  EXPECT_TRUE(problem.Step(*client).ok());
}

TEST(TrainingTest, ALiveRankIsTakenOverOnlyOnRequest) {
  RealDaemon daemon;
  LeastSquares problem, other;
  const auto first = QuietClient(daemon.address()), second = QuietClient(daemon.address());
  ASSERT_TRUE(problem.Join(*first).ok());
  const absl::Status taken = other.Join(*second, {.run_id = "least-squares", .wait_s = 0}).status();
  EXPECT_EQ(taken.code(), absl::StatusCode::kAlreadyExists);
  EXPECT_THAT(std::string(taken.message()), HasSubstr("takeover=true"));
  ASSERT_TRUE(other.Join(*second, {.run_id = "least-squares", .takeover = true}).ok());
  EXPECT_EQ(problem.Step(*first).status().code(), absl::StatusCode::kAborted);
  EXPECT_TRUE(other.Step(*second).ok());
}

// The daemon hears of the end of a stream that was cancelled when it comes to it.
TEST(TrainingTest, WhoDetachesWithAStepOpenAttachesAgain) {
  Config config = RealDaemon::Small();
  config.limits.lease_s = 0.01;
  config.shm_socket = absl::StrCat(::testing::TempDir(), "ballast-detach-", getpid(), ".sock");
  RealDaemon daemon(config);
  LeastSquares problem;
  const auto client = QuietClient(daemon.address());
  ASSERT_TRUE(problem.Join(*client).ok());
  for (const TransportChoice transport : {TransportChoice::kGrpc, TransportChoice::kShm}) {
    for (int i = 0; i < 40; ++i) {
      SCOPED_TRACE(absl::StrCat("transport ", static_cast<int>(transport), ", time ", i));
      ASSERT_TRUE(client->BeginStep({}).ok());
      client->Detach();
      const auto attachment = client->Attach({.run_id = "least-squares", .transport = transport});
      ASSERT_TRUE(attachment.ok()) << attachment.status();
    }
  }
}

// Until the daemon has updated the tensor, which Pull shows.
void AwaitUpdate(Client& client, uint32_t tensor, uint64_t step) {
  for (uint64_t seen = 0; seen < step;) {
    const auto sink = [&](uint32_t, uint64_t, absl::Span<const std::byte>, uint64_t of) {
      seen = of;
      return absl::OkStatus();
    };
    ASSERT_TRUE(client.Pull("least-squares", {&tensor, 1}, sink).ok());
  }
}

TEST(TrainingTest, ATornStepIsToldToWhoeverComesNext) {
  RealDaemon daemon;
  LeastSquares problem;
  auto client = QuietClient(daemon.address());
  ASSERT_TRUE(problem.Join(*client).ok());
  ASSERT_TRUE(client->BeginStep({}).ok());
  problem.Backward();
  ASSERT_TRUE(client->Push(1, problem.Gradient(1)).ok());
  AwaitUpdate(*client, 1, 1);
  client.reset();
  client = QuietClient(daemon.address());
  const auto attachment = problem.Join(*client, {.run_id = "least-squares", .takeover = true});
  ASSERT_TRUE(attachment.ok()) << attachment.status();
  EXPECT_EQ(attachment->resume_step, 2u);
  EXPECT_EQ(attachment->last_result->outcome(), v1::STEP_OUTCOME_PARTIAL);
  EXPECT_THAT(attachment->last_result->tensors_not_applied(), ElementsAre(0u));
}

// Trains with weights that return in int8, decoded here; a second client takes the codes.
TEST(TrainingTest, NarrowWeightsLandDecodedOrAsTheyAreServed) {
  for (const char* serving : {"int8-row", "int8-tensor", "fp8-e4m3"}) {
    SCOPED_TRACE(serving);
    RealDaemon daemon;
    LeastSquares problem;
    v1::RunSpec spec = LeastSquares::Spec();
    spec.mutable_groups(0)->set_serving(serving);
    const auto client = QuietClient(daemon.address());
    ASSERT_TRUE(client->CreateRun(spec).ok());
    ASSERT_TRUE(client->Attach({.run_id = "least-squares"}).ok());
    ASSERT_TRUE(problem.UploadAndBind(*client).ok());
    const double first = problem.Step(*client).value();
    for (int i = 1; i < 50; ++i) ASSERT_TRUE(problem.Step(*client).ok());
    EXPECT_LT(problem.Backward(), 0.3 * first);

    const uint64_t elements = problem.weights(0).size(), rows = LeastSquares::kInputs;
    std::vector<std::byte> codes(elements);
    std::vector<float> scales(serving == std::string("int8-row") ? rows : serving == std::string("fp8-e4m3") ? 0 : 1);
    EXPECT_EQ(client->BindServed(0, codes.data(), elements - 1, absl::MakeSpan(scales)).code(),
              absl::StatusCode::kInvalidArgument);
    ASSERT_TRUE(client->BindServed(0, codes.data(), elements, absl::MakeSpan(scales)).ok());
    ASSERT_TRUE(problem.Step(*client).ok());

    std::vector<std::byte> pulled;
    std::vector<float> decoded(elements);
    const uint32_t tensor = 0;
    ASSERT_TRUE(client
                    ->PullServed("least-squares", {&tensor, 1},
                                 [&](const ServedPiece& piece) {
                                   EXPECT_EQ(piece.first, pulled.size());
                                   EXPECT_EQ(piece.format, serving);
                                   pulled.insert(pulled.end(), piece.codes.begin(), piece.codes.end());
                                   const uint64_t row =
                                       scales.size() == rows ? piece.first / LeastSquares::kOutputs : 0;
                                   for (size_t i = 0; i < piece.scales.size(); ++i) {
                                     EXPECT_EQ(piece.scales[i], scales[row + i]);
                                   }
                                   return absl::OkStatus();
                                 })
                    .ok());
    EXPECT_EQ(pulled, codes);
    ASSERT_TRUE(client
                    ->Pull("least-squares", {&tensor, 1},
                           [&](uint32_t, uint64_t offset, absl::Span<const std::byte> piece, uint64_t) {
                             std::memcpy(reinterpret_cast<std::byte*>(decoded.data()) + offset, piece.data(),
                                         piece.size());
                             return absl::OkStatus();
                           })
                    .ok());
    for (uint64_t i = 0; i < elements && !scales.empty(); ++i) {
      const float scale = scales[scales.size() == rows ? i / LeastSquares::kOutputs : 0];
      ASSERT_EQ(decoded[i], static_cast<float>(static_cast<int8_t>(codes[i])) * scale / 127) << i;
    }
  }
}

TEST(TrainingTest, AnUnknownRunIsNotFound) {
  RealDaemon daemon;
  EXPECT_EQ(QuietClient(daemon.address())->Attach({.run_id = "nowhere"}).status().code(), absl::StatusCode::kNotFound);
}

TEST(TrainingTest, ADeletedRunEndsItsTrainerWithTheReason) {
  RealDaemon daemon;
  LeastSquares problem;
  const auto client = QuietClient(daemon.address()), operators = QuietClient(daemon.address());
  ASSERT_TRUE(problem.Join(*client).ok());
  ASSERT_TRUE(operators->DeleteRun("least-squares", /*force=*/true).ok());
  EXPECT_FALSE(problem.Step(*client).ok());
  EXPECT_FALSE(client->status().ok());
}

std::vector<float> TrainThrough(const std::string& server, int steps) {
  LeastSquares problem;
  const auto client = QuietClient(server);
  const auto attachment = problem.Join(*client);
  EXPECT_TRUE(attachment.ok()) << attachment.status();
  for (int i = 0; i < steps; ++i) {
    const auto loss = problem.Step(*client);
    EXPECT_TRUE(loss.ok()) << loss.status();
    if (!loss.ok()) break;
  }
  return problem.weights(0);
}

// A step of eight micro-batches keeps no more than one of them and what is under way: Push does not wait, so the test
// waits after each until the daemon has it, which it has once what went before is acknowledged.
TEST(TrainingTest, TheHostBufferDoesNotGrowWithTheMicroBatches) {
  constexpr uint32_t kMicros = 8;
  Config config = RealDaemon::Small();
  config.limits.credit_bytes = 16 << 10;
  RealDaemon daemon(config);
  LeastSquares problem;
  v1::RunSpec spec = LeastSquares::Spec();
  spec.set_accumulation(kMicros);
  const auto client = QuietClient(daemon.address());
  ASSERT_TRUE(client->CreateRun(spec).ok());
  ASSERT_TRUE(client->Attach({.run_id = "least-squares"}).ok());
  ASSERT_TRUE(problem.UploadAndBind(*client).ok());
  ASSERT_TRUE(client->BeginStep({.micro_batches = kMicros}).ok());
  problem.Backward();
  const uint64_t bytes = problem.Gradient(0).size() + problem.Gradient(1).size();
  for (uint32_t micro = 0; micro < kMicros; ++micro) {
    for (const uint32_t tensor : {1u, 0u}) ASSERT_TRUE(client->Push(tensor, problem.Gradient(tensor)).ok());
    EXPECT_SOON(client->GetRun("least-squares")->status().received_bytes(), Ge((micro + 1) * bytes));
    if (micro + 1 < kMicros) {
      ASSERT_TRUE(client->EndMicro({}).ok());
    }
  }
  const auto closed = client->EndStep({}).get();
  ASSERT_TRUE(closed.ok()) << closed.status();
  EXPECT_EQ(closed->result.outcome(), v1::STEP_OUTCOME_APPLIED);
  EXPECT_EQ(closed->timing.pushed_bytes, kMicros * bytes);
  EXPECT_LE(closed->timing.buffered_bytes_most, bytes + config.limits.credit_bytes);
}

// The connection is lost in the run's creation, the attachment, the upload or the first step.
TEST(TrainingTest, AConnectionLostBeforeTheFirstStepChangesNoBit) {
  constexpr int kSteps = 2;
  Config config = RealDaemon::Small();
  config.limits.lease_s = 0.1;  // of a rank that was granted and never heard of
  RealDaemon uncut(config);
  const std::vector<float> expected = TrainThrough(uncut.address(), kSteps);
  for (uint64_t cut = 300; cut < 60'000; cut += cut < 2'000 ? 151 : 5'003) {
    SCOPED_TRACE(absl::StrCat("the first connection cut after ", cut, " bytes"));
    RealDaemon daemon(config);
    CuttingProxy proxy(daemon.address(), {cut});
    ASSERT_EQ(TrainThrough(proxy.address(), kSteps), expected);
    EXPECT_GE(proxy.connections(), 2);
  }
}

TEST(TrainingTest, LostConnectionsChangeNoBit) {
  constexpr int kSteps = 6;
  RealDaemon uncut;
  const std::vector<float> expected = TrainThrough(uncut.address(), kSteps);
  // A step moves about 100 KB; the upload before the first 50 KB.
  for (uint64_t cut = 80'000; cut < 400'000; cut += 29'003) {
    SCOPED_TRACE(absl::StrCat("connections cut after ", cut, " and 61000 bytes"));
    RealDaemon daemon;
    CuttingProxy proxy(daemon.address(), {cut, 61'000});
    ASSERT_EQ(TrainThrough(proxy.address(), kSteps), expected);
    EXPECT_EQ(proxy.connections(), 3);
  }
}

// The connection is lost before, in or behind an upload that takes the place of the run's weights and state: it is taken
// over whole, once or, where the answer was lost, perhaps.
TEST(TrainingTest, AReplacementIsTakenOverWholeWhereverTheConnectionIsLost) {
  for (uint64_t cut = 130'000; cut < 360'000; cut += 17'003) {
    SCOPED_TRACE(absl::StrCat("the first connection cut after ", cut, " bytes"));
    RealDaemon daemon;
    CuttingProxy proxy(daemon.address(), {cut});
    auto client = QuietClient(proxy.address());
    const auto watcher = Client::Connect({.server = daemon.address()}).value();
    LeastSquares problem;
    ASSERT_TRUE(problem.Join(*client).ok());
    ASSERT_TRUE(problem.Step(*client).ok());
    const std::vector<float> values(problem.weights(0).size(), 0.25f);
    const absl::Span<const std::byte> bytes(reinterpret_cast<const std::byte*>(values.data()), values.size() * 4);
    const TensorView views[] = {{.tensor = 0, .format = "fp32", .bytes = bytes},
                                {.tensor = 0, .format = "fp32", .bytes = bytes, .slot = "momentum"},
                                {.tensor = 0, .format = "fp32", .bytes = bytes, .slot = "variance"},
                                {.tensor = 0, .slot = "updates", .updates = 7}};
    const auto replaced = client->LoadWeights(views, /*replace=*/true);
    EXPECT_TRUE(replaced.ok() || RewoundTo(replaced.status()) == 1u) << replaced.status();
    EXPECT_EQ(RewoundTo(client->status()), 1u);
    std::vector<float> pulled;
    const auto sink = [&](const ServedPiece& piece) {
      const auto* const first = reinterpret_cast<const float*>(piece.codes.data());
      pulled.insert(pulled.end(), first, first + piece.codes.size() / 4);
      return absl::OkStatus();
    };
    const std::vector<std::string> slots = {"master"};
    const uint32_t tensor = 0;
    ASSERT_TRUE(watcher->PullState("least-squares", {&tensor, 1}, slots, sink).ok());
    EXPECT_EQ(pulled, values);
    const v1::RunStatus status = watcher->GetRun("least-squares")->status();  // after the pull: what it shows is done
    EXPECT_TRUE(status.weights_loaded());
    EXPECT_EQ(status.generation(), 2u);
    ASSERT_TRUE(problem.Join(*client).ok());
    EXPECT_TRUE(problem.Step(*client).ok());
  }
}

}  // namespace
}  // namespace ballast
