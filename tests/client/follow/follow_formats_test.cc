// Readers that follow a real daemon's run in another format than it is served in: each version is what a run brings that is
// served in it and gets the same gradients, to the bit.
#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include "absl/strings/str_cat.h"

#include "tests/client/cutting_proxy.h"
#include "tests/client/follow/followed_training.h"
#include "tests/client/real_daemon.h"

namespace ballast {
namespace {

using ::testing::HasSubstr;

struct TwinFormats {
  const char *serving, *followed;
};

// A run that is followed in a format, and one on a daemon of its own that serves it.
struct Twins {
  explicit Twins(const TwinFormats& formats)
      : run(daemon.address(), formats.serving, /*rewinds=*/true, {formats.followed}),
        twin(other.address(), formats.followed, /*rewinds=*/true) {}
  void Train(int steps) {
    for (int i = 0; i < steps; ++i) {
      run.problem.Backward();
      for (FollowedTraining* one : {&run, &twin}) {
        ASSERT_TRUE(one->client->BeginStep({.groups = {{.lr = 1e-3}}}).ok());
        for (const uint32_t tensor : {1u, 0u})
          ASSERT_TRUE(one->client->Push(tensor, run.problem.Gradient(tensor)).ok());
        ASSERT_TRUE(one->client->EndStep(0).get().ok());
      }
    }
  }
  void Rewind(uint64_t step) {
    for (FollowedTraining* one : {&run, &twin}) {
      v1::RewindRequest request;
      request.set_run_id(kRun);
      request.set_to_step(step);
      ASSERT_TRUE(one->client->Rewind(request).ok());
    }
  }

  RealDaemon daemon, other;
  FollowedTraining run, twin;
};

std::unique_ptr<Subscriber> FollowIn(const std::string& server, const std::string& format) {
  return Subscriber::Open({.server = server, .log = [](const std::string&) {}}, {.run_id = kRun, .format = format})
      .value();
}

class FollowFormatsTest : public ::testing::TestWithParam<TwinFormats> {};

TEST_P(FollowFormatsTest, EachVersionIsWhatAPullBringsOfARunThatServesIt) {
  Twins twins(GetParam());
  const auto reader = FollowIn(twins.daemon.address(), GetParam().followed);
  const auto served = Follow(twins.daemon.address());
  Reach(*reader, 0);
  for (uint64_t step = 1; step <= 6; ++step) {
    twins.Train(1);
    EXPECT_EQ(Reach(*reader, step).base_step, step - 1);
    Reach(*served, step);
    EXPECT_EQ(Here(*reader), twins.twin.Pulled()) << step;
    EXPECT_EQ(Here(*served), twins.run.Pulled()) << step;
  }
  EXPECT_EQ(reader->Served(0)->format, GetParam().followed);
}

TEST_P(FollowFormatsTest, ReadersGoBackWithTheRunAndComeBack) {
  Twins twins(GetParam());
  const auto reader = FollowIn(twins.daemon.address(), GetParam().followed);
  twins.Train(5);
  Reach(*reader, 5);
  twins.Rewind(2);
  Reach(*reader, 2, /*generation=*/2);
  EXPECT_EQ(Here(*reader), twins.twin.Pulled());
  const auto again = FollowIn(twins.daemon.address(), GetParam().followed);
  Reach(*again, 2, /*generation=*/2);
  EXPECT_EQ(Here(*again), twins.twin.Pulled());
}

TEST_P(FollowFormatsTest, AReaderThatIsCutAgainAndAgainKeepsUp) {
  Twins twins(GetParam());
  CuttingProxy proxy(twins.daemon.address(), {9'000, 20'000, 40'000, 30'000, 25'000});
  const auto reader = FollowIn(proxy.address(), GetParam().followed);
  for (uint64_t step = 1; step <= 12; ++step) {
    twins.Train(1);
    Reach(*reader, step);
    EXPECT_EQ(Here(*reader), twins.twin.Pulled()) << step;
  }
  EXPECT_GE(proxy.connections(), 2);
}

INSTANTIATE_TEST_SUITE_P(Formats, FollowFormatsTest,
                         ::testing::Values(TwinFormats{"fp32", "bf16"}, TwinFormats{"fp32", "fp8-e4m3"},
                                           TwinFormats{"fp32", "int8-row"}, TwinFormats{"int8-row", "fp16"},
                                           TwinFormats{"int8-tensor", "int8-row"}, TwinFormats{"bf16", "fp32"}),
                         [](const auto& test) {
                           return InTestName(absl::StrCat(test.param.serving, "In", test.param.followed));
                         });

TEST(FollowFormatsDaemonTest, AFormatThatATrainerComputesInIsTheDtype) {
  RealDaemon daemon;
  FollowedTraining training(daemon.address(), "fp32", /*rewinds=*/false, {"bf16", "fp8-e4m3"});
  const auto half = FollowIn(daemon.address(), "bf16"), quarter = FollowIn(daemon.address(), "fp8-e4m3");
  Reach(*half, 0);
  Reach(*quarter, 0);
  EXPECT_EQ(half->spec().tensors(0).dtype(), "bf16");
  EXPECT_EQ(half->spec().groups(0).serving(), "bf16");
  EXPECT_EQ(quarter->spec().tensors(0).dtype(), "fp32");
  EXPECT_EQ(quarter->spec().groups(0).serving(), "fp8-e4m3");
  std::vector<std::byte> codes(LeastSquares::kOutputs * 2);
  ASSERT_TRUE(half->Read(1, absl::MakeSpan(codes)).ok());
  EXPECT_EQ(absl::MakeConstSpan(codes), half->Served(1)->codes);
}

TEST(FollowFormatsDaemonTest, FewerWeightsChangeInFewerBits) {
  RealDaemon daemon;
  FollowedTraining training(daemon.address(), "fp32", /*rewinds=*/false, {"bf16"});
  const auto served = Follow(daemon.address()), half = FollowIn(daemon.address(), "bf16");
  training.Train(3);
  Reach(*served, 3);
  Reach(*half, 3);
  ASSERT_TRUE(training.client->BeginStep({.groups = {{.lr = 1e-6}}}).ok());
  training.problem.Backward();
  for (const uint32_t tensor : {1u, 0u}) {
    ASSERT_TRUE(training.client->Push(tensor, training.problem.Gradient(tensor)).ok());
  }
  ASSERT_TRUE(training.client->EndStep(0).get().ok());
  const FollowedVersion of_served = Reach(*served, 4), of_half = Reach(*half, 4);
  EXPECT_EQ(of_half.whole_bytes * 2, of_served.whole_bytes);
  EXPECT_LT(of_half.changed_elements, of_served.changed_elements);
}

TEST(FollowFormatsDaemonTest, WhatCannotBeFollowedIsRefusedByName) {
  RealDaemon daemon;
  FollowedTraining training(daemon.address(), "fp32", /*rewinds=*/false, {"bf16"});
  const auto refusal = [&](const SubscribeOptions& subscription) {
    return Subscriber::Open({.server = daemon.address()}, subscription).status();
  };
  const absl::Status unlisted = refusal({.run_id = kRun, .format = "fp16"});
  EXPECT_EQ(unlisted.code(), absl::StatusCode::kFailedPrecondition);
  EXPECT_THAT(std::string(unlisted.message()),
              HasSubstr("cannot be followed in format 'fp16': readers may follow it as "
                        "it is served, or in bf16; create it with that"));
  EXPECT_EQ(refusal({.run_id = kRun, .format = "bf17"}).code(), absl::StatusCode::kInvalidArgument);
  EXPECT_EQ(refusal({.run_id = kRun, .average = 0.9, .format = "bf16"}).code(), absl::StatusCode::kInvalidArgument);
  EXPECT_EQ(refusal({.run_id = kRun, .tag = "good", .format = "bf16"}).code(), absl::StatusCode::kInvalidArgument);
  const absl::Status named = FollowIn(daemon.address(), "bf16")->Rollback("good");
  EXPECT_EQ(named.code(), absl::StatusCode::kInvalidArgument);
  EXPECT_THAT(std::string(named.message()), HasSubstr("in a subscription in format 'bf16'"));
  EXPECT_TRUE(refusal({.run_id = kRun, .format = "fp32"}).ok()) << "it is served in it";
}

TEST(FollowFormatsDaemonTest, AnAmendmentMayAddFormatsAndTakeThemAway) {
  RealDaemon daemon;
  FollowedTraining training(daemon.address(), "fp32");
  v1::RunSpec spec = training.spec;
  spec.mutable_follow()->add_formats("bf16");
  ASSERT_TRUE(training.client->AmendRun(spec).ok());
  ASSERT_TRUE(training.client->Attach({.run_id = kRun}).ok());
  const auto reader = FollowIn(daemon.address(), "bf16");
  Reach(*reader, 0);
  spec.mutable_follow()->set_formats(0, "fp16");
  ASSERT_TRUE(training.client->AmendRun(spec).ok());
  ASSERT_TRUE(training.client->Attach({.run_id = kRun}).ok());
  absl::StatusOr<std::optional<FollowedVersion>> next = reader->Next(kSoonS);
  while (next.ok()) next = reader->Next(kSoonS);
  EXPECT_EQ(next.status().code(), absl::StatusCode::kFailedPrecondition);
  EXPECT_THAT(std::string(next.status().message()), HasSubstr("or in fp16"));
  Reach(*FollowIn(daemon.address(), "fp16"), 0);
}

}  // namespace
}  // namespace ballast
