#include <dirent.h>
#include <fcntl.h>
#include <sys/file.h>
#include <sys/stat.h>
#include <sys/statvfs.h>
#include <unistd.h>

#include <algorithm>
#include <atomic>
#include <cerrno>
#include <cstdio>
#include <cstring>
#include <mutex>
#include <optional>
#include <utility>

#include "absl/strings/str_cat.h"

#include "server/base/failpoint.h"
#include "server/base/status_macros.h"
#include "server/storage/fs.h"

namespace ballast {
namespace {

constexpr mode_t kFileMode = 0600, kFolderMode = 0700;

absl::StatusCode CodeOf(int error) {
  switch (error) {
    case ENOENT:
      return absl::StatusCode::kNotFound;
    case EEXIST:
    case ENOTEMPTY:
      return absl::StatusCode::kAlreadyExists;
    case EACCES:
    case EPERM:
    case EROFS:
      return absl::StatusCode::kPermissionDenied;
    case ENOSPC:
    case EDQUOT:
    case EFBIG:
      return absl::StatusCode::kResourceExhausted;
    case ELOOP:  // O_NOFOLLOW
    case ENOTDIR:
    case EISDIR:
      return absl::StatusCode::kFailedPrecondition;
    case EMFILE:  // which say nothing of the disk: what is there must not be taken for damaged
    case ENFILE:
    case ENOMEM:
    case ENOLCK:
      return absl::StatusCode::kUnavailable;
    default:
      return absl::StatusCode::kDataLoss;
  }
}

// "cannot rename FILE: No space left on device"
absl::Status Failure(const char* what, const std::string& path, int error) {
  const char* hint = error == EMFILE ? " (raise the process's limit: ulimit -n, LimitNOFILE)" : "";
  struct stat found {};
  // With O_DIRECTORY a link, too, is no folder.
  const bool may_be_link = error == ELOOP || error == ENOTDIR;
  if (may_be_link && lstat(path.c_str(), &found) == 0 && S_ISLNK(found.st_mode)) hint = " (it is a symbolic link)";
  return absl::Status(CodeOf(error), absl::StrCat("cannot ", what, " ", path, ": ", std::strerror(error), hint));
}

absl::Status Done(int result, const char* what, const std::string& path) {
  return result == 0 ? absl::OkStatus() : Failure(what, path, errno);
}

absl::Status SyncDescriptor(int fd, const char* what, const std::string& path) {
  return LeftOut("fs.sync") ? absl::OkStatus() : Done(fsync(fd), what, path);
}

class Descriptor {
 public:
  explicit Descriptor(int fd) : fd_(fd) {}
  Descriptor(Descriptor&& other) noexcept : fd_(std::exchange(other.fd_, -1)) {}
  ~Descriptor() {
    if (fd_ >= 0) close(fd_);
  }
  int get() const { return fd_; }

 private:
  int fd_;
};

bool IsDirect(uint64_t number) { return number % OutputFile::kDirect == 0; }

// Not every file system takes O_DIRECT, and of those that do, some refuse it at the first write.
class SystemOutputFile final : public OutputFile {
 public:
  SystemOutputFile(Descriptor fd, std::string path) : fd_(std::move(fd)), path_(std::move(path)) {}

  absl::Status Write(uint64_t offset, absl::Span<const std::byte> bytes) override {
    const bool aligned =
        IsDirect(offset) && IsDirect(bytes.size()) && IsDirect(reinterpret_cast<uintptr_t>(bytes.data()));
    TurnDirect(aligned);
    while (!bytes.empty()) {
      const ssize_t written = pwrite(fd_.get(), bytes.data(), bytes.size(), static_cast<off_t>(offset));
      if (written < 0 && errno == EINTR) continue;
      if (written < 0 && errno == EINVAL && direct_) {
        refused_ = true;
        TurnDirect(false);
        continue;
      }
      if (written < 0) return Failure("write", path_, errno);
      if (written == 0) return Failure("write", path_, ENOSPC);
      offset += static_cast<uint64_t>(written);
      bytes.remove_prefix(static_cast<size_t>(written));
      if (!IsDirect(static_cast<uint64_t>(written))) TurnDirect(false);  // the rest is not aligned
    }
    return absl::OkStatus();
  }
  absl::Status SetSize(uint64_t bytes) override {
    return Done(ftruncate(fd_.get(), static_cast<off_t>(bytes)), "set the size of", path_);
  }
  absl::Status Sync() override { return SyncDescriptor(fd_.get(), "sync", path_); }

 private:
  void TurnDirect(bool direct) {
    if (refused_) direct = false;
    if (direct == direct_) return;
    const int flags = fcntl(fd_.get(), F_GETFL);
    if (fcntl(fd_.get(), F_SETFL, direct ? flags | O_DIRECT : flags & ~O_DIRECT) == 0) {
      direct_ = direct;
    } else {
      refused_ = true;
    }
  }

  const Descriptor fd_;
  const std::string path_;
  bool direct_ = false, refused_ = false;
};

class SystemInputFile final : public InputFile {
 public:
  SystemInputFile(Descriptor fd, std::string path, uint64_t bytes)
      : fd_(std::move(fd)), path_(std::move(path)), bytes_(bytes) {}

  uint64_t bytes() const override { return bytes_; }
  absl::Status Read(uint64_t offset, absl::Span<std::byte> to) override {
    while (!to.empty()) {
      const bool aligned = IsDirect(offset) && IsDirect(to.size()) && IsDirect(reinterpret_cast<uintptr_t>(to.data()));
      const int direct = aligned && !refused_ ? Direct() : -1;
      const ssize_t got = pread(direct < 0 ? fd_.get() : direct, to.data(), to.size(), static_cast<off_t>(offset));
      if (got < 0 && errno == EINTR) continue;
      if (got < 0 && errno == EINVAL && direct >= 0) {
        refused_ = true;
        continue;
      }
      if (got < 0) return Failure("read", path_, errno);
      if (got == 0) return absl::DataLossError(absl::StrCat(path_, " ends at byte ", offset));
      offset += static_cast<uint64_t>(got);
      to.remove_prefix(static_cast<size_t>(got));
    }
    return absl::OkStatus();
  }

 private:
  // A descriptor of the same file that passes the page cache; -1: there can be none.
  int Direct() {
    std::call_once(opened_direct_, [this] {
      const std::string same = absl::StrCat("/proc/self/fd/", fd_.get());
      direct_.emplace(open(same.c_str(), O_RDONLY | O_CLOEXEC | O_DIRECT));
    });
    return direct_->get();
  }

  const Descriptor fd_;
  const std::string path_;
  const uint64_t bytes_;
  std::once_flag opened_direct_;
  std::optional<Descriptor> direct_;
  std::atomic<bool> refused_ = false;  // by the file system, at a read
};

std::string FolderOfLock(const std::string& path) {
  const size_t slash = path.rfind('/');
  return slash == std::string::npos ? "." : path.substr(0, std::max<size_t>(slash, 1));
}

// Whether the path leads to what is open.
absl::Status CheckLeadsTo(const Descriptor& fd, const std::string& path) {
  struct stat held {
  }, found{};
  if (fstat(fd.get(), &held) != 0 || stat(path.c_str(), &found) != 0) return Failure("look at", path, errno);
  if (held.st_dev == found.st_dev && held.st_ino == found.st_ino) return absl::OkStatus();
  return absl::FailedPreconditionError(absl::StrCat(path, " is not what this process has locked"));
}

// The folder that the file lies in is locked as well, for the file may have been removed under the daemon that has it. Not
// every file system, NFS for one, locks folders: there the file's lock stands alone.
struct LockedFolder {
  Descriptor fd;
  bool is_locked = false;
};

absl::StatusOr<LockedFolder> LockFolderOf(const std::string& path) {
  const std::string folder = FolderOfLock(path);
  Descriptor fd(open(folder.c_str(), O_RDONLY | O_DIRECTORY | O_CLOEXEC));
  if (fd.get() < 0) return Failure("open the folder", folder, errno);
  const bool is_locked = flock(fd.get(), LOCK_EX | LOCK_NB) == 0;
  if (is_locked || errno != EWOULDBLOCK) return LockedFolder{std::move(fd), is_locked};
  return absl::UnavailableError(absl::StrCat(folder, " is held by another daemon, whose ",
                                             path.substr(path.rfind('/') + 1),
                                             " was removed; stop it, or give each its own folder"));
}

class SystemLock final : public FolderLock {
 public:
  SystemLock(Descriptor file, LockedFolder folder, std::string path)
      : file_(std::move(file)), folder_(std::move(folder)), path_(std::move(path)) {}

  absl::Status CheckPlace() const override {
    const absl::Status file = folder_.is_locked ? absl::OkStatus() : CheckLeadsTo(file_, path_);
    return file.ok() || absl::IsNotFound(file) ? CheckLeadsTo(folder_.fd, FolderOfLock(path_)) : file;
  }

 private:
  const Descriptor file_;
  const LockedFolder folder_;
  const std::string path_;
};

// Adds the entry, unless somebody has removed it in the meantime. 0, or the error.
int AddEntry(int folder, const char* name, std::vector<Fs::Entry>* entries) {
  struct stat found {};
  if (fstatat(folder, name, &found, AT_SYMLINK_NOFOLLOW) != 0) return errno == ENOENT ? 0 : errno;
  const Fs::Kind kind = S_ISREG(found.st_mode)   ? Fs::Kind::kFile
                        : S_ISDIR(found.st_mode) ? Fs::Kind::kFolder
                                                 : Fs::Kind::kOther;
  entries->push_back({name, kind});
  return 0;
}

class System final : public Fs {
 public:
  absl::StatusOr<std::unique_ptr<OutputFile>> Create(const std::string& path) override {
    Descriptor fd(open(path.c_str(), O_WRONLY | O_CREAT | O_EXCL | O_CLOEXEC | O_NOFOLLOW, kFileMode));
    if (fd.get() < 0) return Failure("create", path, errno);
    return std::make_unique<SystemOutputFile>(std::move(fd), path);
  }
  absl::StatusOr<std::unique_ptr<InputFile>> Open(const std::string& path) override {
    // Not waiting for somebody to write, where it is a pipe.
    Descriptor fd(open(path.c_str(), O_RDONLY | O_CLOEXEC | O_NOFOLLOW | O_NONBLOCK));
    if (fd.get() < 0) return Failure("open", path, errno);
    struct stat found {};
    if (fstat(fd.get(), &found) != 0) return Failure("look at", path, errno);
    if (!S_ISREG(found.st_mode)) return absl::FailedPreconditionError(absl::StrCat(path, " is no ordinary file"));
    return std::make_unique<SystemInputFile>(std::move(fd), path, static_cast<uint64_t>(found.st_size));
  }
  absl::Status MakeFolder(const std::string& path) override {
    return Done(mkdir(path.c_str(), kFolderMode), "make the folder", path);
  }
  absl::StatusOr<std::vector<Entry>> List(const std::string& path) override;
  absl::Status Rename(const std::string& from, const std::string& to) override {
    // Nobody else writes here while the folder is locked; renameat2 would say the same of two daemons that do.
    if (renameat2(AT_FDCWD, from.c_str(), AT_FDCWD, to.c_str(), RENAME_NOREPLACE) == 0) return absl::OkStatus();
    if (errno != EINVAL && errno != ENOSYS) return Failure("rename", absl::StrCat(from, " to ", to), errno);
    struct stat found {};
    if (lstat(to.c_str(), &found) == 0) return Failure("rename", absl::StrCat(from, " to ", to), EEXIST);
    if (errno != ENOENT) return Failure("rename", absl::StrCat(from, " to ", to), errno);
    return Done(rename(from.c_str(), to.c_str()), "rename", absl::StrCat(from, " to ", to));
  }
  absl::Status RemoveFile(const std::string& path) override { return Done(unlink(path.c_str()), "remove", path); }
  absl::Status RemoveFolder(const std::string& path) override {
    return Done(rmdir(path.c_str()), "remove the folder", path);
  }
  absl::Status SyncFolder(const std::string& path) override {
    const Descriptor fd(open(path.c_str(), O_RDONLY | O_DIRECTORY | O_CLOEXEC | O_NOFOLLOW));
    if (fd.get() < 0) return Failure("open the folder", path, errno);
    return SyncDescriptor(fd.get(), "sync the folder", path);
  }
  absl::StatusOr<Space> SpaceOf(const std::string& path) override {
    struct statvfs found {};
    if (statvfs(path.c_str(), &found) != 0) return Failure("ask the space of", path, errno);
    return Space{.free_bytes = found.f_bavail * found.f_frsize, .size_bytes = found.f_blocks * found.f_frsize};
  }
  absl::StatusOr<std::unique_ptr<FolderLock>> Lock(const std::string& path) override;
};

absl::StatusOr<std::vector<Fs::Entry>> System::List(const std::string& path) {
  const int fd = open(path.c_str(), O_RDONLY | O_DIRECTORY | O_CLOEXEC | O_NOFOLLOW);
  if (fd < 0) return Failure("list", path, errno);
  DIR* const folder = fdopendir(fd);
  if (folder == nullptr) {
    const int error = errno;
    close(fd);
    return Failure("list", path, error);
  }
  std::vector<Entry> entries;
  int error = 0;
  while (error == 0) {
    errno = 0;
    const dirent* const entry = readdir(folder);
    if (entry == nullptr) {
      error = errno;
      break;
    }
    const std::string name = entry->d_name;
    if (name != "." && name != "..") error = AddEntry(dirfd(folder), entry->d_name, &entries);
  }
  closedir(folder);
  if (error != 0) return Failure("list", path, error);
  std::sort(entries.begin(), entries.end(), [](const Entry& a, const Entry& b) { return a.name < b.name; });
  return entries;
}

absl::StatusOr<std::unique_ptr<FolderLock>> System::Lock(const std::string& path) {
  Descriptor fd(open(path.c_str(), O_RDWR | O_CREAT | O_CLOEXEC | O_NOFOLLOW, kFileMode));
  if (fd.get() < 0) return Failure("open", path, errno);
  char owner[32] = {};
  if (flock(fd.get(), LOCK_EX | LOCK_NB) != 0) {
    if (errno != EWOULDBLOCK) return Failure("lock", path, errno);
    const ssize_t got = pread(fd.get(), owner, sizeof owner - 1, 0);
    return absl::UnavailableError(absl::StrCat(path, " is held by another daemon",
                                               got > 0 ? absl::StrCat(", process ", owner) : std::string(),
                                               "; stop it, or give each its own folder"));
  }
  ASSIGN_OR_RETURN(LockedFolder folder, LockFolderOf(path));
  const int length = std::snprintf(owner, sizeof owner, "%d", static_cast<int>(getpid()));
  // For people: nothing depends on it.
  if (ftruncate(fd.get(), 0) == 0) (void)!pwrite(fd.get(), owner, static_cast<size_t>(length), 0);
  return std::make_unique<SystemLock>(std::move(fd), std::move(folder), path);
}

}  // namespace

Fs* SystemFs() {
  static System fs;
  return &fs;
}

}  // namespace ballast
