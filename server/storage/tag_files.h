// The files of a run's versions that have names: in the folder `tags` of the run's folder, NAME.NUMBER.safetensors, and
// while one is written NAME.NUMBER.part. A name that is given to another version gets a file of a higher number, and then
// the older one goes, so that a power cut at any moment leaves the one or the other.
//
//   ASSIGN_OR_RETURN(auto files, ListTagFiles(fs, folder));   // of each name the newest
//
// Functions; thread-safe.
#pragma once

#include <cstdint>
#include <optional>
#include <string>
#include <vector>

#include "absl/status/statusor.h"
#include "absl/strings/string_view.h"

#include "server/storage/fs.h"

namespace ballast {

inline constexpr absl::string_view kTagsFolder = "tags";  // in a run's

// 1 to 64 of a-z, 0-9, '-' and '.', the first and the last a letter or a digit.
bool IsTagName(absl::string_view name);

struct TagFile {
  std::string tag;
  uint64_t number = 0;
  bool whole = true;  // false: it was being written
};
std::string NameOf(const TagFile& file);
// Of a file's name; none: it is no tag's.
std::optional<TagFile> ParseTagFile(absl::string_view name);

// The whole ones, of each tag that of the highest number, by tag; none where the folder is not there.
absl::StatusOr<std::vector<TagFile>> ListTagFiles(Fs* fs, const std::string& folder);
// Removes what is not whole, and what was replaced. While nobody writes there.
absl::Status CleanUpTags(Fs* fs, const std::string& folder);
// Removes the folder with its files; OK where it is not there. FAILED_PRECONDITION: something else is in it.
absl::Status RemoveTags(Fs* fs, const std::string& folder);

}  // namespace ballast
