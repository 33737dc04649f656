#include "proto/checkpoint/verify.h"

#include <algorithm>
#include <cerrno>
#include <cstring>
#include <filesystem>
#include <fstream>
#include <system_error>
#include <utility>

#include "absl/strings/match.h"
#include "absl/strings/str_cat.h"
#include "proto/checkpoint/file_digest.h"
#include "proto/checkpoint/manifest.h"

namespace ballast {
namespace {

namespace fs = std::filesystem;

constexpr size_t kReadBytes = size_t{4} << 20;

absl::Status Damaged(const fs::path& path, const std::string& how) {
  return absl::DataLossError(absl::StrCat(path.string(), " is damaged: ", how));
}

fs::path Within(const fs::path& folder, absl::string_view name) { return folder / std::string(name); }

// An ordinary file, and not by way of a link.
bool IsPlainFile(const fs::path& path) {
  std::error_code error;
  return fs::is_regular_file(fs::symlink_status(path, error));
}

absl::StatusOr<v1::CheckpointFile> DigestOfFile(const fs::path& path) {
  if (!IsPlainFile(path)) return Damaged(path, "it is missing, or no ordinary file");
  std::ifstream file(path, std::ios::binary);
  if (!file)
    return absl::PermissionDeniedError(absl::StrCat("cannot open ", path.string(), ": ", std::strerror(errno)));
  FileDigest digest;
  std::string block(kReadBytes, '\0');
  while (file) {
    file.read(block.data(), static_cast<std::streamsize>(block.size()));
    digest.Add({reinterpret_cast<const std::byte*>(block.data()), static_cast<size_t>(file.gcount())});
  }
  if (file.bad()) return Damaged(path, "it cannot be read to its end");
  return digest.Finish(path.filename().string());
}

// Where it differs; empty: nowhere.
std::string DifferenceOf(const v1::CheckpointFile& found, const v1::CheckpointFile& wanted) {
  if (found.bytes() != wanted.bytes()) {
    return absl::StrCat("it has ", found.bytes(), " bytes, and had ", wanted.bytes());
  }
  for (int mib = 0; mib < wanted.crc32c_size(); ++mib) {
    if (found.crc32c(mib) != wanted.crc32c(mib)) {
      return absl::StrCat("MiB ", mib, " of it has not the checksum that the manifest says");
    }
  }
  return found.sha256() == wanted.sha256() ? "" : "its SHA-256 is not what the manifest says";
}

absl::StatusOr<std::string> ReadText(const fs::path& path) {
  if (!IsPlainFile(path)) return Damaged(path, "it is missing, or no ordinary file");
  std::ifstream file(path, std::ios::binary);
  if (!file)
    return absl::PermissionDeniedError(absl::StrCat("cannot open ", path.string(), ": ", std::strerror(errno)));
  return std::string(std::istreambuf_iterator<char>(file), {});
}

// Names in the folder that the manifest does not have.
absl::Status CheckNoOthers(const fs::path& folder, const v1::CheckpointManifest& manifest) {
  for (const auto& entry : fs::directory_iterator(folder)) {
    const std::string name = entry.path().filename().string();
    if (name == kManifestName || name == kSumsName || FindFile(manifest, name) != nullptr) continue;
    return absl::DataLossError(absl::StrCat(entry.path().string(), " is no file of this checkpoint; move it away"));
  }
  return absl::OkStatus();
}

bool IsCheckpoint(const fs::path& folder) {
  std::error_code error;
  return fs::exists(Within(folder, kManifestName), error) || fs::exists(Within(folder, kSumsName), error);
}

bool IsUnpublished(const fs::path& folder) {
  const std::string name = folder.filename().string();
  return absl::StartsWith(name, "writing-") || absl::StartsWith(name, "deleting-") ||
         absl::StartsWith(name, ".removed-");
}

void AddFolders(const fs::path& dir, int depth, std::vector<std::string>* folders) {
  if (IsUnpublished(dir)) return;
  if (IsCheckpoint(dir)) return folders->push_back(dir.string());
  if (depth == 0) return;
  for (const auto& entry : fs::directory_iterator(dir)) {
    if (fs::is_directory(entry.symlink_status())) AddFolders(entry.path(), depth - 1, folders);
  }
}

}  // namespace

absl::Status VerifyCheckpoint(const std::string& folder, std::vector<std::string>* said) try {
  const fs::path path(folder);
  const absl::StatusOr<std::string> manifest_text = ReadText(Within(path, kManifestName));
  if (!manifest_text.ok()) return manifest_text.status();
  const absl::StatusOr<std::string> sums_text = ReadText(Within(path, kSumsName));
  if (!sums_text.ok()) return sums_text.status();
  const auto manifest = ReadManifest(*manifest_text, *sums_text, folder);
  if (!manifest.ok()) return manifest.status();
  absl::Status first = CheckNoOthers(path, *manifest);
  uint64_t bytes = 0;
  for (const v1::CheckpointFile& wanted : manifest->files()) {
    const auto found = DigestOfFile(path / wanted.name());
    absl::Status status = found.status();
    if (status.ok()) {
      const std::string difference = DifferenceOf(*found, wanted);
      if (!difference.empty()) status = Damaged(path / wanted.name(), difference);
    }
    bytes += wanted.bytes();
    if (!status.ok()) said->push_back(std::string(status.message()));
    first.Update(status);
  }
  said->push_back(absl::StrCat("run ", manifest->run_id(), ", step ", manifest->step(), ", ", manifest->files_size(),
                               " files, ", bytes, " bytes, written ", manifest->written_at(), " by ballastd ",
                               manifest->version()));
  return first;
} catch (const fs::filesystem_error& error) {
  return absl::DataLossError(absl::StrCat(folder, " cannot be read: ", error.what()));
}

absl::StatusOr<std::vector<std::string>> CheckpointFoldersIn(const std::string& dir) try {
  std::error_code error;
  if (!fs::is_directory(dir, error)) {
    return absl::NotFoundError(absl::StrCat(dir, " is no folder", error ? ": " + error.message() : ""));
  }
  std::vector<std::string> folders;
  constexpr int kDepth = 3;  // runs, a run, a checkpoint
  AddFolders(dir, kDepth, &folders);
  std::sort(folders.begin(), folders.end());
  return folders;
} catch (const fs::filesystem_error& error) {
  return absl::PermissionDeniedError(absl::StrCat(dir, " cannot be read: ", error.what()));
}

}  // namespace ballast
