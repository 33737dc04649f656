// The folder that `ballastctl follow` fills: a file for each version of a run's weights, the newest ones. Whole ones are
// DIR/step-<step>.safetensors; between them there may be DIR/step-<step>.changes.safetensors, what a version has changed of
// the one before (version_file.h). Thread-compatible.
#pragma once

#include <cstdint>
#include <filesystem>
#include <optional>
#include <string>
#include <vector>

#include "absl/status/status.h"
#include "absl/status/statusor.h"

#include "client/cpp/ctl/version_file.h"
#include "client/cpp/follow/subscriber.h"

namespace ballast::ctl {

class FollowedFiles {
 public:
  struct Kept {
    uint64_t retain = 2;   // whole files
    uint64_t changes = 0;  // files of changes between one whole file and the next, at most
  };
  // The folder is made if need be, and parts of files that others left there when they were killed are removed.
  // FAILED_PRECONDITION: it cannot be.
  static absl::StatusOr<FollowedFiles> Open(const std::string& folder, const std::string& run, Kept kept);

  // Writes the version, the one whose weights are here, to a file that is there whole or not at all, also when the machine
  // crashes; then removes the run's files that were written before the `retain` newest whole ones. Returns the file. A later
  // version of the same step takes its place. SIGINT, SIGTERM and SIGHUP in the middle leave nothing of it. A file of
  // changes is of the version that was written before, and smaller than a whole one. FAILED_PRECONDITION names what cannot
  // be written.
  absl::StatusOr<std::filesystem::path> Write(const Subscriber& subscriber, const FollowedVersion& version);

 private:
  FollowedFiles(std::filesystem::path folder, Kept kept) : folder_(std::move(folder)), kept_(kept) {}
  // Those of the run that are there.
  absl::Status Look(const std::string& run);
  // What the version is written as, and whether that is whole.
  absl::StatusOr<std::pair<VersionFile, bool>> FileOf(const Subscriber& subscriber,
                                                      const FollowedVersion& version) const;
  absl::Status Put(const VersionFile& file, const std::filesystem::path& path) const;
  absl::Status RemoveOld();

  struct Known {
    std::filesystem::path path;
    bool whole = true;
  };

  std::filesystem::path folder_;
  Kept kept_;
  std::vector<Known> known_;                  // of the run, in the order in which they were written
  std::optional<FollowedVersion> last_ = {};  // written by this object
  uint64_t since_whole_ = 0;                  // files of changes
};

}  // namespace ballast::ctl
