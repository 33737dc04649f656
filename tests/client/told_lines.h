// What clients tell people (ClientOptions::log), kept for a test.
#pragma once

#include <functional>
#include <memory>
#include <string>
#include <vector>

#include "absl/base/thread_annotations.h"
#include "absl/synchronization/mutex.h"

#include "client/cpp/client.h"

namespace ballast {

// Outlives its clients. Thread-safe.
class ToldLines {
 public:
  std::unique_ptr<Client> Connect(const std::string& server) {
    return Client::Connect({.server = server, .log = log()}).value();
  }
  std::function<void(const std::string&)> log() {
    return [this](const std::string& line) {
      absl::MutexLock lock(&mu_);
      lines_.push_back(line);
    };
  }
  std::vector<std::string> lines() {
    absl::MutexLock lock(&mu_);
    return lines_;
  }

 private:
  absl::Mutex mu_;
  std::vector<std::string> lines_ ABSL_GUARDED_BY(mu_);
};

}  // namespace ballast
