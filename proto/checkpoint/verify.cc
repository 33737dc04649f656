#include "proto/checkpoint/verify.h"

#include <algorithm>
#include <cerrno>
#include <cstring>
#include <filesystem>
#include <fstream>
#include <optional>
#include <system_error>
#include <utility>

#include "absl/strings/match.h"
#include "absl/strings/numbers.h"
#include "absl/strings/str_cat.h"
#include "absl/strings/strip.h"
#include "proto/checkpoint/file_digest.h"
#include "proto/checkpoint/manifest.h"
#include "proto/checkpoint/meaning.h"

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

absl::StatusOr<v1::CheckpointFile> DigestOfFile(const fs::path& path, const std::function<bool()>& wanted) {
  if (!IsPlainFile(path)) return Damaged(path, "it is missing, or no ordinary file");
  std::ifstream file(path, std::ios::binary);
  if (!file)
    return absl::PermissionDeniedError(absl::StrCat("cannot open ", path.string(), ": ", std::strerror(errno)));
  FileDigest digest;
  std::string block(kReadBytes, '\0');
  while (file) {
    if (wanted && !wanted()) return absl::CancelledError(absl::StrCat(path.string(), " is not wanted any more"));
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
  if (const uint64_t bytes = fs::file_size(path); bytes > kMostManifestBytes) {
    return Damaged(path, absl::StrCat("it has ", bytes, " bytes"));
  }
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

// "000000000007-step-120", or one that was set aside; its step.
std::optional<uint64_t> StepInName(const fs::path& folder) {
  const std::string text = folder.filename().string();
  absl::string_view name = text;
  absl::ConsumePrefix(&name, "discarded-");
  const size_t middle = name.find("-step-");
  uint64_t number = 0, step = 0;
  const bool parsed = middle != absl::string_view::npos && middle >= 12 &&
                      absl::SimpleAtoi(name.substr(0, middle), &number) &&
                      absl::SimpleAtoi(name.substr(middle + 6), &step);
  return parsed ? std::optional(step) : std::nullopt;
}

// One that has lost its manifest is one all the same, and damaged: its name says what it was.
bool IsCheckpoint(const fs::path& folder) {
  std::error_code error;
  return StepInName(folder) || fs::exists(Within(folder, kManifestName), error) ||
         fs::exists(Within(folder, kSumsName), error);
}

// What the bytes say, which are as they were written.
absl::Status CheckFit(const fs::path& folder, const v1::CheckpointManifest& manifest) {
  if (const auto step = StepInName(folder); step && *step != manifest.step()) {
    return absl::DataLossError(absl::StrCat(folder.string(), " has the name of step ", *step, ", and is of step ",
                                            manifest.step(), ": give it its name back"));
  }
  return CheckMeaning(folder.string(), manifest);
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
    // A link that has a checkpoint's name is looked at, to be told of: a daemon follows none.
    const bool named = StepInName(entry.path()).has_value();
    if (named || fs::is_directory(entry.symlink_status())) AddFolders(entry.path(), depth - 1, folders);
  }
}

}  // namespace

absl::Status VerifyCheckpoint(const std::string& folder, std::vector<std::string>* said,
                              const std::function<bool()>& wanted) try {
  const fs::path path(folder);
  if (StepInName(path) && !fs::is_directory(fs::symlink_status(path))) {
    return Damaged(path, "it is no folder; a daemon follows no symbolic link, and passes it over");
  }
  const absl::StatusOr<std::string> manifest_text = ReadText(Within(path, kManifestName));
  if (!manifest_text.ok()) return manifest_text.status();
  const absl::StatusOr<std::string> sums_text = ReadText(Within(path, kSumsName));
  if (!sums_text.ok()) return sums_text.status();
  const auto manifest = ReadManifest(*manifest_text, *sums_text, folder);
  if (!manifest.ok()) return manifest.status();
  absl::Status first = CheckNoOthers(path, *manifest);
  uint64_t bytes = 0;
  for (const v1::CheckpointFile& file : manifest->files()) {
    const auto found = DigestOfFile(path / file.name(), wanted);
    if (absl::IsCancelled(found.status())) return found.status();
    absl::Status status = found.status();
    if (status.ok()) {
      const std::string difference = DifferenceOf(*found, file);
      if (!difference.empty()) status = Damaged(path / file.name(), difference);
    }
    bytes += file.bytes();
    if (!status.ok()) said->push_back(std::string(status.message()));
    first.Update(status);
  }
  if (first.ok()) {
    first = CheckFit(path, *manifest);
    if (!first.ok()) said->push_back(std::string(first.message()));
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
