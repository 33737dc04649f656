// A folder that is moved away under the daemon that has locked it, and what lies in its place then.
#include "server/storage/held_fs.h"

#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include <filesystem>
#include <memory>
#include <string>

#include "server/storage/storage.h"
#include "tests/server/storage/temporary_folder.h"

namespace ballast {
namespace {

using ::testing::AllOf;
using ::testing::ElementsAre;
using ::testing::HasSubstr;

class HeldFsTest : public ::testing::Test {
 protected:
  HeldFsTest() {
    std::filesystem::create_directory(dir_);
    first_ = Open();
    EXPECT_TRUE(first_->FolderOf("r1").ok());
  }
  std::unique_ptr<Storage> Open() const {
    auto opened = Storage::Open({.fs = SystemFs(), .dir = dir_, .threads = 1});
    EXPECT_TRUE(opened.ok()) << opened.status();
    return opened.ok() ? *std::move(opened) : nullptr;
  }
  void MoveAway() const { std::filesystem::rename(dir_, away_); }
  void MakeAnew() const { std::filesystem::create_directories(dir_ + "/runs"); }
  // What the first daemon says that is to write there.
  absl::Status Write() { return (*first_->FolderOf("r1"))->Begin({.number = 1, .step = 10}).status(); }
  static void ExpectRefused(const absl::Status& refused) {
    EXPECT_TRUE(absl::IsFailedPrecondition(refused)) << refused;
    EXPECT_THAT(std::string(refused.message()),
                AllOf(HasSubstr("is another folder than the one that this daemon has locked"),
                      HasSubstr("Bring the daemon's own folder back to that path")));
  }

  const testing::TemporaryFolder folder_;
  const std::string dir_ = folder_.path() + "/st", away_ = folder_.path() + "/st.away";
  std::unique_ptr<Storage> first_;
};

TEST_F(HeldFsTest, WhatAnotherDaemonHasLockedIsNotWrittenTo) {
  MoveAway();
  std::filesystem::create_directory(dir_);
  const auto second = Open();
  ASSERT_NE(second, nullptr);
  const absl::Status refused = Write();
  ExpectRefused(refused);
  EXPECT_THAT(std::string(refused.message()), HasSubstr("is held by another daemon, process "));
  ASSERT_TRUE(second->FolderOf("r1").ok());
  ASSERT_TRUE(second->FolderOf("r2").ok());
  for (const absl::Status& each :
       {Write(), first_->FolderOf("r3").status(), first_->Remove("r2"), first_->Remove("r1"),
        first_->fs()->Create(dir_ + "/runs/r1/file").status(), first_->fs()->RemoveFolder(dir_ + "/runs/r2"),
        first_->fs()->RemoveFile(dir_ + "/ballast.lock")}) {
    ExpectRefused(each);
  }
  EXPECT_THAT(*second->RunIds(), ElementsAre("r1", "r2"));
  EXPECT_TRUE(std::filesystem::is_empty(dir_ + "/runs/r1"));
}

TEST_F(HeldFsTest, WhatAnotherDaemonHasLeftIsNotWrittenToEither) {
  MoveAway();
  std::filesystem::create_directory(dir_);
  ASSERT_TRUE(Open()->FolderOf("r1").ok());
  ExpectRefused(Write());
}

TEST_F(HeldFsTest, ItsOwnFolderBroughtBackIsWrittenTo) {
  MoveAway();
  const absl::Status gone = Write();
  EXPECT_THAT(std::string(gone.message()), HasSubstr("/runs is gone under the daemon"));
  std::filesystem::rename(away_, dir_);
  EXPECT_TRUE(Write().ok());
}

// As the message says of a folder that is gone.
TEST_F(HeldFsTest, AFolderThatWasMadeAnewIsLockedAndWrittenTo) {
  MoveAway();
  std::filesystem::create_directory(dir_);
  EXPECT_THAT(std::string(Write().message()), HasSubstr("/runs is gone under the daemon"));
  MakeAnew();
  EXPECT_TRUE(Write().ok());
  EXPECT_TRUE(absl::IsUnavailable(Storage::Open({.fs = SystemFs(), .dir = dir_, .threads = 1}).status()));
}

TEST_F(HeldFsTest, TheLocksFileMayBeRemoved) {
  std::filesystem::remove(dir_ + "/ballast.lock");
  EXPECT_TRUE(Write().ok());
}

}  // namespace
}  // namespace ballast
