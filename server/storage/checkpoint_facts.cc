#include "server/storage/checkpoint_facts.h"

#include <algorithm>
#include <string>
#include <vector>

#include "absl/time/clock.h"
#include "absl/time/time.h"

#include "server/base/status_macros.h"

namespace ballast {
namespace {

double AgeOf(const v1::CheckpointManifest& manifest) {
  absl::Time written;
  if (!absl::ParseTime(absl::RFC3339_full, manifest.written_at(), &written, nullptr)) return 0;
  return std::max(0.0, absl::ToDoubleSeconds(absl::Now() - written));
}

}  // namespace

uint64_t BytesOf(const v1::CheckpointManifest& manifest) {
  uint64_t sum = 0;
  for (const v1::CheckpointFile& file : manifest.files()) sum += file.bytes();
  return sum;
}

CheckpointWritten WrittenOf(const CheckpointReader& checkpoint) {
  const std::string& folder = checkpoint.folder();
  const auto entry = ParseCheckpointName(folder.substr(folder.rfind('/') + 1));
  return {.place = {entry ? entry->place.number : 0, checkpoint.manifest().step()},
          .folder = folder,
          .bytes = BytesOf(checkpoint.manifest()),
          .age_seconds = AgeOf(checkpoint.manifest())};
}

absl::StatusOr<CheckpointWritten> NewestIn(Fs* fs, const RunFolder& folder) {
  ASSIGN_OR_RETURN(const std::vector<CheckpointEntry> entries, folder.List());
  for (auto entry = entries.rbegin(); entry != entries.rend(); ++entry) {
    if (entry->state != CheckpointState::kKept) continue;
    const auto checkpoint = CheckpointReader::Open(fs, folder.PathOf(*entry));
    if (checkpoint.ok()) return WrittenOf(*checkpoint);
    return CheckpointWritten{.place = entry->place, .folder = folder.PathOf(*entry)};
  }
  return CheckpointWritten{};
}

}  // namespace ballast
