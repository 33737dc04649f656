#include "client/cpp/ctl/followed_files.h"

#include <fcntl.h>
#include <signal.h>
#include <sys/file.h>
#include <unistd.h>

#include <algorithm>
#include <cerrno>
#include <cstring>
#include <iterator>
#include <system_error>
#include <utility>
#include <vector>

#include "absl/cleanup/cleanup.h"
#include "absl/strings/numbers.h"
#include "absl/strings/str_cat.h"

#include "client/cpp/ctl/safetensors_file.h"

namespace ballast::ctl {
namespace {

namespace fs = std::filesystem;

constexpr char kPart[] = ".part";

absl::Status Unwritable(const fs::path& path, const std::string& why) {
  return absl::FailedPreconditionError(absl::StrCat(path.string(), ": ", why));
}

absl::Status WriteAll(int fd, const fs::path& path, absl::Span<const std::byte> bytes) {
  while (!bytes.empty()) {
    const ssize_t written = write(fd, bytes.data(), bytes.size());
    if (written < 0 && errno == EINTR) continue;
    if (written < 0) return Unwritable(path, std::strerror(errno));
    bytes.remove_prefix(static_cast<size_t>(written));
  }
  return absl::OkStatus();
}

// So that a rename in it survives a crash of the machine.
absl::Status SyncFolder(const fs::path& folder) {
  const int fd = open(folder.c_str(), O_RDONLY | O_DIRECTORY | O_CLOEXEC);
  if (fd < 0) return Unwritable(folder, std::strerror(errno));
  const absl::Cleanup closed = [fd] { close(fd); };
  return fsync(fd) == 0 ? absl::OkStatus() : Unwritable(folder, std::strerror(errno));
}

// Whoever writes a part holds it locked. The number of its process is not enough: it may be of another container, or have
// been given to this process anew.
bool IsLeftPart(const fs::path& path) {
  const std::string name = path.filename().string();
  if (!name.starts_with(".step-") || !name.ends_with(kPart)) return false;
  const std::string stem = path.stem().string();
  pid_t writer = 0;
  if (!absl::SimpleAtoi(stem.substr(stem.rfind('.') + 1), &writer) || writer <= 0) return false;
  if (writer != getpid() && !(kill(writer, 0) != 0 && errno == ESRCH)) return false;
  const int fd = open(path.c_str(), O_RDONLY | O_CLOEXEC | O_NOFOLLOW);
  if (fd < 0) return false;
  const absl::Cleanup closed = [fd] { close(fd); };
  return flock(fd, LOCK_EX | LOCK_NB) == 0;
}

// Of those that were ended in the middle of one. What cannot be removed stays, and does no harm.
void RemoveLeftParts(const fs::path& folder) {
  std::error_code error;
  for (const fs::directory_entry& entry : fs::directory_iterator(folder, error)) {
    if (IsLeftPart(entry.path())) unlink(entry.path().c_str());
  }
}

// Ctrl-C, or a supervisor's SIGTERM, that comes meanwhile takes the part along; then the process ends by it as it would.
// A signal that is ignored, as under nohup, stays so. One at a time in a process.
class RemovedBySignals {
 public:
  explicit RemovedBySignals(const fs::path& part) {
    if (part.native().size() >= sizeof part_) return;
    std::strcpy(part_, part.c_str());
    struct sigaction removing {};
    removing.sa_handler = [](int signal) {
      unlink(part_);
      raise(signal);
    };
    removing.sa_flags = static_cast<int>(SA_RESETHAND);
    for (size_t i = 0; i < std::size(kSignals); ++i) {
      sigaction(kSignals[i], nullptr, &before_[i]);
      if (before_[i].sa_handler == SIG_DFL) sigaction(kSignals[i], &removing, nullptr);
    }
    installed_ = true;
  }
  ~RemovedBySignals() {
    for (size_t i = 0; installed_ && i < std::size(kSignals); ++i) sigaction(kSignals[i], &before_[i], nullptr);
  }
  RemovedBySignals(const RemovedBySignals&) = delete;
  RemovedBySignals& operator=(const RemovedBySignals&) = delete;

 private:
  static constexpr int kSignals[] = {SIGINT, SIGTERM, SIGHUP};
  static inline char part_[4096];
  struct sigaction before_[std::size(kSignals)] = {};
  bool installed_ = false;
};

}  // namespace

absl::StatusOr<FollowedFiles> FollowedFiles::Open(const std::string& folder, const std::string& run, Kept kept) {
  std::error_code error;
  fs::create_directories(folder, error);
  if (error) return Unwritable(folder, error.message());
  if (access(folder.c_str(), W_OK | X_OK) != 0) return Unwritable(folder, std::strerror(errno));
  RemoveLeftParts(folder);
  FollowedFiles files(folder, kept);
  if (auto s = files.Look(run); !s.ok()) return s;
  return files;
}

absl::Status FollowedFiles::Look(const std::string& run) {
  std::vector<std::pair<fs::file_time_type, Known>> files;
  std::error_code error;
  for (const fs::directory_entry& entry : fs::directory_iterator(folder_, error)) {
    const std::string name = entry.path().filename().string();
    if (!name.starts_with("step-") || !name.ends_with(".safetensors")) continue;
    const auto file = SafetensorsFile::Open(entry.path().string());
    if (!file.ok()) continue;
    const auto of = file->metadata().find("run");
    if (of == file->metadata().end() || of->second != run) continue;
    const bool whole = file->metadata().count("base_step") == 0;
    if (const auto time = entry.last_write_time(error); !error) files.push_back({time, {entry.path(), whole}});
  }
  if (error) return Unwritable(folder_, error.message());
  std::stable_sort(files.begin(), files.end(), [](const auto& a, const auto& b) { return a.first < b.first; });
  for (auto& [time, known] : files) known_.push_back(std::move(known));
  return absl::OkStatus();
}

absl::StatusOr<std::pair<VersionFile, bool>> FollowedFiles::FileOf(const Subscriber& subscriber,
                                                                   const FollowedVersion& version) const {
  auto whole = VersionFile::Whole(subscriber, version);
  if (!whole.ok()) return whole.status();
  if (!last_ || !version.base_step || version.respecified || since_whole_ >= kept_.changes) {
    return std::pair(*std::move(whole), true);
  }
  auto changes = VersionFile::Changes(subscriber, version, *last_);
  if (!changes.ok()) return changes.status();
  if (changes->bytes() >= whole->bytes()) return std::pair(*std::move(whole), true);
  return std::pair(*std::move(changes), false);
}

absl::StatusOr<fs::path> FollowedFiles::Write(const Subscriber& subscriber, const FollowedVersion& version) {
  const auto file = FileOf(subscriber, version);
  if (!file.ok()) return file.status();
  const auto& [content, whole] = *file;
  const fs::path path = folder_ / absl::StrCat("step-", version.step, whole ? "" : ".changes", ".safetensors");
  if (auto s = Put(content, path); !s.ok()) return s;
  std::erase_if(known_, [&](const Known& known) { return known.path == path; });
  known_.push_back({path, whole});
  last_ = version;
  since_whole_ = whole ? 0 : since_whole_ + 1;
  if (auto s = RemoveOld(); !s.ok()) return s;
  return path;
}

absl::Status FollowedFiles::Put(const VersionFile& file, const fs::path& path) const {
  const fs::path part = folder_ / absl::StrCat(".", path.stem().string(), ".", getpid(), kPart);
  const RemovedBySignals removed_by_signals(part);
  const int fd = open(part.c_str(), O_WRONLY | O_CREAT | O_TRUNC | O_CLOEXEC, 0666);
  if (fd < 0) return Unwritable(part, std::strerror(errno));
  flock(fd, LOCK_EX | LOCK_NB);  // where there are no locks, a part that is left stays
  absl::Cleanup removed = [&] { unlink(part.c_str()); };
  absl::Status written = file.Write([&](absl::Span<const std::byte> bytes) { return WriteAll(fd, part, bytes); });
  if (written.ok() && fsync(fd) != 0) written = Unwritable(part, std::strerror(errno));
  if (close(fd) != 0 && written.ok()) return Unwritable(part, std::strerror(errno));
  if (!written.ok()) return written;
  if (rename(part.c_str(), path.c_str()) != 0) return Unwritable(path, std::strerror(errno));
  std::move(removed).Cancel();
  return SyncFolder(folder_);
}

// After a rewind the newest is not the one of the highest step.
absl::Status FollowedFiles::RemoveOld() {
  auto oldest_kept = known_.end();
  for (uint64_t whole = 0; oldest_kept != known_.begin() && whole < kept_.retain;) whole += (--oldest_kept)->whole;
  std::error_code error;
  for (auto old = known_.begin(); old != oldest_kept; ++old) {
    if (!fs::remove(old->path, error) && error) return Unwritable(old->path, error.message());
  }
  known_.erase(known_.begin(), oldest_kept);
  return absl::OkStatus();
}

}  // namespace ballast::ctl
