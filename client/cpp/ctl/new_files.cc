#include "client/cpp/ctl/new_files.h"

#include <fcntl.h>
#include <unistd.h>

#include <cerrno>
#include <cstring>
#include <string_view>
#include <system_error>

#include "absl/strings/str_cat.h"

namespace ballast::ctl {
namespace {

namespace fs = std::filesystem;

absl::Status CannotWrite(const fs::path& path, const std::string& why) {
  return absl::FailedPreconditionError(absl::StrCat(path.string(), ": ", why, "; give --out another folder"));
}

// errno, or 0.
int WriteAndSync(int fd, std::string_view text) {
  while (!text.empty()) {
    const ssize_t written = write(fd, text.data(), text.size());
    if (written < 0 && errno == EINTR) continue;
    if (written < 0) return errno;
    text.remove_prefix(static_cast<size_t>(written));
  }
  return fsync(fd) == 0 ? 0 : errno;
}

// There whole, or not at all.
absl::Status Write(const fs::path& path, const NewFile& file) {
  const int fd = open(path.c_str(), O_WRONLY | O_CREAT | O_EXCL | O_CLOEXEC, file.mode);
  if (fd < 0) return CannotWrite(path, std::strerror(errno));
  int error = WriteAndSync(fd, file.text);
  if (close(fd) != 0 && error == 0) error = errno;
  if (error == 0) return absl::OkStatus();
  unlink(path.c_str());
  return CannotWrite(path, std::strerror(error));
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
  for (size_t made = 0; made < files.size(); ++made) {
    const absl::Status written = Write(folder / files[made].name, files[made]);
    if (written.ok()) continue;
    while (made-- > 0) unlink((folder / files[made].name).c_str());  // they would be in the way of the next attempt
    return written;
  }
  return absl::OkStatus();
}

}  // namespace ballast::ctl
