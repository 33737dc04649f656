// Checkpoints of small files in a model's file system, and what is found there.
#pragma once

#include <gtest/gtest.h>

#include <map>
#include <random>
#include <string>
#include <utility>
#include <vector>

#include "absl/strings/str_cat.h"
#include "absl/synchronization/notification.h"

#include "server/storage/checkpoint_writer.h"
#include "server/storage/storage.h"
#include "tests/server/storage/model_fs.h"

namespace ballast::testing {

inline constexpr char kRunsRun[] = "/d/runs/r";

// What the files of a step hold; one is longer than a buffer, and ends nowhere in particular.
struct StepFiles {
  explicit StepFiles(uint64_t of_step) : step(of_step) {
    std::mt19937_64 random(step);
    for (const auto& [name, bytes] : std::vector<std::pair<std::string, size_t>>{
             {"model-00001-of-00001.safetensors", 5000}, {"run.json", 700}, {"spec.json", 90}}) {
      std::string content(bytes, '\0');
      for (char& c : content) c = static_cast<char>(random());
      files[name] = content;
    }
  }
  CheckpointContent Content() const {
    CheckpointContent content;
    for (const auto& [name, bytes] : files) {
      const absl::Span<const std::byte> all(reinterpret_cast<const std::byte*>(bytes.data()), bytes.size());
      content.files.push_back({.name = name, .pieces = {all.first(bytes.size() / 3), all.subspan(bytes.size() / 3)}});
    }
    return content;
  }
  uint64_t step;
  std::map<std::string, std::string> files;
};

inline void MakeRoot(ModelFs* fs) {
  ASSERT_TRUE(fs->MakeFolder("/d").ok());
  ASSERT_TRUE(fs->SyncFolder("").ok());
}

// Opens the storage as a daemon does, writes the steps, and closes it. The status of the last write.
inline absl::Status WriteSteps(ModelFs* fs, const std::vector<uint64_t>& steps) {
  auto storage = Storage::Open({.fs = fs, .dir = "/d", .threads = 1});
  if (!storage.ok()) return storage.status();
  auto folder = (*storage)->FolderOf("r");
  if (!folder.ok()) return folder.status();
  CheckpointWriter writer({.fs = fs, .threads = (*storage)->threads(), .rate = (*storage)->rate()});
  absl::Status status;
  for (const uint64_t step : steps) {
    const StepFiles files(step);
    absl::Notification written;
    writer.Write({.folder = *folder,
                  .run_id = "r",
                  .spec_sha256 = "spec",
                  .step = step,
                  .content = [&] { return files.Content(); },
                  .retain = 2},
                 [&](const absl::StatusOr<CheckpointWritten>& result) {
                   status = result.status();
                   written.Notify();
                 });
    written.WaitForNotification();
    if (!status.ok()) return status;
  }
  return status;
}

inline std::vector<CheckpointEntry> KeptIn(ModelFs* fs) {
  std::vector<CheckpointEntry> kept;
  const auto entries = fs->List(kRunsRun);
  if (!entries.ok()) return kept;
  for (const Fs::Entry& entry : *entries) {
    const auto parsed = ParseCheckpointName(entry.name);
    if (parsed && parsed->state == CheckpointState::kKept) kept.push_back(*parsed);
  }
  return kept;
}

}  // namespace ballast::testing
