#include "client/cpp/ctl/new_files.h"

#include <fcntl.h>
#include <unistd.h>

#include <cerrno>
#include <cstring>
#include <system_error>

#include "absl/cleanup/cleanup.h"
#include "absl/strings/str_cat.h"

namespace ballast::ctl {
namespace {

namespace fs = std::filesystem;

absl::Status CannotWrite(const fs::path& path, const std::string& why) {
  return absl::FailedPreconditionError(absl::StrCat(path.string(), ": ", why, "; give --out another folder"));
}

absl::Status Write(const fs::path& path, const NewFile& file) {
  const int fd = open(path.c_str(), O_WRONLY | O_CREAT | O_EXCL | O_CLOEXEC, file.mode);
  if (fd < 0) return CannotWrite(path, std::strerror(errno));
  const absl::Cleanup closed = [fd] { close(fd); };
  const bool whole = write(fd, file.text.data(), file.text.size()) == static_cast<ssize_t>(file.text.size());
  return whole && fsync(fd) == 0 ? absl::OkStatus() : CannotWrite(path, std::strerror(errno));
}

}  // namespace

absl::Status WriteNewFiles(const fs::path& folder, const std::vector<NewFile>& files) {
  std::error_code error;
  for (const NewFile& file : files) {
    if (!fs::exists(fs::symlink_status(folder / file.name, error))) continue;
    return CannotWrite(folder / file.name,
                       "is there already, and is not overwritten: what it was made for may need it");
  }
  if (fs::create_directories(folder, error)) fs::permissions(folder, fs::perms::owner_all, error);
  if (error) return CannotWrite(folder, error.message());
  for (const NewFile& file : files) {
    if (auto s = Write(folder / file.name, file); !s.ok()) return s;
  }
  return absl::OkStatus();
}

}  // namespace ballast::ctl
