// Readers of a real daemon's run, while it trains: each version is what a Pull brings, to the bit.
#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include <atomic>
#include <string>
#include <thread>
#include <vector>

#include "absl/synchronization/mutex.h"

#include "tests/client/cutting_proxy.h"
#include "tests/client/follow/followed_training.h"
#include "tests/client/real_daemon.h"

namespace ballast {
namespace {

using ::testing::HasSubstr;

class FollowTrainingTest : public ::testing::TestWithParam<const char*> {
 protected:
  RealDaemon daemon_;
};

TEST_P(FollowTrainingTest, EachVersionIsWhatAPullBrings) {
  FollowedTraining training(daemon_.address(), GetParam());
  const auto reader = Follow(daemon_.address());
  const FollowedVersion first = Reach(*reader, 0);
  EXPECT_FALSE(first.base_step);
  EXPECT_EQ(first.elements, LeastSquares::kInputs * LeastSquares::kOutputs + LeastSquares::kOutputs);
  EXPECT_EQ(Here(*reader), training.Pulled());
  for (uint64_t step = 1; step <= 8; ++step) {
    training.Train(1);
    const FollowedVersion version = Reach(*reader, step);
    EXPECT_EQ(version.step, step);
    EXPECT_EQ(version.base_step, step - 1);
    EXPECT_EQ(Here(*reader), training.Pulled()) << step;
    EXPECT_LT(version.StalenessSeconds(), kSoonS);
  }
}

TEST_P(FollowTrainingTest, AReaderThatIsCutAgainAndAgainKeepsUp) {
  FollowedTraining training(daemon_.address(), GetParam());
  CuttingProxy proxy(daemon_.address(), {9'000, 20'000, 40'000, 30'000, 25'000, 50'000, 21'000, 33'000});
  const auto reader = Follow(proxy.address());
  for (uint64_t step = 1; step <= 12; ++step) {
    training.Train(1);
    Reach(*reader, step);
    EXPECT_EQ(Here(*reader), training.Pulled()) << step;
  }
  EXPECT_GE(proxy.connections(), 8);
}

TEST_P(FollowTrainingTest, ReadersGoBackWithTheRun) {
  FollowedTraining training(daemon_.address(), GetParam(), /*rewinds=*/true);
  training.Train(2);
  const auto reader = Follow(daemon_.address());
  training.Train(3);
  Reach(*reader, 5);
  v1::RewindRequest request;
  request.set_run_id(kRun);
  request.set_to_step(2);
  ASSERT_TRUE(training.client->Rewind(request).ok());
  const FollowedVersion back = Reach(*reader, 2, /*generation=*/2);
  EXPECT_EQ(back.step, 2u);
  EXPECT_EQ(Here(*reader), training.Pulled());
}

INSTANTIATE_TEST_SUITE_P(Servings, FollowTrainingTest, ::testing::Values("fp32", "bf16", "int8-row", "fp8-e4m3"),
                         [](const auto& test) { return InTestName(test.param); });

TEST(FollowDaemonTest, AReaderThatWantsFewerVersionsGetsThem) {
  RealDaemon daemon;
  FollowedTraining training(daemon.address());
  const auto reader = Follow(daemon.address(), /*every=*/4);
  Reach(*reader, 0);
  training.Train(10);
  const FollowedVersion version = Reach(*reader, 4);
  EXPECT_GE(version.step, 4u);
  EXPECT_LT(version.skipped, version.step) << "of those that were made";
}

TEST(FollowDaemonTest, AReaderWaitsForTheRunAndForItsWeights) {
  RealDaemon daemon;
  absl::Mutex mu;
  std::vector<std::string> lines;
  ClientOptions options{.server = daemon.address(), .log = [&](const std::string& line) {
                          absl::MutexLock lock(&mu);
                          lines.push_back(line);
                        }};
  const auto waits = [&]() ABSL_EXCLUSIVE_LOCKS_REQUIRED(mu) { return !lines.empty(); };
  absl::StatusOr<std::unique_ptr<Subscriber>> reader;
  std::thread opens([&] { reader = Subscriber::Open(options, {.run_id = kRun, .wait_for_run_s = kSoonS}); });
  {
    absl::MutexLock lock(&mu);
    mu.Await(absl::Condition(&waits));
    EXPECT_THAT(lines[0], HasSubstr(absl::StrCat("for run '", kRun, "'")));
  }
  const auto client = QuietClient(daemon.address());
  v1::RunSpec spec = LeastSquares::Spec();
  spec.mutable_follow();
  ASSERT_TRUE(client->CreateRun(spec).ok());
  const absl::Status none = Subscriber::Open({.server = daemon.address(), .log = [](const std::string&) {}},
                                             {.run_id = kRun, .wait_for_run_s = .01})
                                .status();
  EXPECT_EQ(none.code(), absl::StatusCode::kFailedPrecondition);
  EXPECT_THAT(std::string(none.message()), HasSubstr("has no weights yet"));
  LeastSquares problem;
  ASSERT_TRUE(client->Attach({.run_id = kRun}).ok());
  ASSERT_TRUE(problem.UploadAndBind(*client).ok());
  opens.join();
  ASSERT_TRUE(reader.ok()) << reader.status();
  Reach(**reader, 0);
}

TEST(FollowDaemonTest, ARunThatDoesNotComeIsNotFoundInTheEnd) {
  RealDaemon daemon;
  ClientOptions options{.server = daemon.address(), .log = [](const std::string&) {}};
  const absl::Status gone = Subscriber::Open(options, {.run_id = "none", .wait_for_run_s = .01}).status();
  EXPECT_EQ(gone.code(), absl::StatusCode::kNotFound);
  EXPECT_THAT(std::string(gone.message()), AllOf(HasSubstr("'none'"), HasSubstr("nor did that change within 0.01 s")));
  std::atomic<bool> asked = false;
  options.interrupted = [&] { return asked.exchange(true); };  // the first look is before the wait
  const absl::Status interrupted = Subscriber::Open(options, {.run_id = "none", .wait_for_run_s = 1e6}).status();
  EXPECT_EQ(interrupted.code(), absl::StatusCode::kCancelled) << interrupted;
}

TEST(FollowDaemonTest, ARunsEndIsAReadersEnd) {
  RealDaemon daemon;
  FollowedTraining training(daemon.address());
  const auto reader = Follow(daemon.address());
  Reach(*reader, 0);
  ASSERT_TRUE(training.client->DeleteRun(kRun, /*force=*/true).ok());
  const absl::Status gone = reader->Next(kSoonS).status();
  EXPECT_EQ(gone.code(), absl::StatusCode::kNotFound) << gone;
}

TEST(FollowDaemonTest, ARunWithoutFollowIsRefusedUntilItIsAmended) {
  RealDaemon daemon;
  LeastSquares problem;
  const auto client = Client::Connect({.server = daemon.address()}).value();
  ASSERT_TRUE(problem.Join(*client).ok());
  const absl::Status refused = Subscriber::Open({.server = daemon.address()}, {.run_id = kRun, .every = 0}).status();
  EXPECT_EQ(refused.code(), absl::StatusCode::kFailedPrecondition);
  EXPECT_THAT(std::string(refused.message()), HasSubstr("has no RunSpec.follow"));
  v1::RunSpec followed = LeastSquares::Spec();
  followed.mutable_follow();
  const auto amended = client->AmendRun(followed);
  ASSERT_TRUE(amended.ok()) << amended.status();
  ASSERT_TRUE(client->Attach({.run_id = kRun}).ok());
  const auto reader = Follow(daemon.address());
  Reach(*reader, 0);
  // Another one, while it reads.
  v1::TensorSpec* added = followed.add_tensors();
  added->set_name("extra");
  added->set_dtype("fp32");
  added->add_shape(5);
  ASSERT_TRUE(client->AmendRun(followed).ok());
  ASSERT_TRUE(client->Attach({.run_id = kRun}).ok());
  const std::vector<float> extra = {1, 2, 3, 4, 5};
  const TensorView view{.tensor = 2,
                        .format = "fp32",
                        .bytes = {reinterpret_cast<const std::byte*>(extra.data()), extra.size() * sizeof(float)}};
  const auto loaded = client->LoadWeights({&view, 1}, /*replace=*/true);
  ASSERT_TRUE(loaded.ok()) << loaded.status();
  FollowedVersion version;
  while (!version.respecified) version = Reach(*reader, 0);
  std::vector<float> got(5);
  while (got != extra) {
    ASSERT_TRUE(reader->Read(2, absl::MakeSpan(reinterpret_cast<std::byte*>(got.data()), 20)).ok());
    if (got != extra) version = Reach(*reader, 0);
  }
}

TEST(FollowDaemonTest, ManyReadersFollowWhileARunTrains) {
  RealDaemon daemon;
  FollowedTraining training(daemon.address(), "int8-row");
  constexpr uint64_t kSteps = 30;
  std::vector<std::unique_ptr<Subscriber>> readers;
  for (int i = 0; i < 4; ++i) readers.push_back(Follow(daemon.address()));
  std::vector<std::thread> threads;
  threads.reserve(readers.size());
  for (const auto& reader : readers) threads.emplace_back([&] { Reach(*reader, kSteps); });
  training.Train(kSteps);
  for (std::thread& thread : threads) thread.join();
  for (const auto& reader : readers) EXPECT_EQ(Here(*reader), training.Pulled());
}

// Until one that was asked for by this name, or, where it is empty, the newest.
FollowedVersion Await(Subscriber& reader, const std::string& tag, uint64_t step) {
  for (;;) {
    const auto version = reader.Next(kSoonS);
    EXPECT_TRUE(version.ok() && *version) << version.status() << " on the way to '" << tag << "'";
    if (!version.ok() || !*version) return {};
    if ((*version)->tag == tag && (*version)->step >= step) return **version;
  }
}

v1::TagVersionRequest NameIt(const std::string& name) {
  v1::TagVersionRequest request;
  request.set_run_id(kRun);
  request.set_name(name);
  return request;
}

TEST_P(FollowTrainingTest, AReaderGoesBackToAVersionWithANameAndOn) {
  FollowedTraining training(daemon_.address(), GetParam());
  training.Train(2);
  const auto good = training.Pulled();
  ASSERT_TRUE(training.client->TagVersion(NameIt("good")).ok());
  const auto reader = Follow(daemon_.address());
  training.Train(3);
  Await(*reader, "", 5);
  ASSERT_TRUE(reader->Rollback("good").ok());
  EXPECT_EQ(Await(*reader, "good", 0).step, 2u);
  EXPECT_EQ(Here(*reader), good);
  training.Train(1);
  const auto none = reader->Next(0.2);
  ASSERT_TRUE(none.ok());
  EXPECT_FALSE(*none) << "it stays there";
  ASSERT_TRUE(reader->Rollback("good").ok());
  EXPECT_EQ(Await(*reader, "good", 0).step, 2u) << "and is told again that it is there";
  reader->Resume();
  EXPECT_EQ(Await(*reader, "", 6).step, 6u);
  EXPECT_EQ(Here(*reader), training.Pulled());
  const absl::Status unknown = reader->Rollback("bad");
  EXPECT_EQ(unknown.code(), absl::StatusCode::kNotFound);
  EXPECT_THAT(std::string(unknown.message()), HasSubstr("names: 'good'"));
  training.Train(1);
  EXPECT_EQ(Await(*reader, "", 7).step, 7u) << "it goes on as before";
}

TEST_P(FollowTrainingTest, AReaderMayBeginAtAVersionWithAName) {
  FollowedTraining training(daemon_.address(), GetParam());
  training.Train(1);
  const auto good = training.Pulled();
  ASSERT_TRUE(training.client->TagVersion(NameIt("good")).ok());
  training.Train(2);
  const auto reader = Subscriber::Open({.server = daemon_.address(), .log = [](const std::string&) {}},
                                       {.run_id = kRun, .tag = "good"});
  ASSERT_TRUE(reader.ok()) << reader.status();
  EXPECT_EQ(Await(**reader, "good", 0).step, 1u);
  EXPECT_EQ(Here(**reader), good);
  EXPECT_EQ(Subscriber::Open({.server = daemon_.address()}, {.run_id = kRun, .tag = "bad"}).status().code(),
            absl::StatusCode::kNotFound);
}

TEST_P(FollowTrainingTest, AVersionWithANameCanBePulledAndLetGo) {
  FollowedTraining training(daemon_.address(), GetParam());
  training.Train(1);
  std::map<uint32_t, std::string> good, pulled;
  const auto into = [](std::map<uint32_t, std::string>* codes) {
    return [codes](const ServedPiece& piece) {
      (*codes)[piece.tensor].append(reinterpret_cast<const char*>(piece.codes.data()), piece.codes.size());
      return absl::OkStatus();
    };
  };
  ASSERT_TRUE(training.client->PullServed(kRun, {}, into(&good)).ok());
  ASSERT_TRUE(training.client->TagVersion(NameIt("good"))->created());
  EXPECT_FALSE(training.client->TagVersion(NameIt("good"))->created());
  training.Train(2);
  v1::PullRequest request;
  request.set_run_id(kRun);
  request.mutable_version()->set_tag("good");
  const absl::Status whole = training.client->PullVersion(request, into(&pulled));
  EXPECT_TRUE(whole.ok()) << whole;
  EXPECT_EQ(pulled, good);
  EXPECT_EQ(training.client->ListVersions(kRun)->tags(0).id().step(), 1u);
  ASSERT_TRUE(training.client->UntagVersion(kRun, "good").ok());
  EXPECT_EQ(training.client->UntagVersion(kRun, "good").code(), absl::StatusCode::kNotFound);
}

}  // namespace
}  // namespace ballast
