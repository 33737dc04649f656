#include "client/cpp/ctl/followed_files.h"

#include <fcntl.h>
#include <unistd.h>

#include <algorithm>
#include <cerrno>
#include <cstring>
#include <map>
#include <system_error>
#include <utility>
#include <vector>

#include "absl/cleanup/cleanup.h"
#include "absl/strings/str_cat.h"
#include "proto/checkpoint/safetensors_header.h"

#include "client/cpp/ctl/safetensors_file.h"

namespace ballast::ctl {
namespace {

namespace fs = std::filesystem;

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

uint64_t TensorBytes(const v1::TensorSpec& tensor) {
  uint64_t bytes = DtypeBytes(FileDtypeOf(tensor.dtype()));
  for (const int64_t extent : tensor.shape()) bytes *= static_cast<uint64_t>(extent);
  return bytes;
}

absl::StatusOr<std::string> HeaderOf(const v1::RunSpec& spec, const FollowedVersion& version) {
  SafetensorsHeader header(
      {{"run", spec.run_id()}, {"step", absl::StrCat(version.step)}, {"generation", absl::StrCat(version.generation)}});
  for (const v1::TensorSpec& tensor : spec.tensors()) {
    if (tensor.name() == kReservedTensorName) {
      return absl::FailedPreconditionError(absl::StrCat("run '", spec.run_id(), "' has a tensor named '", tensor.name(),
                                                        "', which no tensor of a safetensors file can be named"));
    }
    const std::vector<uint64_t> shape(tensor.shape().begin(), tensor.shape().end());
    header.Add(tensor.name(), FileDtypeOf(tensor.dtype()), shape, TensorBytes(tensor));
  }
  return std::move(header).Finish();
}

absl::Status WriteWeights(int fd, const fs::path& path, const Subscriber& subscriber, const std::string& header) {
  const auto begin = absl::MakeConstSpan(reinterpret_cast<const std::byte*>(header.data()), header.size());
  if (auto s = WriteAll(fd, path, begin); !s.ok()) return s;
  std::vector<std::byte> weights;
  for (int i = 0; i < subscriber.spec().tensors_size(); ++i) {
    weights.resize(TensorBytes(subscriber.spec().tensors(i)));
    if (auto s = subscriber.Read(static_cast<uint32_t>(i), absl::MakeSpan(weights)); !s.ok()) return s;
    if (auto s = WriteAll(fd, path, weights); !s.ok()) return s;
  }
  return fsync(fd) == 0 ? absl::OkStatus() : Unwritable(path, std::strerror(errno));
}

// So that a rename in it survives a crash of the machine.
absl::Status SyncFolder(const fs::path& folder) {
  const int fd = open(folder.c_str(), O_RDONLY | O_DIRECTORY | O_CLOEXEC);
  if (fd < 0) return Unwritable(folder, std::strerror(errno));
  const absl::Cleanup closed = [fd] { close(fd); };
  return fsync(fd) == 0 ? absl::OkStatus() : Unwritable(folder, std::strerror(errno));
}

}  // namespace

absl::StatusOr<FollowedFiles> FollowedFiles::Open(const std::string& folder, const std::string& run, uint64_t retain) {
  std::error_code error;
  fs::create_directories(folder, error);
  if (error) return Unwritable(folder, error.message());
  if (access(folder.c_str(), W_OK | X_OK) != 0) return Unwritable(folder, std::strerror(errno));
  return FollowedFiles(folder, run, retain);
}

absl::StatusOr<fs::path> FollowedFiles::Write(const Subscriber& subscriber, const FollowedVersion& version) const {
  const auto header = HeaderOf(subscriber.spec(), version);
  if (!header.ok()) return header.status();
  const fs::path path = folder_ / absl::StrCat("step-", version.step, ".safetensors");
  const fs::path part = folder_ / absl::StrCat(".step-", version.step, ".", getpid(), ".part");
  const int fd = open(part.c_str(), O_WRONLY | O_CREAT | O_TRUNC | O_CLOEXEC, 0666);
  if (fd < 0) return Unwritable(part, std::strerror(errno));
  absl::Cleanup removed = [&] { unlink(part.c_str()); };
  const absl::Status written = WriteWeights(fd, part, subscriber, *header);
  if (close(fd) != 0 && written.ok()) return Unwritable(part, std::strerror(errno));
  if (!written.ok()) return written;
  if (rename(part.c_str(), path.c_str()) != 0) return Unwritable(path, std::strerror(errno));
  std::move(removed).Cancel();
  if (auto s = SyncFolder(folder_); !s.ok()) return s;
  if (auto s = RemoveBefore(path); !s.ok()) return s;
  return path;
}

// After a rewind the newest is not the one of the highest step, and files' times may be the same. Files of other runs stay.
absl::Status FollowedFiles::RemoveBefore(const fs::path& newest) const {
  std::vector<std::pair<fs::file_time_type, fs::path>> files;
  std::error_code error;
  for (const fs::directory_entry& entry : fs::directory_iterator(folder_, error)) {
    const std::string name = entry.path().filename().string();
    if (!name.starts_with("step-") || !name.ends_with(".safetensors") || entry.path() == newest) continue;
    const auto file = SafetensorsFile::Open(entry.path().string());
    if (!file.ok()) continue;
    const auto run = file->metadata().find("run");
    if (run == file->metadata().end() || run->second != run_) continue;
    if (const auto time = entry.last_write_time(error); !error) files.emplace_back(time, entry.path());
  }
  if (error) return Unwritable(folder_, error.message());
  std::sort(files.rbegin(), files.rend());
  for (size_t i = retain_ - 1; i < files.size(); ++i) {
    if (!fs::remove(files[i].second, error) && error) return Unwritable(files[i].second, error.message());
  }
  return absl::OkStatus();
}

}  // namespace ballast::ctl
