// The model's calls that fail, are left out, or come too late.
#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include <string>

#include "tests/server/storage/model_files.h"
#include "tests/server/storage/model_fs.h"

namespace ballast {
namespace {

using testing::AsBytes;
using ::testing::HasSubstr;
using testing::Put;
using testing::PutSynced;
using testing::RootOf;
using testing::RootsAfterCut;
using ::testing::UnorderedElementsAre;

TEST(ModelFsCallsTest, ACallThatIsToFailSaysWhatItWasAndDoesNothing) {
  ModelFs fs;
  PutSynced(&fs, "/a", "one");
  const std::string before = fs.Dump();
  const absl::Status full = absl::ResourceExhaustedError("disk full");
  const auto fail = [&] { fs.FailAt(fs.calls() + 1, full); };
  const auto expect = [&](const absl::Status& status, const std::string& what) {
    EXPECT_EQ(status, absl::ResourceExhaustedError(what + ": disk full"));
    EXPECT_EQ(fs.Dump(), before);
  };
  fail();
  expect(fs.Create("/b").status(), "create /b");
  fail();
  expect(fs.MakeFolder("/b"), "mkdir /b");
  fail();
  expect(fs.Rename("/a", "/b"), "rename /a b");
  fail();
  expect(fs.RemoveFile("/a"), "remove /a");
  fail();
  expect(fs.Lock("/lock").status(), "lock /lock");
  EXPECT_TRUE(fs.RemoveFile("/a").ok()) << "the next one does not fail";
}

TEST(ModelFsCallsTest, AWriteThatFailsMayLeaveItsBeginning) {
  ModelFs fs;
  const auto file = Put(&fs, "/a", "one");
  fs.FailAt(fs.calls() + 1, absl::DataLossError("input/output error"), 2);
  EXPECT_TRUE(absl::IsDataLoss((*file)->Write(3, AsBytes("two"))));
  EXPECT_EQ(fs.Content("/a"), "onetw");
  fs.FailAt(fs.calls() + 1, absl::DataLossError("input/output error"));
  EXPECT_TRUE(absl::IsDataLoss((*file)->Write(3, AsBytes("six"))));
  EXPECT_EQ(fs.Content("/a"), "onetw");
  EXPECT_TRUE((*file)->Write(3, AsBytes("six")).ok());
  EXPECT_EQ(fs.Content("/a"), "onesix");
}

TEST(ModelFsCallsTest, NothingIsDoneAfterTheCut) {
  ModelFs fs;
  PutSynced(&fs, "/a", "one");
  const auto input = fs.Open("/a");
  const auto output = fs.Create("/b");
  fs.CutAt(fs.calls() + 2);
  ASSERT_TRUE((*output)->Write(0, AsBytes("two")).ok()) << "what comes before it is done";
  ASSERT_TRUE(fs.List("/").ok());
  const std::string before = fs.Dump();
  std::byte byte;
  for (const absl::Status& status :
       {(*output)->Write(3, AsBytes("x")), (*output)->SetSize(1), (*output)->Sync(), fs.SyncFolder("/"),
        fs.Create("/c").status(), fs.MakeFolder("/c"), fs.Rename("/a", "/c"), fs.RemoveFile("/a"), fs.RemoveFolder("/"),
        fs.Lock("/lock").status(), fs.List("/").status(), fs.Open("/a").status(), (*input)->Read(0, {&byte, 1}),
        fs.SpaceOf("/").status()}) {
    EXPECT_TRUE(absl::IsUnavailable(status)) << status;
    EXPECT_THAT(std::string(status.message()), HasSubstr("power cut"));
  }
  EXPECT_EQ(fs.Dump(), before);
  const auto left = fs.AfterCut(0);
  EXPECT_EQ(RootOf(left.get()), "a=one");
  EXPECT_TRUE(left->RemoveFile("/a").ok()) << "the power is there again";
}

TEST(ModelFsCallsTest, ReadsCountIfTheyAreTo) {
  ModelFs fs;
  PutSynced(&fs, "/a", "one");
  const int before = fs.calls();
  ASSERT_TRUE(fs.List("/").ok());
  EXPECT_EQ(fs.calls(), before);
  fs.set_counts_reads(true);
  const auto file = fs.Open("/a");
  fs.FailAt(before + 2, absl::DataLossError("input/output error"));
  std::byte byte;
  EXPECT_TRUE(absl::IsDataLoss((*file)->Read(0, {&byte, 1})));
  EXPECT_TRUE((*file)->Read(0, {&byte, 1}).ok());
  EXPECT_EQ(fs.log()[static_cast<size_t>(before)], "open /a");
  EXPECT_EQ(fs.calls(), before + 3);
}

TEST(ModelFsCallsTest, AFullDiskTakesWhatFits) {
  ModelFs fs;
  fs.set_capacity(10);
  const auto file = Put(&fs, "/a", "123456");
  EXPECT_EQ(fs.SpaceOf("/")->size_bytes, 10u);
  EXPECT_EQ(fs.SpaceOf("/")->free_bytes, 4u);
  EXPECT_TRUE((*file)->Write(0, AsBytes("abcdef")).ok()) << "which takes no more than it has";
  const absl::Status full = (*file)->Write(6, AsBytes("ghijkl"));
  EXPECT_EQ(full, absl::ResourceExhaustedError("cannot write /a: the disk is full"));
  EXPECT_EQ(fs.Content("/a"), "abcdefghij");
  EXPECT_TRUE(absl::IsResourceExhausted((*file)->SetSize(11)));
  EXPECT_TRUE(absl::IsResourceExhausted((*file)->Write(20, AsBytes("x"))));
  EXPECT_TRUE((*file)->Write(20, {}).ok()) << "which takes nothing";
  EXPECT_EQ(fs.Content("/a"), "abcdefghij");
  ASSERT_TRUE(fs.RemoveFile("/a").ok());
  EXPECT_EQ(fs.SpaceOf("/")->free_bytes, 10u);
  EXPECT_EQ(fs.AfterCut(1)->SpaceOf("/")->size_bytes, 10u) << "it is the same disk";
}

TEST(ModelFsCallsTest, ACallThatIsLeftOutSaysThatItWasDone) {
  ModelFs fs;
  PutSynced(&fs, "/a", "one");
  ASSERT_TRUE(fs.MakeFolder("/d").ok());
  const auto file = Put(&fs, "/b", "two");
  const std::string before = fs.Dump();
  const auto skip = [&] { fs.SkipAt(fs.calls() + 1); };
  const auto expect_nothing = [&](const absl::Status& status) {
    EXPECT_TRUE(status.ok()) << status;
    EXPECT_EQ(fs.Dump(), before) << fs.log().back();
    EXPECT_EQ(RootOf(fs.AfterCut(0).get()), "a=one") << fs.log().back();
  };
  skip();
  expect_nothing(fs.Create("/c").status());
  skip();
  expect_nothing(fs.MakeFolder("/c"));
  skip();
  expect_nothing(fs.Rename("/a", "/c"));
  skip();
  expect_nothing(fs.RemoveFile("/a"));
  skip();
  expect_nothing(fs.RemoveFolder("/d"));
  skip();
  expect_nothing((*file)->Write(0, AsBytes("three")));
  skip();
  expect_nothing((*file)->SetSize(1));
  skip();
  expect_nothing(fs.SyncFolder("/"));
  skip();
  expect_nothing((*file)->Sync());
  ASSERT_TRUE(fs.RemoveFolder("/d").ok());
  ASSERT_TRUE(fs.SyncFolder("/").ok());
  EXPECT_THAT(RootsAfterCut(fs), UnorderedElementsAre("a=one b=", "a=one b=two")) << "the file's sync was left out";
}

}  // namespace
}  // namespace ballast
