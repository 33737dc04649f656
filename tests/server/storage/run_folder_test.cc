#include "server/storage/run_folder.h"

#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include <optional>
#include <random>
#include <string>
#include <vector>

#include "server/storage/file_writer.h"
#include "server/storage/journal_files.h"
#include "server/storage/storage.h"
#include "server/storage/tag_files.h"
#include "tests/server/storage/model_fs.h"
#include "tests/server/storage/written_steps.h"

namespace ballast {
namespace {

using ::testing::AnyOf;
using ::testing::HasSubstr;
using testing::KeptIn;
using testing::MakeRoot;
using testing::WriteSteps;

TEST(RunFolderTest, NamesThatAreNotACheckpointsAreNoCheckpoints) {
  for (const char* name : {"", "7-step-1", "000000000007-step-", "000000000007-step-1x", "000000000007-step-01",
                           "writing-", "copy-000000000007-step-1", "000000000007-step-1/..", "-00000000007-step-1"}) {
    EXPECT_FALSE(ParseCheckpointName(name)) << name;
  }
  for (const char* name :
       {"000000000007-step-120", "writing-000000000007-step-0", "discarded-123456789012345-step-9"}) {
    const auto entry = ParseCheckpointName(name);
    ASSERT_TRUE(entry) << name;
    EXPECT_EQ(entry->name, name);
  }
}

TEST(RunFolderTest, StepsThatWereUndoneAreSetAsideAndGoWithTheOldest) {
  ModelFs fs;
  MakeRoot(&fs);
  ASSERT_TRUE(WriteSteps(&fs, {10, 20}).ok());
  auto folder = RunFolder::Open(&fs, "/d/runs", "r");
  ASSERT_TRUE(folder.ok());
  EXPECT_TRUE(folder->SetAside(10).ok());
  EXPECT_EQ(folder->List()->back().name, "discarded-000000000002-step-20");
  EXPECT_EQ(*folder->NextNumber(), 3u) << "a number is never used twice";
  ASSERT_TRUE(WriteSteps(&fs, {15}).ok());
  EXPECT_EQ(folder->List()->size(), 3u) << "one of the two that are kept is older than the one set aside";
  ASSERT_TRUE(WriteSteps(&fs, {18}).ok());
  const auto entries = folder->List();
  std::vector<std::string> names;
  for (const CheckpointEntry& entry : *entries) names.push_back(entry.name);
  EXPECT_THAT(names, ::testing::ElementsAre("000000000003-step-15", "000000000004-step-18"));
}

TEST(RunFolderTest, TheOneThatIsSparedStaysBesideTheNewest) {
  ModelFs fs;
  MakeRoot(&fs);
  ASSERT_TRUE(WriteSteps(&fs, {10, 20}).ok());
  auto folder = RunFolder::Open(&fs, "/d/runs", "r");
  ASSERT_TRUE(folder.ok());
  const auto steps = [&](std::optional<uint64_t> spares, uint64_t added) {
    const CheckpointPlace place{.number = *folder->NextNumber(), .step = added};
    EXPECT_TRUE(folder->Begin(place).ok() && folder->Publish(place).ok() && folder->Retain(2, 0, spares).ok());
    std::vector<uint64_t> left;
    const auto entries = folder->List();
    for (const CheckpointEntry& entry : *entries) left.push_back(entry.place.step);
    return left;
  };
  EXPECT_THAT(steps(20, 30), ::testing::ElementsAre(20, 30));
  EXPECT_THAT(steps(20, 40), ::testing::ElementsAre(20, 30, 40));
  EXPECT_THAT(steps(20, 50), ::testing::ElementsAre(20, 40, 50));
  EXPECT_THAT(steps(0, 60), ::testing::ElementsAre(20, 50, 60)) << "not known: the oldest, which may be the one";
  EXPECT_THAT(steps(60, 70), ::testing::ElementsAre(60, 70));
  EXPECT_THAT(steps({}, 80), ::testing::ElementsAre(70, 80));
}

TEST(RunFolderTest, OneThatWasRemovedUnderItsRunIsMadeAnew) {
  ModelFs fs;
  MakeRoot(&fs);
  ASSERT_TRUE(fs.MakeFolder("/d/runs").ok());
  auto folder = RunFolder::Open(&fs, "/d/runs", "r");
  ASSERT_TRUE(folder.ok());
  ASSERT_TRUE(fs.RemoveFolder("/d/runs/r").ok());
  const CheckpointPlace place{.number = folder->NextNumber().value_or(0), .step = 10};
  EXPECT_EQ(place.number, 1u);
  ASSERT_TRUE(folder->Begin(place).ok());
  ASSERT_TRUE(folder->Publish(place).ok());
  EXPECT_EQ(folder->List()->back().name, "000000000001-step-10");
}

// As where the volume was unmounted: what is written there then would lie on another disk.
TEST(RunFolderTest, WhereAllRunsWereIsNotMadeAnew) {
  ModelFs fs;
  MakeRoot(&fs);
  ASSERT_TRUE(fs.MakeFolder("/d/runs").ok());
  auto folder = RunFolder::Open(&fs, "/d/runs", "r");
  ASSERT_TRUE(folder.ok());
  ASSERT_TRUE(fs.RemoveFolder("/d/runs/r").ok() && fs.RemoveFolder("/d/runs").ok());
  const auto begun = folder->Begin({.number = 1, .step = 10});
  EXPECT_TRUE(absl::IsFailedPrecondition(begun.status()));
  EXPECT_THAT(std::string(begun.status().message()),
              HasSubstr("/d/runs is gone under the daemon: was the volume of storage.dir unmounted"));
  EXPECT_FALSE(fs.List("/d/runs").ok());
  ASSERT_TRUE(fs.MakeFolder("/d/runs").ok());
  EXPECT_TRUE(folder->Begin({.number = 1, .step = 10}).ok());
}

TEST(RunFolderTest, NoNumberComesAfterTheLargest) {
  ModelFs fs;
  MakeRoot(&fs);
  ASSERT_TRUE(WriteSteps(&fs, {10}).ok());
  auto folder = RunFolder::Open(&fs, "/d/runs", "r");
  ASSERT_TRUE(folder.ok());
  ASSERT_TRUE(fs.MakeFolder("/d/runs/r/18446744073709551615-step-20").ok());
  const auto next = folder->NextNumber();
  EXPECT_EQ(next.status().code(), absl::StatusCode::kFailedPrecondition);
  EXPECT_THAT(std::string(next.status().message()), HasSubstr("/d/runs/r/18446744073709551615-step-20"));
}

TEST(RunFolderTest, WhatHasTheNameOfAFileAndIsNoneIsNotPassedOver) {
  ModelFs fs;
  ASSERT_TRUE(fs.MakeFolder("/d").ok());
  EXPECT_TRUE(ListJournal(&fs, "/d").ok());
  ASSERT_TRUE(fs.MakeFolder("/d/other").ok());
  EXPECT_TRUE(ListJournal(&fs, "/d").ok() && ListTagFiles(&fs, "/d").ok());
  ASSERT_TRUE(fs.MakeFolder("/d/best.7.safetensors").ok());
  ASSERT_TRUE(fs.MakeFolder("/d/segment-000000000001").ok());
  for (const absl::Status& status : {ListJournal(&fs, "/d").status(), ListTagFiles(&fs, "/d").status()}) {
    EXPECT_EQ(status.code(), absl::StatusCode::kFailedPrecondition);
    EXPECT_THAT(std::string(status.message()),
                AnyOf(HasSubstr("/d/segment-000000000001"), HasSubstr("/d/best.7.safetensors")));
  }
}

TEST(RunFolderTest, ADaemonDoesNotStartWhereItsRunsCannotBeListed) {
  ModelFs fs;
  ASSERT_TRUE(fs.MakeFolder("/d").ok());
  auto file = fs.Create("/d/runs");
  ASSERT_TRUE(file.ok());
  const auto storage = Storage::Open({.fs = &fs, .dir = "/d"});
  EXPECT_EQ(storage.status().code(), absl::StatusCode::kFailedPrecondition);
  EXPECT_THAT(std::string(storage.status().message()), HasSubstr("it must be a folder, and no link to one"));
}

TEST(RunFolderTest, TellsWhereNothingWouldBeLeftAndSetsAsideNoneThatCameSince) {
  ModelFs fs;
  MakeRoot(&fs);
  ASSERT_TRUE(WriteSteps(&fs, {10, 20}).ok());
  auto folder = RunFolder::Open(&fs, "/d/runs", "r");
  ASSERT_TRUE(folder.ok());
  EXPECT_EQ(*folder->NewestIfAllAfter(10), 0u);
  EXPECT_EQ(*folder->NewestIfAllAfter(9), 2u);
  ASSERT_TRUE(WriteSteps(&fs, {15}).ok());  // after a rewind to step 9, of which there is none
  ASSERT_TRUE(folder->SetAside(9, 2).ok());
  ASSERT_EQ(KeptIn(&fs).size(), 1u);
  EXPECT_EQ(KeptIn(&fs).front().name, "000000000003-step-15");
  ASSERT_TRUE(folder->SetAside(9).ok());
  EXPECT_EQ(*folder->NewestIfAllAfter(9), 0u) << "none counts";
}

TEST(RunFolderTest, ARemovedRunIsGoneAtOnceWhereverThePowerIsCut) {
  ModelFs whole;
  MakeRoot(&whole);
  ASSERT_TRUE(WriteSteps(&whole, {1, 2}).ok());
  for (int cut = 1;; ++cut) {
    ModelFs fs;
    MakeRoot(&fs);
    ASSERT_TRUE(WriteSteps(&fs, {1, 2}).ok());
    auto folder = RunFolder::Open(&fs, "/d/runs", "r");
    ASSERT_TRUE(folder.ok());
    fs.CutAt(fs.calls() + cut);
    const bool removed = folder->RemoveAll().ok();
    for (uint64_t seed = 0; seed < 20; ++seed) {
      const auto left = fs.AfterCut(seed);
      const size_t kept = KeptIn(left.get()).size();
      ASSERT_THAT(kept, AnyOf(0u, 2u)) << "cut " << cut;
      ASSERT_TRUE(!removed || kept == 0) << "cut " << cut;
      const auto storage = Storage::Open({.fs = left.get(), .dir = "/d", .threads = 1});
      ASSERT_TRUE(storage.ok());
      ASSERT_EQ((*storage)->RunIds()->size(), kept == 0 ? 0u : 1u);
    }
    if (removed) break;
  }
}

TEST(RunFolderTest, AFolderWithSomethingOfAnothersIsNotRemoved) {
  ModelFs fs;
  MakeRoot(&fs);
  ASSERT_TRUE(WriteSteps(&fs, {1}).ok());
  ASSERT_TRUE(fs.MakeFolder("/d/runs/r/mine").ok());
  auto folder = RunFolder::Open(&fs, "/d/runs", "r");
  ASSERT_TRUE(folder.ok());
  EXPECT_THAT(std::string(folder->RemoveAll().message()), HasSubstr("mine in it is no checkpoint"));
  EXPECT_EQ(KeptIn(&fs).size(), 1u);
}

TEST(StorageTest, IsOneDaemonsAlone) {
  ModelFs fs;
  MakeRoot(&fs);
  const auto first = Storage::Open({.fs = &fs, .dir = "/d", .threads = 1});
  ASSERT_TRUE(first.ok());
  EXPECT_TRUE(absl::IsUnavailable(Storage::Open({.fs = &fs, .dir = "/d", .threads = 1}).status()));
  EXPECT_TRUE(absl::IsNotFound(Storage::Open({.fs = &fs, .dir = "/nowhere", .threads = 1}).status()));
}

TEST(FileWriterTest, WritesWhatTheBufferHoldsManyTimesOver) {
  ModelFs fs;
  MakeRoot(&fs);
  const DiskBuffer buffer;
  std::string content(3 * DiskBuffer::kBytes + 12345, '\0');
  std::mt19937_64 random(3);
  for (char& c : content) c = static_cast<char>(random());
  const absl::Span<const std::byte> all(reinterpret_cast<const std::byte*>(content.data()), content.size());
  std::vector<absl::Span<const std::byte>> pieces;
  for (size_t at = 0; at < all.size(); at += 1000003) pieces.push_back(all.subspan(at, 1000003));
  const auto entry = WriteFile(&fs, "/d", {"a", pieces}, buffer, [](uint64_t) { return absl::OkStatus(); });
  ASSERT_TRUE(entry.ok());
  EXPECT_TRUE(fs.Content("/d/a") == content);
  EXPECT_EQ(entry->bytes(), content.size());
  EXPECT_EQ(entry->crc32c_size(), 13);
}

TEST(RateLimitTest, HoldsToTheRateAndLetsGoWhenItIsStopped) {
  RateLimit none(0);
  EXPECT_TRUE(none.Take(uint64_t{1} << 40));
  RateLimit slow(1);  // a byte a second
  EXPECT_TRUE(slow.Take(1000)) << "the first waits for nobody";
  slow.Stop();
  EXPECT_FALSE(slow.Take(1));
}

}  // namespace
}  // namespace ballast
