// A run's journal on a disk that loses what was not synced, fails, or is damaged: whatever a crash leaves leads to the last
// step that was said to be durable, or a later one, and to nothing that was undone.
#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include <algorithm>
#include <limits>
#include <string>

#include "absl/strings/str_cat.h"

#include "tests/server/run/journaled_run.h"

namespace ballast::testing {
namespace {

using ::testing::ElementsAre;
using ::testing::HasSubstr;

// Two checkpoints, a rewind that stands, and a crash at a call or at the end. The story as a run would tell it.
struct Story {
  uint64_t base = 0, base_step = 0;  // of the newest checkpoint
  uint64_t durable = 0;              // acknowledged
  bool rewound = false;              // likewise
};

// What a segment's beginning calls: the folder and its name, the file, its head, and its name.
constexpr int kCallsToBegin = 6;

// It ends where the power is cut: at the call `cut`.
Story Tell(ModelFs* fs, int cut = std::numeric_limits<int>::max()) {
  JournaledRun run(fs);
  Story story;
  const auto on = [&] { return fs->calls() < cut; };
  const auto step = [&] {
    run.Step();
    if (on()) story.durable = run.Durable();
  };
  const auto checkpoint = [&] {
    const int before = fs->calls();
    const uint64_t base = run.Begin();
    fs->AwaitCalls(before + kCallsToBegin);
    if (!on()) return;
    run.Publish();
    story.base = base;
    story.base_step = run.step();
    story.durable = run.Durable();
  };
  run.Step();
  checkpoint();
  step();
  step();
  checkpoint();
  step();
  step();
  if (on()) story.durable = std::min<uint64_t>(story.durable, 4);
  run.Rewind(4);
  story.rewound = on();
  step();
  step();
  return story;
}

TEST(JournalCrashTest, WhatItSaysIsDurableIsThere) {
  ModelFs fs;
  MakeRunFolder(&fs);
  const Story story = Tell(&fs);
  EXPECT_EQ(story.durable, 6u);
  const auto replayed = Replay(&fs, story.base, story.base_step);
  ASSERT_TRUE(replayed.ok()) << replayed.status();
  EXPECT_THAT(replayed->updates, ElementsAre(4, 4, 5, 5, 6, 6));
  EXPECT_EQ(replayed->survey.step, 6u);
  EXPECT_EQ(replayed->survey.generation, 2u);
}

// Empty: the disk leads where it must.
std::string WrongAfterReplay(ModelFs* left, const Story& story) {
  if (story.base == 0) return "";
  const auto replayed = Replay(left, story.base, story.base_step);
  if (!replayed.ok()) return absl::StrCat(replayed.status().ToString(), "\n", left->Dump());
  if (replayed->survey.step < story.durable) {
    return absl::StrCat("step ", replayed->survey.step, ", durable was ", story.durable, "\n", left->Dump());
  }
  if (story.rewound && replayed->survey.generation != 2) return "the rewind is undone";
  if (replayed->updates.size() == kTensors * (replayed->survey.step - story.base_step)) return "";
  return absl::StrCat(replayed->updates.size(), " updates up to step ", replayed->survey.step);
}

int CallsOfStory() {
  ModelFs fs;
  MakeRunFolder(&fs);
  Tell(&fs);
  return fs.calls();
}

TEST(JournalCrashTest, APowerCutAtAnyCallLosesNothingThatWasAcknowledged) {
  const int calls = CallsOfStory();
  ASSERT_GT(calls, 20);
  for (int cut = 4; cut <= calls; ++cut) {
    ModelFs fs;
    MakeRunFolder(&fs);
    fs.CutAt(cut);
    const Story story = Tell(&fs, cut);
    for (uint64_t seed = 0; seed < 20; ++seed) {
      EXPECT_EQ(WrongAfterReplay(fs.AfterCut(seed).get(), story), "")
          << "cut at " << fs.log()[cut - 1] << ", seed " << seed;
    }
  }
}

// A test of the tests: each sync that is left out is missed by some cut.
TEST(JournalCrashTest, NoSyncIsSuperfluous) {
  const int calls = CallsOfStory();
  ModelFs whole;
  MakeRunFolder(&whole);
  Tell(&whole);
  for (int skipped = 4; skipped < calls; ++skipped) {
    if (whole.log()[skipped - 1].find("sync /run/journal/") == std::string::npos) continue;
    bool missed = false;
    for (int cut = skipped + 1; cut <= calls + 1 && !missed; ++cut) {
      ModelFs fs;
      MakeRunFolder(&fs);
      fs.SkipAt(skipped);
      fs.CutAt(cut);
      const Story story = Tell(&fs, cut);
      for (uint64_t seed = 0; seed < 20 && !missed; ++seed)
        missed = !WrongAfterReplay(fs.AfterCut(seed).get(), story).empty();
    }
    EXPECT_TRUE(missed) << whole.log()[skipped - 1] << ", call " << skipped;
  }
}

TEST(JournalCrashTest, ACallThatFailsTurnsItOffAndNothingIsLost) {
  const int calls = CallsOfStory();
  for (int failed = 4; failed <= calls; ++failed) {
    for (const absl::Status& status : {absl::ResourceExhaustedError("full"), absl::DataLossError("EIO")}) {
      ModelFs fs;
      MakeRunFolder(&fs);
      fs.FailAt(failed, status, 10);
      const Story story = Tell(&fs);  // which ends: nobody waits for ever
      for (uint64_t seed = 0; seed < 5; ++seed) {
        const auto left = fs.AfterCut(seed);
        const auto replayed = Replay(left.get(), story.base, story.base_step);
        ASSERT_TRUE(replayed.ok()) << replayed.status() << ", failed: " << fs.log()[failed - 1];
        EXPECT_GE(replayed->survey.step, std::max(story.base_step, story.durable)) << fs.log()[failed - 1];
      }
    }
  }
}

TEST(JournalCrashTest, DamageInTheMiddleIsRefusedAndNamed) {
  ModelFs fs;
  MakeRunFolder(&fs);
  const Story story = Tell(&fs);
  const auto files = ListJournal(&fs, kFolder);
  ASSERT_TRUE(files.ok());
  const std::string path = files->back().path, whole = fs.Content(path);
  const uint64_t frames = whole.size() / OutputFile::kDirect;
  for (uint64_t frame = 0; frame < frames; ++frame) {
    for (const uint64_t byte : {uint64_t{0}, uint64_t{9}, uint64_t{17}, uint64_t{30}, FrameHeader::kBytes + 3}) {
      fs.SetContent(path, whole);
      fs.Flip(path, frame * OutputFile::kDirect + byte, 2);
      const auto replayed = Replay(&fs, story.base, story.base_step);
      if (frame + 1 < frames && frame > 0) {
        EXPECT_EQ(replayed.status().code(), absl::StatusCode::kDataLoss) << "frame " << frame << ", byte " << byte;
        EXPECT_THAT(replayed.status().ToString(), HasSubstr(absl::StrCat(path, " is damaged: frame ", frame)));
      } else if (replayed.ok()) {
        EXPECT_LT(replayed->survey.step, 6u);  // the last one: as if it were torn
      }
    }
  }
}

}  // namespace
}  // namespace ballast::testing
