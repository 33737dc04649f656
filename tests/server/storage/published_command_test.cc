#include "server/storage/published_command.h"

#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include <fstream>
#include <string>
#include <thread>
#include <utility>
#include <vector>

#include "absl/strings/str_cat.h"
#include "absl/time/time.h"

#include "server/storage/run_folder.h"
#include "server/storage/storage.h"
#include "tests/server/storage/model_fs.h"
#include "tests/server/storage/temporary_folder.h"
#include "tests/server/storage/written_steps.h"

namespace ballast {
namespace {

using ::testing::ElementsAre;
using ::testing::IsEmpty;
using ::testing::Pair;
using testing::TemporaryFolder;
using ::testing::UnorderedElementsAre;

// What was told of whom, in turn.
class Results {
 public:
  PublishedCommand::Told told() {
    return [this](const std::string& run_id, std::string_view result) {
      absl::MutexLock lock(&mu_);
      told_.emplace_back(run_id, std::string(result));
    };
  }
  std::vector<std::pair<std::string, std::string>> Await(size_t count) {
    const auto there = [&]() ABSL_SHARED_LOCKS_REQUIRED(mu_) { return told_.size() >= count; };
    absl::MutexLock lock(&mu_);
    EXPECT_TRUE(mu_.AwaitWithTimeout(absl::Condition(&there), absl::Seconds(60)));
    return told_;
  }

 private:
  absl::Mutex mu_;
  std::vector<std::pair<std::string, std::string>> told_ ABSL_GUARDED_BY(mu_);
};

// A command that writes its arguments down, and waits until the test lets it go.
class PublishedCommandTest : public ::testing::Test {
 protected:
  PublishedCommand::Options Waiting() const {
    const std::string script =
        absl::StrCat("echo \"$@\" >> ", log(), "; while [ ! -e ", gate(), " ]; do sleep 0.01; done");
    return {.command = {"/bin/sh", "-c", script, "sh", "{run}", "at={step}", "{number}", "{folder}"}};
  }
  std::string log() const { return folder_.path() + "/log"; }
  std::string gate() const { return folder_.path() + "/gate"; }
  void OpenGate() const { std::ofstream(gate()) << ""; }
  std::vector<std::string> Lines() const {
    std::vector<std::string> lines;
    std::ifstream file(log());
    for (std::string line; std::getline(file, line);) lines.push_back(line);
    return lines;
  }
  static void AwaitUse(const PublishedCommand& command, const std::string& folder) {
    while (!command.Uses(folder)) std::this_thread::yield();
  }

  TemporaryFolder folder_;
  Results results_;
};

TEST_F(PublishedCommandTest, EachIsRunWithItsOwnNames) {
  PublishedCommand command(Waiting());
  command.Tell(results_.told());
  OpenGate();
  command.OnPublished({.run_id = "a", .folder = "/d/runs/a/x", .number = 7, .step = 120});
  results_.Await(1);
  command.OnPublished({.run_id = "b", .folder = "/d/runs/b/y", .number = 8, .step = 5});
  EXPECT_THAT(results_.Await(2), ElementsAre(Pair("a", "success"), Pair("b", "success")));
  EXPECT_THAT(Lines(), ElementsAre("a at=120 7 /d/runs/a/x", "b at=5 8 /d/runs/b/y"));
  command.Stop(600);
  EXPECT_FALSE(command.Uses("/d/runs/b/y"));
}

TEST_F(PublishedCommandTest, TheNewestOfARunWaitsAndTheOthersAreLeftOut) {
  PublishedCommand command(Waiting());
  command.Tell(results_.told());
  command.OnPublished({.run_id = "a", .folder = "/a1", .step = 1});
  AwaitUse(command, "/a1");
  for (uint64_t step = 2; step < 5; ++step) {
    command.OnPublished({.run_id = "a", .folder = absl::StrCat("/a", step), .step = step});
    command.OnPublished({.run_id = "b", .folder = absl::StrCat("/b", step), .step = step});
  }
  EXPECT_THAT(results_.Await(4), UnorderedElementsAre(Pair("a", "skipped"), Pair("a", "skipped"), Pair("b", "skipped"),
                                                      Pair("b", "skipped")));
  OpenGate();
  results_.Await(7);
  EXPECT_THAT(Lines(), ElementsAre("a at=1 0 /a1", "a at=4 0 /a4", "b at=4 0 /b4"));
}

TEST_F(PublishedCommandTest, NoMoreWaitThanMay) {
  PublishedCommand command(Waiting());
  command.Tell(results_.told());
  command.OnPublished({.run_id = "first", .folder = "/first"});
  AwaitUse(command, "/first");
  for (size_t r = 0; r <= PublishedCommand::kMostWaiting; ++r) {
    command.OnPublished({.run_id = absl::StrCat("r", r), .folder = absl::StrCat("/r", r)});
  }
  EXPECT_THAT(results_.Await(1), ElementsAre(Pair(absl::StrCat("r", PublishedCommand::kMostWaiting), "skipped")));
}

TEST_F(PublishedCommandTest, FailureAndTimeAreToldApart) {
  PublishedCommand failing({.command = {"/bin/sh", "-c", "exit 3"}});
  failing.Tell(results_.told());
  failing.OnPublished({.run_id = "f", .folder = "/f"});
  results_.Await(1);
  PublishedCommand slow({.command = {"/bin/sh", "-c", "sleep 1000"}, .timeout_s = 0.1, .grace_s = 600});
  slow.Tell(results_.told());
  slow.OnPublished({.run_id = "s", .folder = "/s"});
  EXPECT_THAT(results_.Await(2), ElementsAre(Pair("f", "failed"), Pair("s", "timeout")));
}

TEST_F(PublishedCommandTest, OneThatFailedIsOfferedAgainToWhoWantsIt) {
  PublishedCommand command(
      {.command = {"/bin/sh", "-c", absl::StrCat("echo $0 >> ", log(), "; [ -e ", gate(), " ]"), "{folder}"}});
  command.Tell(results_.told());
  command.OfferAgain("/a1");
  command.OnPublished({.run_id = "a", .folder = "/a1", .number = 1});
  command.OnPublished({.run_id = "b", .folder = "/b1", .number = 1});
  results_.Await(2);
  command.OfferAgain("/a1");
  results_.Await(3);
  command.OnPublished({.run_id = "a", .folder = "/a2", .number = 2});
  results_.Await(4);
  command.OfferAgain("/a1");  // it is the newest no more
  command.Withdraw("/b1");
  command.OfferAgain("/b1");
  OpenGate();
  command.OfferAgain("/a2");
  results_.Await(5);
  command.OfferAgain("/a2");  // it is there
  command.OnPublished({.run_id = "c", .folder = "/c1", .number = 1});
  results_.Await(6);
  EXPECT_THAT(Lines(), ElementsAre("/a1", "/b1", "/a1", "/a2", "/a2", "/c1"));
}

TEST_F(PublishedCommandTest, WhatIsWithdrawnIsLeftOutOrEnded) {
  PublishedCommand command(Waiting());
  command.Tell(results_.told());
  command.OnPublished({.run_id = "a", .folder = "/a1", .step = 1});
  AwaitUse(command, "/a1");
  command.OnPublished({.run_id = "a", .folder = "/a2", .step = 2});
  command.Withdraw("/a2");
  command.Withdraw("/a1");
  EXPECT_THAT(results_.Await(2), ElementsAre(Pair("a", "skipped"), Pair("a", "skipped")));
}

TEST_F(PublishedCommandTest, AStopGivesWhatRunsAndWaitsItsTime) {
  PublishedCommand command(Waiting());
  command.Tell(results_.told());
  command.OnPublished({.run_id = "a", .folder = "/a1"});
  AwaitUse(command, "/a1");
  command.OnPublished({.run_id = "b", .folder = "/b1"});
  OpenGate();
  command.Stop(600);
  EXPECT_THAT(results_.Await(2), ElementsAre(Pair("a", "success"), Pair("b", "success")));
  command.OnPublished({.run_id = "c", .folder = "/c1"});
  EXPECT_THAT(results_.Await(3).back(), Pair("c", "skipped"));
}

TEST_F(PublishedCommandTest, AStopEndsWhatHasNoTimeLeft) {
  PublishedCommand command(Waiting());
  command.Tell(results_.told());
  command.OnPublished({.run_id = "a", .folder = "/a1"});
  AwaitUse(command, "/a1");
  command.OnPublished({.run_id = "b", .folder = "/b1"});
  command.Stop(0.1);
  EXPECT_THAT(results_.Await(2), UnorderedElementsAre(Pair("a", "skipped"), Pair("b", "skipped")));
}

TEST_F(PublishedCommandTest, WithoutACommandNothingIsRunOrTold) {
  PublishedCommand command({});
  command.Tell(results_.told());
  command.OnPublished({.run_id = "a", .folder = "/a1"});
  command.Stop(0);
  EXPECT_THAT(results_.Await(0), IsEmpty());
}

TEST_F(PublishedCommandTest, RetentionLeavesTheCheckpointThatItRunsOn) {
  ModelFs fs;
  testing::MakeRoot(&fs);
  ASSERT_TRUE(fs.MakeFolder("/d/runs").ok());
  PublishedCommand command(Waiting());
  command.Tell(results_.told());
  auto folder = RunFolder::Open(&fs, "/d/runs", "r", &command);
  ASSERT_TRUE(folder.ok());
  const auto publish = [&](uint64_t number) {
    const CheckpointPlace place{number, 10 * number};
    ASSERT_TRUE(folder->Begin(place).ok());
    ASSERT_TRUE(folder->Publish(place).ok());
    ASSERT_TRUE(folder->Retain(1).ok());
  };
  publish(1);
  AwaitUse(command, "/d/runs/r/000000000001-step-10");
  publish(2);
  publish(3);
  const auto names = [&] {
    std::vector<std::string> found;
    const auto entries = folder->List();
    for (const CheckpointEntry& entry : *entries) found.push_back(entry.name);
    return found;
  };
  EXPECT_THAT(names(), ElementsAre("000000000001-step-10", "000000000003-step-30"));
  OpenGate();
  results_.Await(3);
  command.Stop(0);  // nobody uses one any more
  publish(4);
  EXPECT_THAT(names(), ElementsAre("000000000004-step-40"));
}

TEST_F(PublishedCommandTest, WhatIsUndoneIsNotCopied) {
  ModelFs fs;
  testing::MakeRoot(&fs);
  ASSERT_TRUE(fs.MakeFolder("/d/runs").ok());
  PublishedCommand command(Waiting());
  command.Tell(results_.told());
  auto folder = RunFolder::Open(&fs, "/d/runs", "r", &command);
  ASSERT_TRUE(folder.ok());
  ASSERT_TRUE(folder->Begin({1, 10}).ok());
  ASSERT_TRUE(folder->Publish({1, 10}).ok());
  AwaitUse(command, "/d/runs/r/000000000001-step-10");
  ASSERT_TRUE(folder->SetAside(5).ok());
  EXPECT_THAT(results_.Await(1), ElementsAre(Pair("r", "skipped")));
}

}  // namespace
}  // namespace ballast
