// Small files in a model's file system, and what a power cut may leave of them.
#pragma once

#include <gtest/gtest.h>

#include <memory>
#include <set>
#include <string>
#include <vector>

#include "absl/strings/str_cat.h"
#include "absl/strings/str_join.h"

#include "server/base/status_macros.h"
#include "tests/server/storage/model_fs.h"
#include "tests/server/storage/outcomes.h"

namespace ballast::testing {

inline constexpr uint64_t kMostOutcomes = 100000;

inline absl::Span<const std::byte> AsBytes(const std::string& text) {
  return {reinterpret_cast<const std::byte*>(text.data()), text.size()};
}

// A new file that holds the text, not synced.
inline absl::StatusOr<std::unique_ptr<OutputFile>> Put(ModelFs* fs, const std::string& path, const std::string& text) {
  ASSIGN_OR_RETURN(std::unique_ptr<OutputFile> file, fs->Create(path));
  RETURN_IF_ERROR(file->Write(0, AsBytes(text)));
  return file;
}

// Synced, and so is its name.
inline void PutSynced(ModelFs* fs, const std::string& path, const std::string& text) {
  const auto file = Put(fs, path, text);
  ASSERT_TRUE(file.ok()) << file.status();
  ASSERT_TRUE((*file)->Sync().ok());
  ASSERT_TRUE(fs->SyncFolder("/").ok());
}

// The files of the root: "a=one b=two".
inline std::string RootOf(ModelFs* fs) {
  std::vector<std::string> files;
  const auto entries = fs->List("/");
  for (const Fs::Entry& entry : *entries) files.push_back(absl::StrCat(entry.name, "=", fs->Content("/" + entry.name)));
  return absl::StrJoin(files, " ");
}

// The root in all states that a power cut may leave.
inline std::set<std::string> RootsAfterCut(const ModelFs& fs) {
  Outcomes outcomes(fs, kMostOutcomes);
  EXPECT_TRUE(outcomes.are_all());
  std::set<std::string> roots;
  while (const auto left = outcomes.Next()) roots.insert(RootOf(left.get()));
  return roots;
}

}  // namespace ballast::testing
