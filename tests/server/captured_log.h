// Captures what a daemon that is started from now on in this process writes to stderr. The destructor puts stderr back.
#pragma once

#include <gtest/gtest.h>
#include <stdlib.h>
#include <unistd.h>

#include <fstream>
#include <string>
#include <thread>
#include <vector>

#include "server/base/clock.h"
#include "server/base/log.h"

namespace ballast::testing {

class CapturedLog {
 public:
  CapturedLog() : stderr_(dup(STDERR_FILENO)) {
    const int fd = mkstemp(path_.data());
    EXPECT_GE(fd, 0) << path_;
    dup2(fd, STDERR_FILENO);
    close(fd);
    ConfigureLog(LogLevel::kInfo, "text");  // no line of an earlier test counts towards the most a second
  }
  ~CapturedLog() {
    dup2(stderr_, STDERR_FILENO);
    close(stderr_);
    unlink(path_.c_str());
  }
  CapturedLog(const CapturedLog&) = delete;
  CapturedLog& operator=(const CapturedLog&) = delete;

  // Waits for the first line that holds all of these; empty: there was none within 30 s.
  std::string Await(const std::vector<std::string>& parts) const {
    const double begin_s = MonotonicSeconds();
    while (MonotonicSeconds() - begin_s < 30) {
      if (std::string line = Find(parts); !line.empty()) return line;
      std::this_thread::yield();
    }
    return "";
  }
  std::string Find(const std::vector<std::string>& parts) const {
    const std::vector<std::string> found = FindAll(parts);
    return found.empty() ? "" : found.front();
  }
  size_t Count(const std::vector<std::string>& parts) const { return FindAll(parts).size(); }

 private:
  std::vector<std::string> FindAll(const std::vector<std::string>& parts) const {
    std::vector<std::string> found;
    std::ifstream log(path_);
    for (std::string line; std::getline(log, line);) {
      bool all = !log.eof();  // a line that is being written does not count
      for (const std::string& part : parts) all = all && line.find(part) != std::string::npos;
      if (all) found.push_back(line);
    }
    return found;
  }

  std::string path_ = ::testing::TempDir() + "/log-XXXXXX";
  const int stderr_;
};

}  // namespace ballast::testing
