// What only the system's file systems have: links, other processes, limits, and disks that are full or read-only.
// What they share with the model is in fs_test.cc.
#include <fcntl.h>
#include <gmock/gmock.h>
#include <gtest/gtest.h>
#include <sched.h>
#include <signal.h>
#include <sys/mount.h>
#include <sys/resource.h>
#include <sys/stat.h>
#include <sys/wait.h>
#include <unistd.h>

#include <cstdio>
#include <cstdlib>
#include <filesystem>
#include <fstream>
#include <memory>
#include <optional>
#include <string>
#include <utility>
#include <vector>

#include "absl/functional/function_ref.h"
#include "absl/strings/str_cat.h"

#include "server/storage/fs.h"
#include "tests/server/file_content.h"
#include "tests/server/storage/temporary_folder.h"

namespace ballast {
namespace {

using ::testing::AllOf;
using testing::ContentOf;
using ::testing::HasSubstr;
using enum absl::StatusCode;

constexpr int kNotPossible = 77;  // of a child that could not make what it was to try

absl::Span<const std::byte> SystemBytes(const std::string& text) {
  return {reinterpret_cast<const std::byte*>(text.data()), text.size()};
}

// Does it in a process of its own, for what would change this one: its user, its limits, what it has mounted. What fails
// there fails here. false: it was not possible.
bool InChild(absl::FunctionRef<bool()> act) {
  std::fflush(nullptr);
  const pid_t child = fork();
  if (child == 0) {
    const bool possible = act();
    std::fflush(nullptr);
    _exit(!possible ? kNotPossible : ::testing::Test::HasFailure() ? 1 : 0);
  }
  int status = 0;
  EXPECT_EQ(waitpid(child, &status, 0), child);
  EXPECT_TRUE(WIFEXITED(status)) << "it was ended by signal " << WTERMSIG(status);
  if (WIFEXITED(status) && WEXITSTATUS(status) == kNotPossible) return false;
  EXPECT_EQ(status, 0) << "see above";
  return true;
}

class SystemFsTest : public ::testing::Test {
 protected:
  void SetUp() override { ASSERT_NE(folder_.path(), ""); }
  std::string In(const std::string& name) const { return absl::StrCat(folder_.path(), "/", name); }
  // A file with the text, made without the code under test.
  std::string Put(const std::string& name, const std::string& text) const {
    std::ofstream(In(name), std::ios::binary) << text;
    return In(name);
  }
  std::string LinkTo(const std::string& target, const std::string& name) const {
    EXPECT_EQ(symlink(target.c_str(), In(name).c_str()), 0);
    return In(name);
  }
  static mode_t ModeOf(const std::string& path) {
    struct stat found {};
    EXPECT_EQ(lstat(path.c_str(), &found), 0) << path;
    return found.st_mode & 07777;
  }

  const testing::TemporaryFolder folder_;
  Fs& fs_ = *SystemFs();
};

TEST_F(SystemFsTest, FilesAndFoldersAreTheOwnersAlone) {
  const mode_t before = umask(0);
  EXPECT_TRUE(fs_.Create(In("file")).ok());
  EXPECT_TRUE(fs_.MakeFolder(In("folder")).ok());
  EXPECT_TRUE(fs_.Lock(In("lock")).ok());
  umask(before);
  EXPECT_EQ(ModeOf(In("file")), 0600u);
  EXPECT_EQ(ModeOf(In("folder")), 0700u);
  EXPECT_EQ(ModeOf(In("lock")), 0600u);
}

TEST_F(SystemFsTest, LinksToFilesAreNotFollowed) {
  const std::string target = Put("target", "one"), link = LinkTo(target, "link");
  EXPECT_EQ(fs_.Create(link).status().code(), kAlreadyExists);
  const absl::Status opened = fs_.Open(link).status();
  EXPECT_EQ(opened.code(), kFailedPrecondition);
  EXPECT_THAT(std::string(opened.message()), AllOf(HasSubstr(link), HasSubstr("it is a symbolic link")));
  EXPECT_EQ(fs_.Lock(link).status().code(), kFailedPrecondition);
  EXPECT_EQ(fs_.MakeFolder(link).code(), kAlreadyExists);
  EXPECT_EQ(ContentOf(target), "one");
  ASSERT_TRUE(fs_.Rename(link, In("moved")).ok()) << "the link itself";
  EXPECT_EQ(fs_.Rename(target, In("moved")).code(), kAlreadyExists);
  ASSERT_TRUE(fs_.RemoveFile(In("moved")).ok());
  EXPECT_FALSE(std::filesystem::is_symlink(In("moved")));
  EXPECT_EQ(ContentOf(target), "one");
}

TEST_F(SystemFsTest, LinksToNothingAreNotFollowed) {
  const std::string link = LinkTo(In("none"), "link");
  EXPECT_EQ(fs_.Create(link).status().code(), kAlreadyExists);
  EXPECT_EQ(fs_.Lock(link).status().code(), kFailedPrecondition);
  EXPECT_EQ(fs_.Open(link).status().code(), kFailedPrecondition);
  EXPECT_EQ(fs_.Rename(Put("a", "one"), link).code(), kAlreadyExists);
  EXPECT_FALSE(std::filesystem::exists(In("none")));
}

TEST_F(SystemFsTest, LinksToFoldersAreNotFollowed) {
  ASSERT_TRUE(fs_.MakeFolder(In("folder")).ok());
  const std::string inside = Put("folder/a", "one"), link = LinkTo(In("folder"), "link");
  const absl::Status listed = fs_.List(link).status();
  EXPECT_EQ(listed.code(), kFailedPrecondition);
  EXPECT_THAT(std::string(listed.message()), AllOf(HasSubstr(link), HasSubstr("it is a symbolic link")));
  EXPECT_EQ(fs_.SyncFolder(link).code(), kFailedPrecondition);
  EXPECT_EQ(fs_.RemoveFolder(link).code(), kFailedPrecondition);
  EXPECT_EQ(fs_.MakeFolder(link).code(), kAlreadyExists);
  EXPECT_TRUE(fs_.Open(link + "/a").ok()) << "only the last part of a path counts";
  ASSERT_TRUE(fs_.RemoveFile(link).ok());
  EXPECT_EQ(ContentOf(inside), "one");
}

TEST_F(SystemFsTest, WhatIsNeitherFileNorFolderIsListedAndNotOpened) {
  LinkTo(In("none"), "link");
  LinkTo("/", "link-to-folder");
  LinkTo("/proc/self/status", "link-to-file");
  ASSERT_EQ(mkfifo(In("pipe").c_str(), 0600), 0);
  const auto entries = fs_.List(folder_.path());
  ASSERT_TRUE(entries.ok());
  ASSERT_EQ(entries->size(), 4u);
  for (const Fs::Entry& entry : *entries) EXPECT_EQ(entry.kind, Fs::Kind::kOther) << entry.name;
  const absl::Status pipe = fs_.Open(In("pipe")).status();  // and does not wait for somebody to write
  EXPECT_EQ(pipe.code(), kFailedPrecondition);
  EXPECT_THAT(std::string(pipe.message()), AllOf(HasSubstr(In("pipe")), HasSubstr("no ordinary file")));
  EXPECT_EQ(fs_.Open("/dev/null").status().code(), kFailedPrecondition);
}

// Whether this process has the file open past the page cache, perhaps beside; nothing: the file is not open.
std::optional<bool> IsOpenDirect(const std::string& path) {
  std::optional<bool> direct;
  for (const auto& entry : std::filesystem::directory_iterator("/proc/self/fd")) {
    std::error_code gone;  // of the iterator itself, for one
    if (std::filesystem::read_symlink(entry.path(), gone) != path) continue;
    direct = direct.value_or(false) || (fcntl(std::stoi(entry.path().filename()), F_GETFL) & O_DIRECT) != 0;
  }
  return direct;
}

bool TakesDirect(const std::string& file) {
  const int direct = open(file.c_str(), O_RDWR | O_DIRECT | O_CLOEXEC);
  if (direct >= 0) close(direct);
  return direct >= 0;
}

using AlignedMemory = std::unique_ptr<std::byte, decltype(&std::free)>;
AlignedMemory MakeAligned(size_t bytes) {
  AlignedMemory memory(static_cast<std::byte*>(std::aligned_alloc(OutputFile::kDirect, bytes)), &std::free);
  std::fill_n(memory.get(), bytes, std::byte{'x'});
  return memory;
}

TEST_F(SystemFsTest, AlignedReadsPassThePageCacheWhereThatIsPossible) {
  constexpr size_t kBytes = 2 * OutputFile::kDirect;
  const bool direct = TakesDirect(Put("probe", ""));
  const std::string path = std::filesystem::canonical(folder_.path()).string() + "/a";
  std::string wanted(kBytes + 10, '\0');
  for (size_t i = 0; i < wanted.size(); ++i) wanted[i] = static_cast<char>(i * 7);
  Put("a", wanted);
  const AlignedMemory memory = MakeAligned(kBytes);
  const absl::Span<std::byte> room(memory.get(), kBytes);
  const auto* const text = reinterpret_cast<const char*>(memory.get());
  const auto file = fs_.Open(path);
  ASSERT_TRUE(file.ok());
  ASSERT_TRUE((*file)->Read(kBytes, room.first(10)).ok());
  EXPECT_EQ(std::string(text, 10), wanted.substr(kBytes));
  EXPECT_EQ(IsOpenDirect(path), false) << "its size is not aligned";
  ASSERT_TRUE((*file)->Read(0, room).ok());
  EXPECT_EQ(std::string(text, kBytes), wanted.substr(0, kBytes));
  EXPECT_EQ(IsOpenDirect(path), direct);
  ASSERT_TRUE((*file)->Read(10, room).ok());
  EXPECT_EQ(std::string(text, kBytes), wanted.substr(10)) << "its offset is not aligned";
  EXPECT_TRUE(absl::IsDataLoss((*file)->Read(OutputFile::kDirect, room))) << "an aligned read over the end";
}

TEST_F(SystemFsTest, AlignedWritesPassThePageCacheWhereThatIsPossible) {
  constexpr size_t kBytes = 2 * OutputFile::kDirect;
  const bool direct = TakesDirect(Put("probe", ""));
  const AlignedMemory memory = MakeAligned(kBytes);
  const std::string path = std::filesystem::canonical(folder_.path()).string() + "/a";
  const auto file = fs_.Create(path);
  ASSERT_TRUE(file.ok());
  ASSERT_TRUE((*file)->Write(0, {memory.get(), kBytes}).ok());
  EXPECT_EQ(IsOpenDirect(path), direct);
  ASSERT_TRUE((*file)->Write(kBytes, {memory.get(), 10}).ok());
  EXPECT_EQ(IsOpenDirect(path), false) << "its size is not aligned";
  ASSERT_TRUE((*file)->Write(kBytes, {memory.get(), kBytes}).ok());
  EXPECT_EQ(IsOpenDirect(path), direct);
  ASSERT_TRUE((*file)->Write(10, {memory.get(), OutputFile::kDirect}).ok());
  EXPECT_EQ(IsOpenDirect(path), false) << "its offset is not aligned";
  EXPECT_EQ(ContentOf(path), std::string(2 * kBytes, 'x'));
}

// A process that holds a lock until it ends.
class LockHolder {
 public:
  explicit LockHolder(const std::string& path) {
    int ready[2] = {}, go_on[2] = {};
    EXPECT_EQ(pipe2(ready, O_CLOEXEC), 0);
    EXPECT_EQ(pipe2(go_on, O_CLOEXEC), 0);
    std::fflush(nullptr);
    pid_ = fork();
    if (pid_ == 0) {
      close(go_on[1]);
      const auto lock = SystemFs()->Lock(path);
      char byte = lock.ok() ? '+' : '-';
      if (write(ready[1], &byte, 1) == 1) (void)!read(go_on[0], &byte, 1);
      _exit(0);  // without giving the lock back
    }
    close(ready[1]);
    close(go_on[0]);
    go_on_ = go_on[1];
    char byte = '-';
    EXPECT_EQ(read(ready[0], &byte, 1), 1);
    EXPECT_EQ(byte, '+') << "the other process did not get the lock";
    close(ready[0]);
  }
  LockHolder(const LockHolder&) = delete;
  LockHolder& operator=(const LockHolder&) = delete;
  ~LockHolder() { End(); }
  pid_t pid() const { return pid_; }
  void End() {
    if (go_on_ < 0) return;
    close(std::exchange(go_on_, -1));
    EXPECT_EQ(waitpid(pid_, nullptr, 0), pid_);
  }
  void Kill() {
    EXPECT_EQ(kill(pid_, SIGKILL), 0);
    End();
  }

 private:
  pid_t pid_ = -1;
  int go_on_ = -1;
};

TEST_F(SystemFsTest, ALockOfAnotherProcessIsNamedAndEndsWithIt) {
  Put("lock", "4194304 and more, of somebody before");
  for (const bool killed : {false, true}) {
    LockHolder holder(In("lock"));
    const absl::Status held = fs_.Lock(In("lock")).status();
    EXPECT_EQ(held.code(), kUnavailable) << held;
    EXPECT_THAT(std::string(held.message()),
                AllOf(HasSubstr(In("lock")), HasSubstr(absl::StrCat("process ", holder.pid(), ";"))));
    killed ? holder.Kill() : holder.End();
    const auto lock = fs_.Lock(In("lock"));
    EXPECT_TRUE(lock.ok()) << lock.status();
    EXPECT_EQ(ContentOf(In("lock")), absl::StrCat(getpid()));
  }
}

TEST_F(SystemFsTest, AProcessThatItStartsDoesNotKeepTheLock) {
  auto lock = fs_.Lock(In("lock"));
  ASSERT_TRUE(lock.ok());
  int flags = -1;
  for (const auto& entry : std::filesystem::directory_iterator("/proc/self/fd")) {
    std::error_code gone;
    if (std::filesystem::read_symlink(entry.path(), gone).filename() != "lock") continue;
    flags = fcntl(std::stoi(entry.path().filename()), F_GETFD);
  }
  EXPECT_EQ(flags, FD_CLOEXEC);
}

TEST_F(SystemFsTest, AFolderOfAnotherUsersIsRefused) {
  ASSERT_EQ(chmod(folder_.path().c_str(), 0755), 0);
  ASSERT_TRUE(fs_.MakeFolder(In("closed")).ok());
  const std::string file = Put("closed/file", "one"), secret = Put("secret", "one");
  ASSERT_EQ(chmod(In("closed").c_str(), 0555), 0);
  ASSERT_EQ(chmod(secret.c_str(), 0), 0);
  // Where all may write, and remove only what is theirs.
  ASSERT_TRUE(fs_.MakeFolder(In("sticky")).ok());
  const std::string others = Put("sticky/file", "one");
  ASSERT_EQ(chmod(In("sticky").c_str(), 01777), 0);
  const bool possible = InChild([&] {
    constexpr uid_t kNobody = 65534;
    const bool is_root = geteuid() == 0;
    if (is_root && setresuid(kNobody, kNobody, kNobody) != 0) return false;
    if (access(folder_.path().c_str(), X_OK) != 0) return false;  // what it is in is closed, too
    if (is_root) {                                                // else it is ours
      EXPECT_EQ(fs_.RemoveFile(others).code(), kPermissionDenied);
    }
    for (const absl::Status& status :
         {fs_.Create(In("closed/a")).status(), fs_.MakeFolder(In("closed/a")), fs_.Rename(file, In("closed/a")),
          fs_.RemoveFile(file), fs_.Lock(In("closed/lock")).status(), fs_.Open(secret).status()}) {
      EXPECT_EQ(status.code(), kPermissionDenied) << status;
      EXPECT_THAT(std::string(status.message()), HasSubstr(folder_.path()));
    }
    EXPECT_TRUE(fs_.List(In("closed")).ok());
    return true;
  });
  ASSERT_EQ(chmod(In("closed").c_str(), 0700), 0);  // so that it can be removed
  if (!possible) GTEST_SKIP() << "no other user can be had";
}

// A small file system of the child's own at the path. false: it may not mount one.
bool MountSmall(const std::string& at) {
  return unshare(CLONE_NEWNS) == 0 && mount(nullptr, "/", nullptr, MS_REC | MS_PRIVATE, nullptr) == 0 &&
         mount("tmpfs", at.c_str(), "tmpfs", 0, "size=64k,mode=0700") == 0;
}

TEST_F(SystemFsTest, AFullDiskIsTold) {
  const bool possible = InChild([&] {
    if (!MountSmall(folder_.path())) return false;
    const auto space = fs_.SpaceOf(folder_.path());
    EXPECT_EQ(space->size_bytes, 65536u);
    EXPECT_EQ(space->free_bytes, 65536u);
    const auto file = fs_.Create(In("a"));
    const absl::Status status = (*file)->Write(0, SystemBytes(std::string(100000, 'x')));
    EXPECT_EQ(status.code(), kResourceExhausted) << status;
    EXPECT_THAT(std::string(status.message()), AllOf(HasSubstr(In("a")), HasSubstr("No space left")));
    EXPECT_EQ(fs_.SpaceOf(folder_.path())->free_bytes, 0u);
    EXPECT_TRUE(fs_.RemoveFile(In("a")).ok()) << "even then";
    return true;
  });
  if (!possible) GTEST_SKIP() << "no file system may be mounted";
}

TEST_F(SystemFsTest, AReadOnlyFileSystemIsTold) {
  const bool possible = InChild([&] {
    if (!MountSmall(folder_.path())) return false;
    const std::string file = Put("file", "one");
    if (mount(nullptr, folder_.path().c_str(), nullptr, MS_REMOUNT | MS_RDONLY, nullptr) != 0) return false;
    for (const absl::Status& status : {fs_.Create(In("a")).status(), fs_.MakeFolder(In("a")), fs_.Rename(file, In("a")),
                                       fs_.RemoveFile(file), fs_.Lock(In("lock")).status()}) {
      EXPECT_EQ(status.code(), kPermissionDenied) << status;
      EXPECT_THAT(std::string(status.message()), AllOf(HasSubstr(folder_.path()), HasSubstr("Read-only")));
    }
    EXPECT_TRUE(fs_.Open(file).ok());
    return true;
  });
  if (!possible) GTEST_SKIP() << "no file system may be mounted";
}

TEST_F(SystemFsTest, AProcessWithoutDescriptorsDoesNotTakeTheDiskForDamaged) {
  const std::string folder = folder_.path(), file = Put("file", "one"), made = In("a"), lock = In("lock");
  Fs& fs = fs_;
  EXPECT_TRUE(fs.Open(file).ok());
  // A sanitizer needs a descriptor to look at an object that it has not seen before: none is new below.
  const bool possible = InChild([&] {
    const rlimit none{0, 0};
    if (setrlimit(RLIMIT_NOFILE, &none) != 0) return false;
    for (const absl::Status& status : {fs.Open(file).status(), fs.Create(made).status(), fs.List(folder).status(),
                                       fs.SyncFolder(folder), fs.Lock(lock).status()}) {
      EXPECT_EQ(status.code(), kUnavailable) << status;
      EXPECT_THAT(std::string(status.message()), AllOf(HasSubstr(folder), HasSubstr("ulimit -n")));
    }
    return true;
  });
  EXPECT_TRUE(possible);
}

TEST_F(SystemFsTest, AFileThatMayNotGrowIsToldAndHasWhatFits) {
  const bool possible = InChild([&] {
    constexpr rlim_t kMost = 6000;
    const rlimit limit{kMost, kMost};
    if (signal(SIGXFSZ, SIG_IGN) == SIG_ERR || setrlimit(RLIMIT_FSIZE, &limit) != 0) return false;
    const AlignedMemory memory = MakeAligned(2 * OutputFile::kDirect);
    // Aligned, so that what fits is not; and not aligned.
    for (const size_t bytes : {2 * OutputFile::kDirect, 2 * OutputFile::kDirect - 1}) {
      const std::string path = In(absl::StrCat(bytes));
      const auto file = fs_.Create(path);
      const absl::Status status = (*file)->Write(0, {memory.get(), bytes});
      EXPECT_EQ(status.code(), kResourceExhausted) << status;
      EXPECT_THAT(std::string(status.message()), HasSubstr(path));
      EXPECT_EQ(ContentOf(path), std::string(kMost, 'x'));
      EXPECT_EQ((*file)->SetSize(kMost + 1).code(), kResourceExhausted);
    }
    return true;
  });
  EXPECT_TRUE(possible);
}

}  // namespace
}  // namespace ballast
