// Files that a command makes, such as keys: whole, with their rights from the first byte on, and never over one that is
// there.
#pragma once

#include <sys/types.h>

#include <filesystem>
#include <string>
#include <vector>

#include "absl/status/status.h"

namespace ballast::ctl {

struct NewFile {
  std::string name;
  std::string text;
  mode_t mode;
};

// In the folder, which is made if need be, for its owner alone. FAILED_PRECONDITION names what cannot be written; where
// one of the files is there already, or cannot be written, none is made.
absl::Status WriteNewFiles(const std::filesystem::path& folder, const std::vector<NewFile>& files);

}  // namespace ballast::ctl
