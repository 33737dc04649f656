// The folder that `ballastctl follow` fills: DIR/step-<step>.safetensors for each version of a run's weights, the newest
// ones. Thread-compatible.
#pragma once

#include <cstdint>
#include <filesystem>
#include <string>

#include "absl/status/status.h"
#include "absl/status/statusor.h"

#include "client/cpp/follow/subscriber.h"

namespace ballast::ctl {

class FollowedFiles {
 public:
  // The folder is made if need be. FAILED_PRECONDITION: it cannot be.
  static absl::StatusOr<FollowedFiles> Open(const std::string& folder, const std::string& run, uint64_t retain);

  // Writes the version, the one whose weights are here, to a file that is there whole or not at all, also when the machine
  // crashes; then removes the run's files that were written before the `retain` newest. Returns the file. A later version of
  // the same step takes its place. FAILED_PRECONDITION names what cannot be written.
  absl::StatusOr<std::filesystem::path> Write(const Subscriber& subscriber, const FollowedVersion& version) const;

 private:
  FollowedFiles(std::filesystem::path folder, std::string run, uint64_t retain)
      : folder_(std::move(folder)), run_(std::move(run)), retain_(retain) {}
  absl::Status RemoveBefore(const std::filesystem::path& newest) const;

  std::filesystem::path folder_;
  std::string run_;
  uint64_t retain_;
};

}  // namespace ballast::ctl
