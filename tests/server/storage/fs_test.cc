// What fs.h promises, of the system's file systems and of the model: proofs that are made with the model hold for the
// system only if both answer alike.
#include "server/storage/fs.h"

#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include <algorithm>
#include <cstdlib>
#include <limits>
#include <memory>
#include <random>
#include <string>
#include <vector>

#include "absl/strings/str_cat.h"

#include "tests/server/storage/model_fs.h"
#include "tests/server/storage/temporary_folder.h"

namespace ballast {
namespace {

using ::testing::ElementsAre;
using ::testing::HasSubstr;
using ::testing::IsEmpty;
using enum absl::StatusCode;

enum class Disk { kModel, kTemporary, kMemory };

absl::Span<const std::byte> BytesOf(const std::string& text) {
  return {reinterpret_cast<const std::byte*>(text.data()), text.size()};
}

// An error names the path that it is about.
void ExpectError(const absl::Status& status, absl::StatusCode code, const std::string& path) {
  EXPECT_EQ(status.code(), code) << path << ": " << status;
  EXPECT_THAT(std::string(status.message()), HasSubstr(path));
}

class FsTest : public ::testing::TestWithParam<Disk> {
 protected:
  void SetUp() override {
    if (GetParam() == Disk::kModel) {
      fs_ = &model_;
      ASSERT_TRUE(fs_->MakeFolder(dir_).ok());
      return;
    }
    folder_ =
        std::make_unique<testing::TemporaryFolder>(GetParam() == Disk::kMemory ? "/dev/shm" : ::testing::TempDir());
    if (folder_->path().empty()) GTEST_SKIP() << "there is no such folder to write to";
    fs_ = SystemFs();
    dir_ = folder_->path();
  }
  std::string In(const std::string& name) const { return absl::StrCat(dir_, "/", name); }

  std::string Put(const std::string& name, const std::string& text) {
    const auto file = fs_->Create(In(name));
    EXPECT_TRUE(file.ok()) << file.status();
    EXPECT_TRUE((*file)->Write(0, BytesOf(text)).ok());
    return In(name);
  }
  std::string MakeIn(const std::string& name) {
    EXPECT_TRUE(fs_->MakeFolder(In(name)).ok());
    return In(name);
  }
  std::string Read(const std::string& path) {
    const auto file = fs_->Open(path);
    if (!file.ok()) return file.status().ToString();
    std::string text((*file)->bytes(), '?');
    const absl::Status read = (*file)->Read(0, {reinterpret_cast<std::byte*>(text.data()), text.size()});
    return read.ok() ? text : read.ToString();
  }
  std::vector<std::string> Names(const std::string& path) {
    const auto entries = fs_->List(path);
    EXPECT_TRUE(entries.ok()) << entries.status();
    std::vector<std::string> names;
    for (const Fs::Entry& entry : *entries) {
      const bool folder = entry.kind == Fs::Kind::kFolder;
      names.push_back(absl::StrCat(entry.name, folder ? "/" : entry.kind == Fs::Kind::kOther ? "?" : ""));
    }
    return names;
  }

  ModelFs model_;
  std::unique_ptr<testing::TemporaryFolder> folder_;
  Fs* fs_ = nullptr;
  std::string dir_ = "/d";
};

INSTANTIATE_TEST_SUITE_P(Disks, FsTest, ::testing::Values(Disk::kModel, Disk::kTemporary, Disk::kMemory),
                         [](const auto& disk) {
                           return disk.param == Disk::kModel    ? "Model"
                                  : disk.param == Disk::kMemory ? "Memory"
                                                                : "Temporary";
                         });

TEST_P(FsTest, WhatIsWrittenIsRead) {
  const auto file = fs_->Create(In("a"));
  ASSERT_TRUE(file.ok()) << file.status();
  EXPECT_EQ(Read(In("a")), "");
  ASSERT_TRUE((*file)->Write(5, BytesOf("later")).ok());
  EXPECT_EQ(Read(In("a")), std::string(5, '\0') + "later");
  ASSERT_TRUE((*file)->Write(0, BytesOf("first, and")).ok());
  ASSERT_TRUE((*file)->Sync().ok());
  EXPECT_EQ(Read(In("a")), "first, and");
}

TEST_P(FsTest, WritingNothingChangesNothing) {
  const auto file = fs_->Create(In("a"));
  ASSERT_TRUE((*file)->Write(100, {}).ok());
  EXPECT_EQ(Read(In("a")), "");
}

TEST_P(FsTest, ASizeCutsOrFillsWithZeros) {
  const auto file = fs_->Create(In("a"));
  ASSERT_TRUE((*file)->Write(0, BytesOf("123456")).ok());
  ASSERT_TRUE((*file)->SetSize(3).ok());
  EXPECT_EQ(Read(In("a")), "123");
  ASSERT_TRUE((*file)->SetSize(5).ok());
  EXPECT_EQ(Read(In("a")), "123" + std::string(2, '\0'));
}

// Offsets, sizes and memory each a multiple of kDirect or not: some go past the page cache, and some do not.
TEST_P(FsTest, AlignedAndOtherWritesGiveTheSameBytes) {
  constexpr size_t kPages = 16, kBytes = kPages * OutputFile::kDirect;
  const std::unique_ptr<std::byte, decltype(&std::free)> memory(
      static_cast<std::byte*>(std::aligned_alloc(OutputFile::kDirect, 2 * kBytes)), &std::free);
  std::mt19937_64 random(11);
  for (size_t i = 0; i < 2 * kBytes; ++i) memory.get()[i] = static_cast<std::byte>(random());
  const auto file = fs_->Create(In("a"));
  std::string wanted;
  for (int write = 0; write < 100; ++write) {
    const auto draw = [&](size_t most) { return random() % most + (random() % 2 == 0 ? random() % 4095 + 1 : 0); };
    const size_t offset = draw(kPages) * OutputFile::kDirect / (random() % 4 == 0 ? 3 : 1) % kBytes;
    const size_t from = random() % 2 == 0 ? 0 : draw(1000);
    const size_t bytes = (random() % kPages + 1) * OutputFile::kDirect - (random() % 2 == 0 ? 0 : draw(4000) % 4096);
    ASSERT_TRUE((*file)->Write(offset, {memory.get() + from, bytes}).ok());
    wanted.resize(std::max(wanted.size(), offset + bytes), '\0');
    wanted.replace(offset, bytes, reinterpret_cast<const char*>(memory.get() + from), bytes);
    if (random() % 8 != 0) continue;
    wanted.resize(random() % kBytes);
    ASSERT_TRUE((*file)->SetSize(wanted.size()).ok());
  }
  ASSERT_TRUE((*file)->Sync().ok());
  EXPECT_TRUE(Read(In("a")) == wanted);
}

TEST_P(FsTest, ReadingPastTheEndIsDataLoss) {
  const std::string path = Put("a", "123456");
  const auto file = fs_->Open(path);
  ASSERT_TRUE(file.ok());
  EXPECT_EQ((*file)->bytes(), 6u);
  std::byte to[4] = {};
  EXPECT_TRUE((*file)->Read(2, to).ok());
  EXPECT_EQ(to[0], std::byte{'3'});
  EXPECT_TRUE((*file)->Read(6, {}).ok());
  ExpectError((*file)->Read(3, to), kDataLoss, path);
  ExpectError((*file)->Read(6, to), kDataLoss, path);
  ExpectError((*file)->Read(uint64_t{1} << 40, to), kDataLoss, path);
  ExpectError((*file)->Read(std::numeric_limits<uint64_t>::max(), to), kDataLoss, path);
}

TEST_P(FsTest, AnOpenFileIsReadOnAfterItIsRenamedAndRemoved) {
  const std::string path = Put("a", "one");
  const auto file = fs_->Open(path);
  ASSERT_TRUE(fs_->Rename(path, In("b")).ok());
  ASSERT_TRUE(fs_->RemoveFile(In("b")).ok());
  std::byte to[3] = {};
  EXPECT_TRUE((*file)->Read(0, to).ok());
  EXPECT_EQ(to[2], std::byte{'e'});
}

TEST_P(FsTest, AFileIsMadeOnce) {
  const std::string file = Put("file", "one"), folder = MakeIn("folder");
  ExpectError(fs_->Create(file).status(), kAlreadyExists, file);
  EXPECT_EQ(Read(file), "one");
  ExpectError(fs_->Create(folder).status(), kAlreadyExists, folder);
  ExpectError(fs_->Create(In("none/a")).status(), kNotFound, In("none"));
  ExpectError(fs_->Create(In("file/a")).status(), kFailedPrecondition, In("file"));
}

TEST_P(FsTest, OnlyAFileIsOpened) {
  const std::string folder = MakeIn("folder");
  Put("file", "");
  ExpectError(fs_->Open(folder).status(), kFailedPrecondition, folder);
  ExpectError(fs_->Open(In("none")).status(), kNotFound, In("none"));
  ExpectError(fs_->Open(In("file/a")).status(), kFailedPrecondition, In("file"));
}

TEST_P(FsTest, AFolderIsMadeOnce) {
  const std::string file = Put("file", "one"), folder = MakeIn("folder");
  ExpectError(fs_->MakeFolder(folder), kAlreadyExists, folder);
  ExpectError(fs_->MakeFolder(file), kAlreadyExists, file);
  ExpectError(fs_->MakeFolder(In("none/a")), kNotFound, In("none"));
  ExpectError(fs_->MakeFolder(In("file/a")), kFailedPrecondition, In("file"));
}

TEST_P(FsTest, AListIsInOrderAndSaysWhatEachIs) {
  EXPECT_THAT(Names(dir_), IsEmpty());
  const std::string file = Put("b", "");
  MakeIn("c");
  Put("a10", "");
  Put("a9", "");
  Put("c/inner", "");
  EXPECT_THAT(Names(dir_), ElementsAre("a10", "a9", "b", "c/"));
  EXPECT_THAT(Names(In("c")), ElementsAre("inner"));
  ExpectError(fs_->List(file).status(), kFailedPrecondition, file);
  ExpectError(fs_->List(In("none")).status(), kNotFound, In("none"));
}

TEST_P(FsTest, ARenameTakesAllAlong) {
  MakeIn("folder");
  Put("folder/a", "one");
  ASSERT_TRUE(fs_->Rename(In("folder"), In("other")).ok());
  EXPECT_THAT(Names(dir_), ElementsAre("other/"));
  ASSERT_TRUE(fs_->Rename(In("other/a"), In("other/b")).ok());
  EXPECT_THAT(Names(In("other")), ElementsAre("b"));
  EXPECT_EQ(Read(In("other/b")), "one");
}

TEST_P(FsTest, ARenameReplacesNothing) {
  const std::string a = Put("a", "one"), b = Put("b", "two"), folder = MakeIn("folder"), empty = MakeIn("empty");
  for (const std::string& to : {b, folder}) ExpectError(fs_->Rename(a, to), kAlreadyExists, a);
  for (const std::string& to : {b, empty}) ExpectError(fs_->Rename(folder, to), kAlreadyExists, folder);
  ExpectError(fs_->Rename(a, a), kAlreadyExists, a);
  ExpectError(fs_->Rename(In("none"), In("c")), kNotFound, In("none"));
  ExpectError(fs_->Rename(In("none"), b), kNotFound, In("none"));
  EXPECT_THAT(Names(dir_), ElementsAre("a", "b", "empty/", "folder/"));
  EXPECT_EQ(Read(a), "one");
  EXPECT_EQ(Read(b), "two");
}

TEST_P(FsTest, AFileIsRemoved) {
  const std::string file = Put("file", ""), folder = MakeIn("folder");
  ExpectError(fs_->RemoveFile(folder), kFailedPrecondition, folder);
  ASSERT_TRUE(fs_->RemoveFile(file).ok());
  ExpectError(fs_->RemoveFile(file), kNotFound, file);
  EXPECT_THAT(Names(dir_), ElementsAre("folder/"));
}

TEST_P(FsTest, AFolderIsRemovedWhenItIsEmpty) {
  const std::string folder = MakeIn("folder"), file = Put("folder/file", "");
  ExpectError(fs_->RemoveFolder(folder), kAlreadyExists, folder);
  ExpectError(fs_->RemoveFolder(file), kFailedPrecondition, file);
  ASSERT_TRUE(fs_->RemoveFile(file).ok());
  ASSERT_TRUE(fs_->RemoveFolder(folder).ok());
  ExpectError(fs_->RemoveFolder(folder), kNotFound, folder);
  EXPECT_THAT(Names(dir_), IsEmpty());
}

TEST_P(FsTest, OnlyAFolderIsSynced) {
  const std::string file = Put("file", ""), folder = MakeIn("folder");
  EXPECT_TRUE(fs_->SyncFolder(dir_).ok());
  EXPECT_TRUE(fs_->SyncFolder(folder).ok());
  ExpectError(fs_->SyncFolder(file), kFailedPrecondition, file);
  ExpectError(fs_->SyncFolder(In("none")), kNotFound, In("none"));
}

TEST_P(FsTest, TheSpaceIsKnown) {
  const auto space = fs_->SpaceOf(dir_);
  ASSERT_TRUE(space.ok()) << space.status();
  EXPECT_GT(space->size_bytes, 0u);
  EXPECT_LE(space->free_bytes, space->size_bytes);
  ExpectError(fs_->SpaceOf(In("none")).status(), kNotFound, In("none"));
}

TEST_P(FsTest, ALockIsHeldOnceUntilItIsGone) {
  auto lock = fs_->Lock(In("lock"));
  ASSERT_TRUE(lock.ok()) << lock.status();
  ExpectError(fs_->Lock(In("lock")).status(), kUnavailable, In("lock"));
  EXPECT_EQ(fs_->Lock(In("other")).status().code(), kUnavailable)
      << "the folder is locked, whatever became of the file";
  lock->reset();
  EXPECT_TRUE(fs_->Lock(In("lock")).ok());
  EXPECT_THAT(Names(dir_), ElementsAre("lock", "other"));
}

TEST_P(FsTest, ALockIsAFileInAFolder) {
  const std::string folder = MakeIn("folder");
  ExpectError(fs_->Lock(folder).status(), kFailedPrecondition, folder);
  ExpectError(fs_->Lock(In("none/lock")).status(), kNotFound, In("none"));
}

}  // namespace
}  // namespace ballast
