// A client that gives its run another spec in the middle: what stays goes on to the bit, and others are told.
#include <gmock/gmock.h>
#include <gtest/gtest.h>
#include <unistd.h>

#include <map>
#include <utility>

#include "absl/strings/str_cat.h"

#include "tests/client/least_squares.h"
#include "tests/client/quiet_client.h"
#include "tests/client/real_daemon.h"
#include "tests/eventually.h"

namespace ballast {
namespace {

using ::testing::HasSubstr;

class AmendTest : public ::testing::TestWithParam<TransportChoice> {
 protected:
  std::unique_ptr<Client> Open() { return QuietClient(daemon_.address()); }
  static v1::RunSpec Spec(const std::string& run) {
    v1::RunSpec spec = LeastSquares::Spec();
    spec.set_run_id(run);
    return spec;
  }
  static v1::RunSpec Grown(const std::string& run) {
    v1::RunSpec spec = Spec(run);
    v1::TensorSpec* added = spec.add_tensors();
    added->set_name("added");
    added->set_dtype("fp32");
    added->add_shape(40);
    return spec;
  }
  static AttachOptions Rank(const std::string& run) { return {.run_id = run, .transport = GetParam()}; }
  static void Begin(Client& client, LeastSquares* problem, const std::string& run) {
    ASSERT_TRUE(client.CreateRun(Spec(run)).ok());
    ASSERT_TRUE(client.Attach(Rank(run)).ok());
    ASSERT_TRUE(problem->UploadAndBind(client).ok());
  }
  static std::vector<double> Train(Client& client, LeastSquares* problem, int steps) {
    std::vector<double> losses;
    for (int i = 0; i < steps; ++i) losses.push_back(problem->Step(client).value());
    return losses;
  }
  // All slots of the first two tensors.
  static std::map<std::pair<uint32_t, std::string>, std::string> Stored(Client& client, const std::string& run) {
    std::map<std::pair<uint32_t, std::string>, std::string> stored;
    const uint32_t tensors[] = {0, 1};
    const std::vector<std::string> slots = {"master", "momentum", "variance", "updates"};
    const auto take = [&](const ServedPiece& piece) {
      std::string& to = stored[{piece.tensor, piece.slot}];
      if (piece.slot == "updates") to = std::to_string(piece.updates);
      to.append(reinterpret_cast<const char*>(piece.codes.data()), piece.codes.size());
      return absl::OkStatus();
    };
    EXPECT_TRUE(client.PullState(run, tensors, slots, take).ok());
    return stored;
  }

  static Config WithSocket() {
    Config config = RealDaemon::Small();
    config.shm_socket = absl::StrCat(::testing::TempDir(), "ballast-amend-", getpid(), ".sock");
    return config;
  }

  RealDaemon daemon_{WithSocket()};
  LeastSquares problem_;
};

TEST_P(AmendTest, ATensorIsAddedAndTheOthersGoOnAsInARunWithoutIt) {
  const auto plain = Open(), client = Open();
  LeastSquares same;
  Begin(*plain, &same, "plain");
  Train(*plain, &same, 3);
  const std::vector<double> expected = Train(*plain, &same, 3);

  Begin(*client, &problem_, "grown");
  Train(*client, &problem_, 3);
  const auto before = Stored(*client, "grown");
  const auto amended = client->AmendRun(Grown("grown"));
  ASSERT_TRUE(amended.ok()) << amended.status();
  EXPECT_TRUE(amended->amended());
  EXPECT_EQ(amended->step(), 3u);
  EXPECT_EQ(amended->tensors_added(), 1u);
  EXPECT_EQ(RewoundTo(client->status()), 3u);
  const auto again = client->AmendRun(Grown("grown"));  // as where the answer was lost
  ASSERT_TRUE(again.ok()) << again.status();
  EXPECT_FALSE(again->amended());
  auto attachment = client->Attach(Rank("grown"));
  ASSERT_TRUE(attachment.ok()) << attachment.status();
  EXPECT_FALSE(attachment->weights_loaded);
  EXPECT_EQ(attachment->resume_step, 4u);
  const std::vector<float> weights(40, 0.5f);
  const TensorView added{.tensor = 2,
                         .format = "fp32",
                         .bytes = {reinterpret_cast<const std::byte*>(weights.data()), weights.size() * sizeof(float)}};
  const auto loaded = client->LoadWeights({&added, 1}, /*replace=*/true);
  ASSERT_TRUE(loaded.ok()) << loaded.status();
  attachment = client->Attach(Rank("grown"));
  ASSERT_TRUE(attachment.ok()) << attachment.status();
  EXPECT_TRUE(attachment->weights_loaded);
  EXPECT_EQ(Stored(*client, "grown"), before);
  ASSERT_TRUE(problem_.Bind(*client).ok());
  EXPECT_EQ(Train(*client, &problem_, 3), expected);
  EXPECT_EQ(problem_.weights(0), same.weights(0));
}

TEST_P(AmendTest, AnotherClientIsToldAndDoesNotTrainWithTheOldSpec) {
  v1::RunSpec spec = Spec("r");
  spec.set_ranks(2);
  const auto client = Open(), other = Open();
  for (Client* one : {client.get(), other.get()}) ASSERT_TRUE(one->CreateRun(spec).ok());
  AttachOptions first = Rank("r"), second = Rank("r");
  first.world = second.world = 2;
  second.rank = 1;
  ASSERT_TRUE(client->Attach(first).ok());
  ASSERT_TRUE(other->Attach(second).ok());
  ASSERT_TRUE(problem_.UploadAndBind(*client).ok());
  (*spec.mutable_groups(0)->mutable_hyper())["eps"] = 1e-6;
  ASSERT_TRUE(client->AmendRun(spec).ok());
  EXPECT_FALSE(client->BeginStep({}).ok());
  EXPECT_TRUE(Soon([&] { return !other->status().ok(); }));
  EXPECT_EQ(RewoundTo(other->status()), 0u) << other->status();
  const absl::Status refused = other->Attach(second).status();
  EXPECT_TRUE(absl::IsFailedPrecondition(refused));
  EXPECT_THAT(std::string(refused.message()), HasSubstr("the run was amended (AmendRun)"));
  ASSERT_TRUE(other->CreateRun(spec).ok());
  EXPECT_TRUE(other->Attach(second).ok());
  EXPECT_TRUE(client->Attach(first)->weights_loaded);
}

TEST_P(AmendTest, WhatIsRefusedLeavesTheSessionAsItWas) {
  const auto client = Open();
  EXPECT_THAT(std::string(client->AmendRun(Grown("r")).status().message()), HasSubstr("AmendRun before Attach"));
  Begin(*client, &problem_, "r");
  v1::RunSpec shorter = Spec("r");
  shorter.mutable_tensors()->RemoveLast();
  const absl::Status refused = client->AmendRun(shorter).status();
  EXPECT_TRUE(absl::IsInvalidArgument(refused));
  EXPECT_THAT(std::string(refused.message()), HasSubstr("tensor 'linear.bias' is left out"));
  const auto same = client->AmendRun(Spec("r"));
  ASSERT_TRUE(same.ok()) << same.status();
  EXPECT_FALSE(same->amended());
  EXPECT_TRUE(problem_.Step(*client).ok());
}

INSTANTIATE_TEST_SUITE_P(Transports, AmendTest, ::testing::Values(TransportChoice::kGrpc, TransportChoice::kShm),
                         [](const auto& transport) {
                           return transport.param == TransportChoice::kShm ? "Shm" : "Grpc";
                         });

}  // namespace
}  // namespace ballast
