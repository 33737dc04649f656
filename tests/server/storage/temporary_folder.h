// A folder of the system's, for as long as the object lives.
#pragma once

#include <gtest/gtest.h>
#include <stdlib.h>

#include <filesystem>
#include <string>
#include <system_error>

namespace ballast::testing {

class TemporaryFolder {
 public:
  // path() is empty where nothing can be made there.
  explicit TemporaryFolder(const std::string& under = ::testing::TempDir()) : path_(under + "/ballast-test-XXXXXX") {
    if (mkdtemp(path_.data()) == nullptr) path_.clear();
  }
  TemporaryFolder(const TemporaryFolder&) = delete;
  TemporaryFolder& operator=(const TemporaryFolder&) = delete;
  ~TemporaryFolder() {
    if (path_.empty()) return;
    std::error_code error;
    std::filesystem::remove_all(path_, error);
    EXPECT_FALSE(error) << "cannot remove " << path_ << ": " << error.message();
  }
  const std::string& path() const { return path_; }

 private:
  std::string path_;
};

}  // namespace ballast::testing
