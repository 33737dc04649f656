#include "server/storage/tag_files.h"

#include <map>
#include <utility>

#include "absl/algorithm/container.h"
#include "absl/strings/ascii.h"
#include "absl/strings/numbers.h"
#include "absl/strings/str_cat.h"
#include "absl/strings/strip.h"

#include "server/base/status_macros.h"

namespace ballast {
namespace {

constexpr size_t kMostTagName = 64;
constexpr absl::string_view kWhole = ".safetensors", kPart = ".part";

bool IsLetterOrDigit(char c) { return absl::ascii_islower(c) || absl::ascii_isdigit(c); }

// All that are there, whole or not. An empty list where the folder is not there.
absl::StatusOr<std::vector<TagFile>> AllFiles(Fs* fs, const std::string& folder) {
  const auto entries = fs->List(folder);
  if (absl::IsNotFound(entries.status())) return std::vector<TagFile>();
  RETURN_IF_ERROR(entries.status());
  std::vector<TagFile> files;
  for (const Fs::Entry& entry : *entries) {
    auto file = ParseTagFile(entry.name);
    if (!file) continue;
    if (entry.kind != Fs::Kind::kFile) {
      return absl::FailedPreconditionError(absl::StrCat(
          folder, "/", entry.name,
          " has the name of a version's file and is none, and no link is followed: put the file itself there, or move "
          "it away"));
    }
    files.push_back(*std::move(file));
  }
  return files;
}

// Of each tag the whole one of the highest number.
std::map<std::string, TagFile> NewestOf(const std::vector<TagFile>& all) {
  std::map<std::string, TagFile> newest;
  for (const TagFile& file : all) {
    if (!file.whole) continue;
    TagFile& known = newest[file.tag];
    if (known.tag.empty() || known.number < file.number) known = file;
  }
  return newest;
}

}  // namespace

bool IsTagName(absl::string_view name) {
  if (name.empty() || name.size() > kMostTagName) return false;
  if (!IsLetterOrDigit(name.front()) || !IsLetterOrDigit(name.back())) return false;
  return absl::c_all_of(name, [](char c) { return IsLetterOrDigit(c) || c == '-' || c == '.'; });
}

std::string NameOf(const TagFile& file) {
  return absl::StrCat(file.tag, ".", file.number, file.whole ? kWhole : kPart);
}

std::optional<TagFile> ParseTagFile(absl::string_view name) {
  const absl::string_view all = name;
  TagFile file{.whole = absl::ConsumeSuffix(&name, kWhole)};
  if (!file.whole && !absl::ConsumeSuffix(&name, kPart)) return std::nullopt;
  const size_t dot = name.rfind('.');
  if (dot == absl::string_view::npos || !absl::SimpleAtoi(name.substr(dot + 1), &file.number)) return std::nullopt;
  file.tag = std::string(name.substr(0, dot));
  if (!IsTagName(file.tag) || NameOf(file) != all) return std::nullopt;
  return file;
}

absl::StatusOr<std::vector<TagFile>> ListTagFiles(Fs* fs, const std::string& folder) {
  ASSIGN_OR_RETURN(const std::vector<TagFile> all, AllFiles(fs, folder));
  std::vector<TagFile> files;
  for (const auto& [tag, file] : NewestOf(all)) files.push_back(file);
  return files;
}

absl::Status CleanUpTags(Fs* fs, const std::string& folder) {
  ASSIGN_OR_RETURN(const std::vector<TagFile> all, AllFiles(fs, folder));
  const std::map<std::string, TagFile> newest = NewestOf(all);
  absl::Status first;
  for (const TagFile& file : all) {
    if (file.whole && newest.at(file.tag).number == file.number) continue;
    first.Update(fs->RemoveFile(absl::StrCat(folder, "/", NameOf(file))));
  }
  return first;
}

absl::Status RemoveTags(Fs* fs, const std::string& folder) {
  const auto entries = fs->List(folder);
  if (absl::IsNotFound(entries.status())) return absl::OkStatus();
  RETURN_IF_ERROR(entries.status());
  for (const Fs::Entry& entry : *entries) {
    if (entry.kind != Fs::Kind::kFile || !ParseTagFile(entry.name)) {
      return absl::FailedPreconditionError(absl::StrCat(
          folder, " is left: ", entry.name, " in it is no version with a name; move it away, and remove the folder"));
    }
    RETURN_IF_ERROR(fs->RemoveFile(absl::StrCat(folder, "/", entry.name)));
  }
  return fs->RemoveFolder(folder);
}

}  // namespace ballast
