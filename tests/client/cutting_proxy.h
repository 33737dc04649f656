// A TCP proxy that cuts its connections after so many bytes, for tests with a real daemon.
#pragma once

#include <cstdint>
#include <deque>
#include <string>
#include <thread>

#include "absl/base/thread_annotations.h"
#include "absl/synchronization/mutex.h"

#include "tests/client/loopback_socket.h"

namespace ballast {

// Thread-safe.
class CuttingProxy {
 public:
  // cuts: after how many bytes, both directions together, the first, second ... connection is reset; later ones live.
  CuttingProxy(const std::string& target, std::deque<uint64_t> cuts);
  ~CuttingProxy();

  std::string address() const;
  int connections() const;

 private:
  void Loop();
  void Relay(const LoopbackSocket& near, const LoopbackSocket& far, uint64_t limit);

  const uint16_t target_port_;
  const LoopbackSocket listener_;
  int stop_[2] = {-1, -1};  // a pipe; readable when it is over
  mutable absl::Mutex mu_;
  std::deque<uint64_t> cuts_ ABSL_GUARDED_BY(mu_);
  int connections_ ABSL_GUARDED_BY(mu_) = 0;
  std::thread thread_;
};

}  // namespace ballast
