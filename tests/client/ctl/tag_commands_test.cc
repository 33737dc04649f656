// What ballastctl says of versions that have names, to a daemon with a run in training.
#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include <filesystem>
#include <sstream>

#include "client/cpp/ctl/command_line.h"
#include "client/cpp/ctl/safetensors_file.h"
#include "tests/client/least_squares.h"
#include "tests/client/quiet_client.h"
#include "tests/client/real_daemon.h"
#include "tests/server/storage/temporary_folder.h"

namespace ballast::ctl {
namespace {

using ::testing::ContainsRegex;
using ::testing::HasSubstr;

struct Told {
  int code = 0;
  std::string out, err;
};

class TagCommandsTest : public ::testing::Test {
 protected:
  void SetUp() override {
    v1::RunSpec spec = LeastSquares::Spec();
    spec.mutable_follow()->set_tags(2);
    run_ = spec.run_id();
    ASSERT_TRUE(client_->CreateRun(spec).ok());
    ASSERT_TRUE(client_->Attach({.run_id = run_}).ok());
    const TensorView views[] = {{.tensor = 0, .format = "fp32", .bytes = problem_.WeightBytes(0)},
                                {.tensor = 1, .format = "fp32", .bytes = problem_.WeightBytes(1)}};
    ASSERT_TRUE(client_->LoadWeights(views).ok());
    ASSERT_TRUE(problem_.Bind(*client_).ok());
    ASSERT_TRUE(problem_.Step(*client_).ok());
  }
  Told Say(std::vector<std::string> words) const {
    std::ostringstream out, err;
    const auto environment = [&](const std::string& name) {
      return name == "BALLAST_SERVER" ? std::optional<std::string>(daemon_.address()) : std::nullopt;
    };
    const int code = Main(words, environment, out, err);
    return {code, out.str(), err.str()};
  }

  RealDaemon daemon_;
  const std::unique_ptr<Client> client_ = QuietClient(daemon_.address());
  LeastSquares problem_;
  std::string run_;
  const ballast::testing::TemporaryFolder folder_;
};

TEST_F(TagCommandsTest, AVersionIsNamedListedFetchedAndLetGo) {
  Told told = Say({"tag", run_, "good"});
  EXPECT_EQ(told.code, kOk) << told.err;
  EXPECT_THAT(told.out, ContainsRegex("'good' is the version of step 1 of run 'least-squares': .* in memory\n"));
  EXPECT_THAT(Say({"tag", run_, "good"}).out, HasSubstr("was already the version of step 1"));
  ASSERT_TRUE(problem_.Step(*client_).ok());
  EXPECT_THAT(Say({"tag", run_, "good"}).err, HasSubstr("with replace"));
  EXPECT_EQ(Say({"tag", run_, "best", "--of", "good"}).code, kOk);
  EXPECT_THAT(Say({"tag", run_, "third"}).err, HasSubstr("follow.tags"));
  EXPECT_THAT(Say({"run", run_}).out, ContainsRegex("names +2 versions, "));
  told = Say({"versions", run_});
  EXPECT_THAT(told.out, ContainsRegex("best +1 +1 .* memory\ngood +1 +1 .* memory\n2 of 2 names"));
  EXPECT_THAT(Say({"versions", run_, "--json"}).out, HasSubstr("\"name\""));

  told = Say({"follow", run_, "--tag", "good", "--out", folder_.path()});
  EXPECT_EQ(told.code, kOk) << told.err;
  const auto file = SafetensorsFile::Open(folder_.path() + "/step-1.safetensors");
  ASSERT_TRUE(file.ok()) << file.status();
  EXPECT_EQ(file->metadata().at("step"), "1");

  EXPECT_THAT(Say({"untag", run_, "good"}).out, HasSubstr("has no version 'good' any more"));
  told = Say({"untag", run_, "good"});
  EXPECT_EQ(told.code, kRefused);
  EXPECT_THAT(told.err, HasSubstr("names: 'best' (step 1)"));
}

TEST_F(TagCommandsTest, WhatCannotBeIsSaid) {
  EXPECT_EQ(Say({"tag", run_, "good", "--step", "x"}).code, kUsage);
  EXPECT_EQ(Say({"tag", run_, "good", "--step", "1", "--of", "a"}).code, kUsage);
  EXPECT_EQ(Say({"follow", run_, "--tag", "good", "--every", "3", "--out", folder_.path()}).code, kUsage);
  EXPECT_THAT(Say({"tag", run_, "Good"}).err, HasSubstr("wanted 1 to 64 of a-z"));
  EXPECT_THAT(Say({"tag", run_, "good", "--step", "7"}).err, HasSubstr("has no version of step 7"));
  EXPECT_THAT(Say({"tag", "no", "good"}).err, HasSubstr("no run 'no'"));
  EXPECT_THAT(Say({"follow", run_, "--tag", "bad", "--out", folder_.path()}).err, HasSubstr("no version of the name"));
}

}  // namespace
}  // namespace ballast::ctl
