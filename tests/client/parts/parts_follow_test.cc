// Readers of a run on several daemons, while it trains: each version is what a Pull brings, and what a reader of the same run
// on one daemon has, to the bit.
#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include <cstring>
#include <filesystem>
#include <optional>
#include <sstream>
#include <thread>

#include "client/cpp/ctl/command_line.h"
#include "client/cpp/parts/part_placement.h"
#include "tests/client/cutting_proxy.h"
#include "tests/client/parts/followed_parts.h"
#include "tests/client/relay/relay_daemon.h"
#include "tests/server/storage/temporary_folder.h"

namespace ballast {
namespace {

using ::testing::HasSubstr;

class PartsFollowTest : public ::testing::TestWithParam<ServedAndFollowed> {};

TEST_P(PartsFollowTest, EachVersionIsWhatAPullBringsAndWhatOneDaemonGives) {
  Training training = FollowedDozen(GetParam());
  training.steps = 6;
  const std::vector<ServedBits> pulled = BitsOfSteps(ServedAsFollowed(training), GetParam().average);
  const Daemons daemons(3), alone(1);
  PartsRank rank(daemons.addresses(), training, 0), same(alone.addresses(), training, 0);
  ASSERT_EQ(rank.Join(), absl::OkStatus());
  ASSERT_EQ(same.Join(), absl::OkStatus());
  const auto reader = FollowParts(daemons.addresses(), GetParam());
  const auto other = FollowParts(alone.addresses(), GetParam());
  ASSERT_TRUE(reader != nullptr && other != nullptr);
  for (int step = 0; step <= training.steps; ++step) {
    if (step > 0) rank.Train(step, step);
    if (step > 0) same.Train(step, step);
    const FollowedVersion version = Reach(*reader, static_cast<uint64_t>(step));
    const FollowedVersion wanted = Reach(*other, static_cast<uint64_t>(step));
    EXPECT_EQ(version.step, wanted.step);
    EXPECT_EQ(version.base_step, wanted.base_step);
    EXPECT_EQ(version.changed, wanted.changed);
    EXPECT_EQ(version.changed_elements, wanted.changed_elements);
    EXPECT_EQ(version.elements, wanted.elements);
    EXPECT_EQ(version.whole_bytes, wanted.whole_bytes);
    EXPECT_EQ(version.received_bytes, wanted.received_bytes);
    EXPECT_LT(version.StalenessSeconds(), kSoonS);
    EXPECT_TRUE(Here(*reader) == pulled[static_cast<size_t>(step)]) << step;
    EXPECT_TRUE(Here(*reader) == Here(*other)) << step;
  }
}

// At the pace of the daemons: steps are passed over, and none is mixed with another.
TEST_P(PartsFollowTest, WhileTwoRanksTrainEveryVersionIsOfOneStep) {
  Training training = FollowedDozen(GetParam(), /*world=*/2);
  training.steps = 40;
  const std::vector<ServedBits> wanted = BitsOfSteps(ServedAsFollowed(training), GetParam().average);
  const Daemons daemons(3);
  std::vector<std::unique_ptr<PartsRank>> ranks;
  for (uint32_t r = 0; r < 2; ++r) {
    ranks.push_back(std::make_unique<PartsRank>(daemons.addresses(), training, r));
    ASSERT_EQ(ranks.back()->Join(), absl::OkStatus());
  }
  const auto reader = FollowParts(daemons.addresses(), GetParam(), /*marks_changed=*/true);
  ASSERT_NE(reader, nullptr);
  std::vector<std::thread> threads;
  for (auto& rank : ranks) threads.emplace_back([&rank, &training] { rank->Train(1, training.steps); });
  std::vector<std::string> patched(kDozen);  // the first version, and what changed since
  for (uint64_t step = 0; step < static_cast<uint64_t>(training.steps) && !HasFailure();) {
    const FollowedVersion version = Reach(*reader, step);
    step = version.step;
    EXPECT_TRUE(Here(*reader) == wanted[step]) << step;
    for (uint32_t i = 0; i < kDozen; ++i) {
      std::string& bytes = patched[i];
      const uint64_t count = reader->CountChanged(i).value();
      const size_t size = reader->spec().tensors(static_cast<int>(i)).dtype() == "bf16" ? 2 : 4;
      std::vector<int64_t> places(count);
      std::vector<std::byte> values(count * size);
      ASSERT_EQ(reader->ReadChanged(i, absl::MakeSpan(places), absl::MakeSpan(values)), absl::OkStatus());
      if (bytes.empty()) bytes.resize(values.size());
      for (size_t k = 0; k < count; ++k) {
        std::memcpy(bytes.data() + static_cast<size_t>(places[k]) * size, values.data() + k * size, size);
      }
      std::string read(bytes.size(), '\0');
      ASSERT_EQ(reader->Read(i, absl::MakeSpan(reinterpret_cast<std::byte*>(read.data()), read.size())),
                absl::OkStatus());
      EXPECT_TRUE(read == bytes) << "tensor " << i << " step " << step;
    }
  }
  for (std::thread& thread : threads) thread.join();
}

INSTANTIATE_TEST_SUITE_P(Formats, PartsFollowTest,
                         ::testing::Values(ServedAndFollowed{"fp32"}, ServedAndFollowed{"bf16"},
                                           ServedAndFollowed{"int8-row"}, ServedAndFollowed{"fp32", "bf16"},
                                           ServedAndFollowed{"fp32", "int8-row"}, ServedAndFollowed{"bf16", "fp32"},
                                           ServedAndFollowed{.serving = "bf16", .average = 0.9}),
                         [](const auto& test) {
                           const std::string& format = test.param.format;
                           return InTestName(test.param.serving + (format.empty() ? "" : "In" + format) +
                                             (test.param.average ? "Average" : ""));
                         });

// A run on three daemons after step 7, and a reader of it.
class PartsRewindTest : public ::testing::Test {
 protected:
  void Begin(const ServedAndFollowed& formats) {
    Training training = FollowedDozen(formats);
    training.steps = 8;
    wanted_ = BitsOfSteps(ServedAsFollowed(training), formats.average);
    rank_.emplace(daemons_.addresses(), training, 0);
    ASSERT_EQ(rank_->Join(), absl::OkStatus());
    reader_ = FollowParts(daemons_.addresses(), formats);
    ASSERT_NE(reader_, nullptr);
    rank_->Train(1, 7);
    Reach(*reader_, 7);
  }
  static void GoBackTo4(Client& client) {
    v1::RewindRequest request;
    request.set_run_id("dozen");
    request.set_to_step(4);
    ASSERT_TRUE(client.Rewind(request).ok());
  }
  void GoOnTo8(uint64_t generation) {
    ASSERT_TRUE(rank_->Attach().ok());
    rank_->Train(5, 8);
    EXPECT_EQ(Reach(*reader_, 8, generation).step, 8u);
    EXPECT_TRUE(Here(*reader_) == wanted_[8]);
  }
  void GoBackAndOn() {
    ASSERT_NO_FATAL_FAILURE(GoBackTo4(rank_->client()));
    const FollowedVersion back = Reach(*reader_, 4, /*generation=*/4);
    EXPECT_EQ(back.step, 4u);
    EXPECT_TRUE(Here(*reader_) == wanted_[4]);
    GoOnTo8(/*generation=*/4);
    // A step that none has begun is not begun anew.
    EXPECT_EQ(rank_->client().GetRun("dozen")->status().generation(), 4u);
  }

  const Daemons daemons_{3};
  std::vector<ServedBits> wanted_;  // by step
  std::optional<PartsRank> rank_;
  std::unique_ptr<Subscriber> reader_;
};

TEST_F(PartsRewindTest, ReadersGoBackWithTheRun) {
  ASSERT_NO_FATAL_FAILURE(Begin({"bf16"}));
  GoBackAndOn();
}

TEST_F(PartsRewindTest, ReadersInAnotherFormatGoBackWithTheRun) {
  ASSERT_NO_FATAL_FAILURE(Begin({"fp32", "bf16"}));
  GoBackAndOn();
}

TEST_F(PartsRewindTest, ReadersOfAnAverageGoBackWithTheRun) {
  ASSERT_NO_FATAL_FAILURE(Begin({.serving = "fp32", .average = 0.9}));
  GoBackAndOn();
}

// By an operator who names one daemon alone: the trainer takes the others back, too.
TEST_F(PartsRewindTest, WhereOneDaemonWasRewoundReadersWaitForTheOthers) {
  ASSERT_NO_FATAL_FAILURE(Begin({}));
  ASSERT_NO_FATAL_FAILURE(GoBackTo4(*OpenClient(daemons_[1].address())));
  const auto none = reader_->Next(0.5);
  ASSERT_TRUE(none.ok()) << none.status();
  EXPECT_FALSE(none->has_value());
  EXPECT_TRUE(Here(*reader_) == wanted_[7]);
  while (rank_->client().status().ok()) std::this_thread::yield();
  GoOnTo8(/*generation=*/2);
}

TEST(PartsFollowDaemonsTest, AReaderThatIsCutAgainAndAgainKeepsUp) {
  Training training = FollowedDozen({"bf16"});
  training.steps = 10;
  const std::vector<ServedBits> wanted = BitsOfSteps(training);
  const Daemons daemons(2);
  PartsRank rank(daemons.addresses(), training, 0);
  ASSERT_EQ(rank.Join(), absl::OkStatus());
  CuttingProxy proxy(daemons[1].address(), {9'000, 20'000, 40'000, 30'000, 25'000, 50'000, 21'000, 33'000});
  const auto reader = FollowParts(daemons[0].address() + "," + proxy.address());
  ASSERT_NE(reader, nullptr);
  for (int step = 1; step <= training.steps; ++step) {
    rank.Train(step, step);
    const FollowedVersion version = Reach(*reader, static_cast<uint64_t>(step));
    EXPECT_TRUE(Here(*reader) == wanted[version.step]) << step;
  }
  EXPECT_GE(proxy.connections(), 4);
}

TEST(PartsFollowDaemonsTest, AnAmendedRunIsFollowed) {
  Training training = FollowedDozen();
  const Daemons daemons(2);
  PartsRank rank(daemons.addresses(), training, 0);
  ASSERT_EQ(rank.Join(), absl::OkStatus());
  const auto reader = FollowParts(daemons.addresses());
  rank.Train(1, 2);
  Reach(*reader, 2);
  v1::RunSpec grown = training.spec;
  v1::TensorSpec* added = grown.add_tensors();
  added->set_name("added");
  added->set_dtype("fp32");
  added->add_shape(5);
  const auto amended = rank.client().AmendRun(grown);
  ASSERT_TRUE(amended.ok()) << amended.status();
  training.spec = grown;
  ASSERT_TRUE(rank.client().Attach({.run_id = "dozen"}).ok());
  const float values[5] = {1, 2, 3, 4, 5};
  const TensorView view{
      .tensor = kDozen, .format = "fp32", .bytes = {reinterpret_cast<const std::byte*>(values), sizeof(values)}};
  ASSERT_TRUE(rank.client().LoadWeights({&view, 1}, /*replace=*/true).ok());
  FollowedVersion version;
  while (!version.respecified) version = Reach(*reader, 0);
  EXPECT_EQ(reader->spec().tensors_size(), 13);
  float read[5] = {};
  while (std::memcmp(read, values, sizeof(values)) != 0) {
    const auto room = absl::MakeSpan(reinterpret_cast<std::byte*>(read), sizeof(read));
    ASSERT_EQ(reader->Read(kDozen, room), absl::OkStatus());
    if (std::memcmp(read, values, sizeof(values)) != 0) version = Reach(*reader, 0);
    ASSERT_FALSE(HasFailure());
  }
}

TEST(PartsFollowDaemonsTest, ARunsEndIsAReadersEnd) {
  const Training training = FollowedDozen();
  const Daemons daemons(2);
  PartsRank rank(daemons.addresses(), training, 0);
  ASSERT_EQ(rank.Join(), absl::OkStatus());
  const auto reader = FollowParts(daemons.addresses());
  Reach(*reader, 0);
  ASSERT_TRUE(rank.client().DeleteRun("dozen", /*force=*/true, /*keep_checkpoints=*/false).ok());
  const absl::Status gone = reader->Next(kSoonS).status();
  EXPECT_EQ(gone.code(), absl::StatusCode::kNotFound) << gone;
}

TEST(PartsFollowDaemonsTest, BallastctlWritesFilesOfIt) {
  const Training training = FollowedDozen();
  const Daemons daemons(2);
  PartsRank rank(daemons.addresses(), training, 0);
  ASSERT_EQ(rank.Join(), absl::OkStatus());
  rank.Train(1, 3);
  const ballast::testing::TemporaryFolder folder;
  std::ostringstream out, err;
  const auto environment = [](const std::string&) { return std::optional<std::string>(); };
  EXPECT_EQ(ctl::Main({"follow", "dozen", "--out", folder.path(), "--versions", "1", "--server", daemons.addresses()},
                      environment, out, err),
            0)
      << err.str();
  EXPECT_TRUE(std::filesystem::exists(std::filesystem::path(folder.path()) / "step-3.safetensors"));
  const auto run = rank.client().GetRun("dozen");
  ASSERT_TRUE(run.ok());
  EXPECT_EQ(run->status().follow().newest().step(), 3u);
}

TEST(PartsFollowDaemonsTest, WhatCannotBeFollowedIsRefusedByName) {
  const Training training = FollowedDozen();
  const Daemons daemons(2);
  const std::string a = daemons[0].address(), b = daemons[1].address();
  PartsRank rank(daemons.addresses(), training, 0);
  ASSERT_EQ(rank.Join(), absl::OkStatus());
  const auto refused = [](const std::string& server, const std::string& format = "") {
    return std::string(Subscriber::Open({.server = server}, {.run_id = "dozen", .format = format}).status().message());
  };
  EXPECT_THAT(refused(b), HasSubstr("the daemon at " + b + " has part 1 of 2 of run 'dozen' alone: name all daemons"));
  EXPECT_THAT(refused(b + "," + a), HasSubstr("in the same order"));
  EXPECT_THAT(
      refused(a + "," + b, "bf16"),
      HasSubstr("run 'dozen' at " + a + " cannot be followed in format 'bf16': readers may follow it as it is served"));
  RealDaemon relay(RelayOf(a, {"dozen"}));
  EXPECT_THAT(refused(relay.address()), HasSubstr("is on several daemons, and a relay has runs of one"));
  EXPECT_THAT(
      std::string(Subscriber::Open({.server = a + "," + b}, {.run_id = "dozen", .average = 0.9}).status().message()),
      HasSubstr("run 'dozen' at " + a + " has no average with the decay 0.9 that may be followed"));
}

}  // namespace
}  // namespace ballast
