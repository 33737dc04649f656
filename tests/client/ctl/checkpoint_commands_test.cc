// What ballastctl says of checkpoints: to a daemon that has storage, and of folders on its own machine.
#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include <filesystem>
#include <fstream>
#include <functional>
#include <sstream>

#include "client/cpp/ctl/command_line.h"
#include "client/cpp/ctl/run_text.h"
#include "tests/client/fake_daemon.h"
#include "tests/server/storage/temporary_folder.h"

namespace ballast::ctl {
namespace {

using ::testing::AllOf;
using ::testing::ContainsRegex;
using ::testing::ElementsAre;
using ::testing::HasSubstr;
using ::testing::IsEmpty;
using ::testing::Not;

struct Said {
  int code = 0;
  std::string out, err;
};

class CheckpointCommandsTest : public ::testing::Test {
 protected:
  static Said Say(std::vector<std::string> words, const std::string& server) {
    std::ostringstream out, err;
    const auto environment = [&](const std::string& name) {
      return name == "BALLAST_SERVER" ? std::optional<std::string>(server) : std::nullopt;
    };
    const int code = Main(words, environment, out, err);
    return {code, out.str(), err.str()};
  }
  Said Say(std::vector<std::string> words) const { return Say(std::move(words), daemon_.address()); }

  static FakeOptions WithStorage() {
    FakeOptions options{.has_storage = true};
    const auto add = [&](uint64_t number, uint64_t step, const char* state) {
      v1::StoredCheckpoint& stored = options.stored.emplace_back();
      stored.set_number(number);
      stored.set_step(step);
      stored.set_bytes(3 << 19);
      stored.set_folder("/data/runs/r/" + std::to_string(number));
      stored.set_written_at("2026-11-23T10:00:00Z");
      stored.set_state(state);
    };
    add(7, 120, "damaged: run.json has other bytes than its manifest says");
    add(8, 160, "newest");
    options.stored[0].clear_written_at();
    options.durability.set_durable_step(160);
    options.durability.set_checkpoint_bytes(3 << 19);
    options.durability.set_checkpoint_age_s(200);
    options.durability.set_restored("step 80, since /data/runs/r/000000000007-step-120 is damaged");
    return options;
  }

  FakeDaemon daemon_{WithStorage()};
};

TEST_F(CheckpointCommandsTest, ACheckpointIsToldWithItsStepSizeAndPlace) {
  const Said said = Say({"checkpoint", "r"});
  EXPECT_EQ(said.code, kOk) << said.err;
  EXPECT_EQ(said.out,
            "step 0 of run 'r' is durable: checkpoint 8, 1.50 MiB, written in 1.5 s to "
            "/data/runs/r/000000000008-step-0 on the daemon's machine\n");
  EXPECT_THAT(Say({"checkpoint", "r", "--json"}).out, HasSubstr("\"number\": \"8\""));
}

TEST_F(CheckpointCommandsTest, TheyAreListedWithTheirState) {
  const Said said = Say({"checkpoints", "r"});
  EXPECT_EQ(said.code, kOk) << said.err;
  EXPECT_THAT(said.out, ContainsRegex("\n +7 +120 +- +1.50 MiB +damaged: run.json has other bytes"));
  EXPECT_THAT(said.out, ContainsRegex("\n +8 +160 +2026-11-23T10:00:00Z +1.50 MiB +newest\n"));
  EXPECT_THAT(said.out, HasSubstr("in /data/runs/r on the daemon's machine\n"));
  EXPECT_THAT(Say({"checkpoints", "r", "--json"}).out, HasSubstr("\"state\": \"newest\""));
}

TEST_F(CheckpointCommandsTest, ARunWithoutCheckpointsSaysHowToHaveOne) {
  FakeDaemon empty(FakeOptions{.has_storage = true});
  const Said said = Say({"checkpoints", "r"}, empty.address());
  EXPECT_EQ(said.code, kOk);
  EXPECT_EQ(said.out, "run 'r' has no checkpoint yet; `ballastctl checkpoint r` writes one\n");
}

TEST_F(CheckpointCommandsTest, RestoreWantsAStep) {
  const Said said = Say({"restore", "r"});
  EXPECT_EQ(said.code, kUsage);
  EXPECT_THAT(said.err, HasSubstr("restore wants --step N: `ballastctl checkpoints r` tells which there are"));
  EXPECT_THAT(Say({"restore", "r", "--step", "last"}).err, HasSubstr("--step is 'last'; wanted a whole number"));
  EXPECT_THAT(daemon_.seen().restores, IsEmpty());
  const Said restored = Say({"restore", "r", "--step", "160"});
  EXPECT_EQ(restored.code, kOk) << restored.err;
  EXPECT_EQ(restored.out, "run 'r' is back at step 160, generation 2; its trainers go on with step 161\n");
  EXPECT_THAT(daemon_.seen().restores, ElementsAre(160u));
}

TEST_F(CheckpointCommandsTest, FromElsewhereTheNewestIsTakenUnlessAStepIsGiven) {
  EXPECT_EQ(Say({"restore", "r", "--from", "/in/r"}).code, kOk);
  EXPECT_EQ(Say({"restore", "r", "--from", "/in/r", "--step", "160"}).code, kOk);
  EXPECT_THAT(daemon_.seen().restores, ElementsAre(0u, 160u));
  EXPECT_THAT(daemon_.seen().restored_from, ElementsAre("/in/r", "/in/r"));
}

TEST_F(CheckpointCommandsTest, DeleteKeepsCheckpointsOnlyWhereThatIsSaid) {
  EXPECT_EQ(Say({"delete", "r"}).code, kOk);
  EXPECT_EQ(Say({"delete", "r", "--keep-checkpoints"}).code, kOk);
  const auto deletions = daemon_.seen().deletions;
  ASSERT_EQ(deletions.size(), 2u);
  EXPECT_FALSE(deletions[0].keep_checkpoints());
  EXPECT_TRUE(deletions[1].keep_checkpoints());
  EXPECT_FALSE(deletions[1].force());
}

TEST_F(CheckpointCommandsTest, ARunTellsWhatOfItIsDurable) {
  const Said said = Say({"run", "r"});
  EXPECT_EQ(said.code, kOk) << said.err;
  EXPECT_THAT(said.out, ContainsRegex("durable +step 160; newest checkpoint 1.50 MiB, written 3 min 20 s ago\n"));
  EXPECT_THAT(said.out, ContainsRegex("read back +step 80, since .* is damaged\n"));
  FakeDaemon without;
  EXPECT_THAT(Say({"run", "r"}, without.address()).out, Not(HasSubstr("durable")));
}

TEST_F(CheckpointCommandsTest, WhatIsUnderWayAndWhatFailedIsTold) {
  v1::DurabilityStatus durability;
  durability.set_writing(true);
  EXPECT_EQ(DurabilityText(durability), "no step yet; a checkpoint is being written");
  durability.set_durable_step(5);
  durability.set_writing(false);
  durability.set_last_failure("/data is full");
  EXPECT_THAT(DurabilityText(durability), AllOf(HasSubstr("step 5; "), HasSubstr("checkpoint failed: /data is full")));
  durability.set_journal_failure("/data fails");
  EXPECT_THAT(DurabilityText(durability), HasSubstr("the journal failed, until the next checkpoint: /data fails"));
}

TEST_F(CheckpointCommandsTest, ADaemonWithoutStorageSaysSo) {
  FakeDaemon without;
  for (const std::vector<std::string>& words : std::vector<std::vector<std::string>>{
           {"checkpoint", "r"}, {"checkpoints", "r"}, {"restore", "r", "--step", "1"}}) {
    const Said said = Say(words, without.address());
    EXPECT_EQ(said.code, kRefused) << words[0];
    EXPECT_THAT(said.err, HasSubstr("no storage")) << words[0];
  }
}

TEST_F(CheckpointCommandsTest, VerifyAsksNoDaemonAndWantsAFolderOfCheckpoints) {
  const Said nowhere = Say({"verify", "/nowhere/at/all"}, "127.0.0.1:1");
  EXPECT_EQ(nowhere.code, kUsage);
  EXPECT_THAT(nowhere.err, AllOf(HasSubstr("/nowhere/at/all"), HasSubstr("try `ballastctl verify --help`")));
  const std::string empty = ::testing::TempDir() + "ballastctl-verify-empty";
  std::filesystem::create_directories(empty);
  EXPECT_EQ(Say({"verify", empty}, "127.0.0.1:1").code, kUsage);
  EXPECT_EQ(Say({"verify"}, "127.0.0.1:1").code, kUsage);
}

TEST_F(CheckpointCommandsTest, VerifyNamesAFileThatIsDamaged) {
  const std::filesystem::path run = ::testing::TempDir() + "ballastctl-verify/runs/r";
  const std::filesystem::path checkpoint = run / "000000000001-step-5";
  std::filesystem::remove_all(run);
  std::filesystem::create_directories(checkpoint);
  std::ofstream(checkpoint / "manifest.json") << "{}";
  std::ofstream(checkpoint / "SHA256SUMS") << "0  manifest.json\n";
  const Said said = Say({"verify", run.string()}, "127.0.0.1:1");
  EXPECT_EQ(said.code, kRefused);
  EXPECT_THAT(said.out, AllOf(HasSubstr("000000000001-step-5: "), ContainsRegex("manifest.json|SHA256SUMS")));
  const Said json = Say({"verify", checkpoint.string(), "--json"}, "127.0.0.1:1");
  EXPECT_EQ(json.code, kRefused);
  EXPECT_THAT(json.out, HasSubstr("\"good\": false"));
}

TEST_F(CheckpointCommandsTest, VerifyTakesNoManifestIntoMemoryThatIsLargerThanAnyIs) {
  const ballast::testing::TemporaryFolder temporary;
  const std::filesystem::path checkpoint = temporary.path() + "/000000000001-step-5";
  std::filesystem::create_directories(checkpoint);
  for (const char* name : {"manifest.json", "SHA256SUMS"}) {
    for (const char* other : {"manifest.json", "SHA256SUMS"}) std::ofstream(checkpoint / other) << "{}";
    std::filesystem::resize_file(checkpoint / name, (uint64_t{1} << 30) + 1);  // which takes no room on the disk
    const Said said = Say({"verify", checkpoint.string()}, "127.0.0.1:1");
    EXPECT_EQ(said.code, kRefused);
    EXPECT_THAT(said.out, HasSubstr(std::string(name) + " is damaged: it has 1073741825 bytes"));
  }
}

// What is done when a line is complete, as by a daemon that goes on meanwhile.
class Meanwhile : public std::stringbuf {
 public:
  explicit Meanwhile(std::function<void()> work) : work_(std::move(work)) {}

 private:
  int sync() override {
    work_();
    return std::stringbuf::sync();
  }
  std::function<void()> work_;
};

TEST_F(CheckpointCommandsTest, OneThatIsRetiredWhileVerifyReadsIsNoDamage) {
  const ballast::testing::TemporaryFolder temporary;
  const std::filesystem::path run = temporary.path();
  for (const char* name : {"000000000001-step-5", "000000000002-step-6"}) {
    std::filesystem::create_directories(run / name);
    std::ofstream(run / name / "manifest.json") << "{}";
  }
  Meanwhile written([&] { std::filesystem::remove_all(run / "000000000002-step-6"); });
  std::ostream out(&written);
  std::ostringstream err;
  Main(
      {"verify", run.string()}, [](const std::string&) { return std::nullopt; }, out, err);
  EXPECT_THAT(written.str(), AllOf(HasSubstr("000000000001-step-5: damaged"), Not(HasSubstr("step-6: damaged")),
                                   HasSubstr("000000000002-step-6 is gone: the daemon has removed it")));
}

}  // namespace
}  // namespace ballast::ctl
