// That the model loses what a disk may lose, and nothing else: proofs about checkpoints rest on it.
#include "tests/server/storage/model_fs.h"

#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include <memory>
#include <set>
#include <string>
#include <thread>
#include <vector>

#include "absl/strings/str_cat.h"

#include "server/base/status_macros.h"
#include "tests/server/storage/model_files.h"
#include "tests/server/storage/outcomes.h"

namespace ballast {
namespace {

using ::testing::ElementsAre;
using ::testing::HasSubstr;
using ::testing::UnorderedElementsAre;

using testing::AsBytes;
using testing::kMostOutcomes;
using testing::Put;
using testing::PutSynced;
using testing::RootOf;
using testing::RootsAfterCut;

TEST(ModelFsTest, OfAFileOnlyWhatWasSyncedIsSureToBeThere) {
  {
    ModelFs fs;
    ASSERT_TRUE(Put(&fs, "/a", "one").ok());
    EXPECT_THAT(RootsAfterCut(fs), UnorderedElementsAre("", "a=", "a=one"));
    ASSERT_TRUE(fs.SyncFolder("/").ok());
    EXPECT_THAT(RootsAfterCut(fs), UnorderedElementsAre("a=", "a=one")) << "a folder's sync keeps no bytes";
  }
  ModelFs fs;
  const auto file = Put(&fs, "/a", "one");
  ASSERT_TRUE((*file)->Sync().ok());
  EXPECT_THAT(RootsAfterCut(fs), UnorderedElementsAre("", "a=one")) << "a file's sync does not keep its name";
  ASSERT_TRUE(fs.SyncFolder("/").ok());
  EXPECT_THAT(RootsAfterCut(fs), UnorderedElementsAre("a=one"));
}

TEST(ModelFsTest, AFilesSyncKeepsItsNameWhereTheFileSystemIsSo) {
  ModelFs fs;
  fs.set_sync_keeps_name(true);
  ASSERT_TRUE(fs.MakeFolder("/d").ok());
  const auto file = Put(&fs, "/d/a", "one");
  ASSERT_TRUE(Put(&fs, "/d/b", "two").ok());
  ASSERT_TRUE((*file)->Sync().ok());
  Outcomes outcomes(fs, kMostOutcomes);
  std::set<std::string> dumps;
  while (const auto left = outcomes.Next()) dumps.insert(left->Dump());
  EXPECT_THAT(dumps, UnorderedElementsAre("/d/\n/d/a 3 bytes\n", "/d/\n/d/a 3 bytes\n/d/b 0 bytes\n",
                                          "/d/\n/d/a 3 bytes\n/d/b 3 bytes\n"));
}

TEST(ModelFsTest, WriteAndRenameWithoutSyncsMayLeaveAnything) {
  ModelFs fs;
  ASSERT_TRUE(Put(&fs, "/new", "one").ok());
  ASSERT_TRUE(fs.Rename("/new", "/a").ok());
  EXPECT_THAT(RootsAfterCut(fs), UnorderedElementsAre("", "new=", "new=one", "a=", "a=one"));
}

TEST(ModelFsTest, AFileHasItsOldNameOrItsNewOne) {
  ModelFs fs;
  PutSynced(&fs, "/a", "one");
  ASSERT_TRUE(fs.Rename("/a", "/b").ok());
  EXPECT_THAT(RootsAfterCut(fs), UnorderedElementsAre("a=one", "b=one"));
  ASSERT_TRUE(fs.Rename("/b", "/c").ok());
  EXPECT_THAT(RootsAfterCut(fs), UnorderedElementsAre("a=one", "b=one", "c=one"));
  ASSERT_TRUE(fs.SyncFolder("/").ok());
  EXPECT_THAT(RootsAfterCut(fs), UnorderedElementsAre("c=one"));
}

TEST(ModelFsTest, AFileIsNotLostWhereAnotherTakesItsOldName) {
  ModelFs fs;
  PutSynced(&fs, "/a", "one");
  PutSynced(&fs, "/b", "two");
  ASSERT_TRUE(fs.Rename("/a", "/c").ok());
  ASSERT_TRUE(fs.Rename("/b", "/a").ok());
  ASSERT_TRUE(fs.Rename("/c", "/b").ok());
  for (const std::string& root : RootsAfterCut(fs)) {
    EXPECT_THAT(root, HasSubstr("one"));
    EXPECT_THAT(root, HasSubstr("two"));
  }
  EXPECT_TRUE(RootsAfterCut(fs).contains("a=two b=one"));
}

TEST(ModelFsTest, WhatWasRemovedMayBeThereAgain) {
  ModelFs fs;
  PutSynced(&fs, "/a", "one");
  ASSERT_TRUE(fs.RemoveFile("/a").ok());
  EXPECT_THAT(RootsAfterCut(fs), UnorderedElementsAre("", "a=one"));
  ASSERT_TRUE(Put(&fs, "/a", "two").ok());
  EXPECT_THAT(RootsAfterCut(fs), UnorderedElementsAre("", "a=one", "a=", "a=two"));
  ASSERT_TRUE(fs.SyncFolder("/").ok());
  EXPECT_THAT(RootsAfterCut(fs), UnorderedElementsAre("a=", "a=two"));
}

TEST(ModelFsTest, AFolderThatIsLostTakesItsFilesWithIt) {
  ModelFs fs;
  ASSERT_TRUE(fs.MakeFolder("/d").ok());
  const auto file = Put(&fs, "/d/a", "one");
  ASSERT_TRUE((*file)->Sync().ok());
  ASSERT_TRUE(fs.SyncFolder("/d").ok());
  Outcomes outcomes(fs, kMostOutcomes);
  std::set<std::string> dumps;
  while (const auto left = outcomes.Next()) dumps.insert(left->Dump());
  EXPECT_THAT(dumps, UnorderedElementsAre("", "/d/\n/d/a 3 bytes\n"));
  ASSERT_TRUE(fs.SyncFolder("/").ok());
  EXPECT_EQ(fs.AfterCut(0)->Dump(), "/d/\n/d/a 3 bytes\n");
}

TEST(ModelFsTest, AWriteMayEndAtEachOfItsSectors) {
  ModelFs fs;
  const auto file = fs.Create("/a");
  ASSERT_TRUE(fs.SyncFolder("/").ok());
  // Bytes 300 to 1600 contain the boundaries 512, 1024 and 1536.
  ASSERT_TRUE((*file)->Write(300, AsBytes(std::string(1300, 'x'))).ok());
  Outcomes outcomes(fs, kMostOutcomes);
  EXPECT_EQ(outcomes.size(), 5u);
  std::set<size_t> sizes;
  while (const auto left = outcomes.Next()) {
    const std::string content = left->Content("/a");
    sizes.insert(content.size());
    if (content.empty()) continue;
    EXPECT_EQ(content, std::string(300, '\0') + std::string(content.size() - 300, 'x'));
  }
  EXPECT_THAT(sizes, ElementsAre(0, 512, 1024, 1536, 1600));
}

TEST(ModelFsTest, AWriteThatEndsOnASectorIsWholeOrNotThere) {
  ModelFs fs;
  ASSERT_TRUE((*fs.Create("/a"))->Write(512, AsBytes(std::string(512, 'x'))).ok());
  ASSERT_TRUE(fs.SyncFolder("/").ok());
  EXPECT_EQ(Outcomes(fs, kMostOutcomes).size(), 2u);
}

TEST(ModelFsTest, WritesAndSizesAreLostOneWithoutTheOther) {
  ModelFs fs;
  const auto file = Put(&fs, "/a", "one");
  ASSERT_TRUE((*file)->Write(3, AsBytes("two")).ok());
  ASSERT_TRUE(fs.SyncFolder("/").ok());
  const std::string hole(3, '\0');
  EXPECT_THAT(RootsAfterCut(fs), UnorderedElementsAre("a=", "a=one", "a=" + hole + "two", "a=onetwo"));
  ASSERT_TRUE((*file)->Sync().ok());
  ASSERT_TRUE((*file)->SetSize(4).ok());
  EXPECT_THAT(RootsAfterCut(fs), UnorderedElementsAre("a=onetwo", "a=onet"));
}

TEST(ModelFsTest, ALaterSyncDoesNotKeepWhatAFailedOneWasTo) {
  ModelFs fs;
  const auto file = Put(&fs, "/a", "one");
  ASSERT_TRUE(fs.SyncFolder("/").ok());
  fs.FailAt(fs.calls() + 1, absl::DataLossError("input/output error"));
  EXPECT_TRUE(absl::IsDataLoss((*file)->Sync()));
  ASSERT_TRUE((*file)->Sync().ok());
  EXPECT_THAT(RootsAfterCut(fs), UnorderedElementsAre("a=", "a=one"));
  ASSERT_TRUE((*file)->Write(3, AsBytes("two")).ok());
  ASSERT_TRUE((*file)->Sync().ok());
  EXPECT_THAT(RootsAfterCut(fs), UnorderedElementsAre("a=" + std::string(3, '\0') + "two", "a=onetwo"))
      << "what was written after the failure is kept";
}

TEST(ModelFsTest, ALaterSyncOfAFolderDoesNotKeepWhatAFailedOneWasTo) {
  ModelFs fs;
  PutSynced(&fs, "/a", "one");
  ASSERT_TRUE(fs.Rename("/a", "/b").ok());
  fs.FailAt(fs.calls() + 1, absl::DataLossError("input/output error"));
  EXPECT_TRUE(absl::IsDataLoss(fs.SyncFolder("/")));
  ASSERT_TRUE(fs.SyncFolder("/").ok());
  EXPECT_THAT(RootsAfterCut(fs), UnorderedElementsAre("a=one", "b=one"));
  ASSERT_TRUE(fs.Rename("/b", "/c").ok());
  ASSERT_TRUE(fs.SyncFolder("/").ok());
  EXPECT_THAT(RootsAfterCut(fs), UnorderedElementsAre("c=one"));
}

// Publishes a folder of two files, in the order that keeps it whole.
absl::Status Publish(ModelFs* fs) {
  RETURN_IF_ERROR(fs->MakeFolder("/writing"));
  for (const char* path : {"/writing/a", "/writing/b"}) {
    ASSIGN_OR_RETURN(const auto file, Put(fs, path, std::string(700, 'x')));
    RETURN_IF_ERROR(file->Sync());
  }
  RETURN_IF_ERROR(fs->SyncFolder("/writing"));
  RETURN_IF_ERROR(fs->Rename("/writing", "/done"));
  return fs->SyncFolder("/");
}

// How many states a cut leaves that it must not.
int WrongAfterPublish(const ModelFs& fs, bool published) {
  Outcomes outcomes(fs, kMostOutcomes);
  EXPECT_TRUE(outcomes.are_all());
  int wrong = 0;
  while (const auto left = outcomes.Next()) {
    const bool there = left->Exists("/done");
    bool whole = true;
    for (const char* path : {"/done/a", "/done/b"}) {
      whole = whole && left->Exists(path) && left->Content(path) == std::string(700, 'x');
    }
    if ((there && !whole) || (published && !there)) ++wrong;
  }
  return wrong;
}

TEST(ModelFsTest, WhatWasPublishedInTheRightOrderIsWholeWhereverThePowerIsCut) {
  ModelFs counted;
  ASSERT_TRUE(Publish(&counted).ok());
  for (int cut = 1; cut <= counted.calls() + 1; ++cut) {
    ModelFs fs;
    fs.CutAt(cut);
    const absl::Status published = Publish(&fs);
    EXPECT_EQ(published.ok(), cut > counted.calls());
    EXPECT_EQ(WrongAfterPublish(fs, published.ok()), 0) << "cut at call " << cut << "\n" << fs.Dump();
  }
}

TEST(ModelFsTest, ASyncThatIsLeftOutShows) {
  ModelFs counted;
  ASSERT_TRUE(Publish(&counted).ok());
  const std::vector<std::string> log = counted.log();
  int syncs = 0;
  for (int call = 1; call <= counted.calls(); ++call) {
    const std::string& what = log[static_cast<size_t>(call) - 1];
    if (what.rfind("sync ", 0) != 0) continue;
    ++syncs;
    ModelFs fs;
    fs.SkipAt(call);
    EXPECT_TRUE(Publish(&fs).ok());
    EXPECT_GT(WrongAfterPublish(fs, true), 0) << what;
  }
  EXPECT_EQ(syncs, 4);
}

TEST(ModelFsTest, WhatACutLeavesIsOnTheDisk) {
  ModelFs fs;
  ASSERT_TRUE(fs.MakeFolder("/d").ok());
  ASSERT_TRUE(Put(&fs, "/d/a", "one").ok());
  const auto left = fs.AfterCut(1);
  EXPECT_EQ(left->Dump(), fs.Dump());
  EXPECT_EQ(left->AfterCut(0)->Dump(), left->Dump()) << "a second cut loses no more";
}

TEST(ModelFsTest, DamageIsOnTheDiskAtOnce) {
  ModelFs fs;
  PutSynced(&fs, "/a", "one");
  fs.Flip("/a", 1, 0);
  EXPECT_EQ(RootOf(fs.AfterCut(0).get()), "a=ooe");
  fs.Truncate("/a", 2);
  EXPECT_EQ(RootOf(fs.AfterCut(0).get()), "a=oo");
  fs.SetContent("/a", "two");
  EXPECT_EQ(RootOf(fs.AfterCut(0).get()), "a=two");
  EXPECT_THROW(fs.Flip("/a", 3, 0), std::out_of_range);
  EXPECT_THROW(fs.SetContent("/b", ""), std::invalid_argument);
  EXPECT_THROW(static_cast<void>(fs.Content("/")), std::invalid_argument) << "it is a folder";
}

TEST(ModelFsTest, TheDumpHasAllNames) {
  ModelFs fs;
  EXPECT_EQ(fs.Dump(), "");
  ASSERT_TRUE(fs.MakeFolder("/d").ok());
  ASSERT_TRUE(Put(&fs, "/d/a", "one").ok());
  ASSERT_TRUE(fs.MakeFolder("/d/e").ok());
  EXPECT_EQ(fs.Dump(), "/d/\n/d/a 3 bytes\n/d/e/\n");
}

TEST(ModelFsTest, ARenameIsWithinOneFolder) {
  ModelFs fs;
  ASSERT_TRUE(fs.MakeFolder("/d").ok());
  PutSynced(&fs, "/a", "one");
  EXPECT_TRUE(absl::IsInvalidArgument(fs.Rename("/a", "/d/a")));
  EXPECT_TRUE(fs.Exists("/a"));
}

TEST(ModelFsTest, ALockMayOutliveTheDiskAndIsGoneAfterACut) {
  auto fs = std::make_unique<ModelFs>();
  auto lock = fs->Lock("/lock");
  ASSERT_TRUE(lock.ok());
  EXPECT_TRUE(absl::IsUnavailable(fs->Lock("/lock").status()));
  EXPECT_TRUE(fs->AfterCut(1)->Lock("/lock").ok());
  fs.reset();
  lock->reset();
}

TEST(ModelFsTest, ThreadsWriteEachTheirOwn) {
  constexpr int kThreads = 4, kWrites = 50;
  ModelFs fs;
  for (int t = 0; t < kThreads; ++t) ASSERT_TRUE(fs.MakeFolder(absl::StrCat("/", t)).ok());  // a lock holds its folder
  const auto before = fs.calls();
  std::vector<std::thread> threads;
  for (int t = 0; t < kThreads; ++t) {
    threads.emplace_back([&fs, t] {
      const std::string text(10, static_cast<char>('a' + t));
      const auto lock = fs.Lock(absl::StrCat("/", t, "/lock"));
      const auto file = fs.Create(absl::StrCat("/", t, "/file"));
      ASSERT_TRUE(file.ok() && lock.ok());
      for (int w = 0; w < kWrites; ++w) ASSERT_TRUE((*file)->Write(10 * static_cast<uint64_t>(w), AsBytes(text)).ok());
      ASSERT_TRUE((*file)->Sync().ok());
    });
  }
  for (std::thread& thread : threads) thread.join();
  EXPECT_EQ(fs.calls() - before, kThreads * (kWrites + 3));
  ASSERT_TRUE(fs.SyncFolder("/").ok());
  for (int t = 0; t < kThreads; ++t) ASSERT_TRUE(fs.SyncFolder(absl::StrCat("/", t)).ok());
  const auto left = fs.AfterCut(0);
  for (int t = 0; t < kThreads; ++t) {
    EXPECT_EQ(left->Content(absl::StrCat("/", t, "/file")), std::string(10 * kWrites, static_cast<char>('a' + t)));
  }
}

}  // namespace
}  // namespace ballast
