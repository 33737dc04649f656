// A TCP proxy between one client and a daemon that, once begun, cuts every connection at a random byte.
//
// Both ends see half of the cuts at once. The daemon hears of the others late, as when a machine is lost: what the
// client had still sent (at most kLateBytes) reaches the daemon on the old connection when the client is already
// attaching on the next one.
#pragma once

#include <cstdint>
#include <random>
#include <string>
#include <thread>

#include "absl/base/thread_annotations.h"
#include "absl/synchronization/mutex.h"

#include "tests/client/loopback_socket.h"

namespace ballast {

// Thread-safe.
class ChaosProxy {
 public:
  struct Options {
    std::string target;  // host:port
    uint64_t seed = 0;
    uint64_t mean_bytes = 0;  // of a connection's life, both directions together
  };
  struct Counts {
    uint64_t cuts = 0;
    uint64_t late = 0;  // of these: the daemon heard of them late
  };

  explicit ChaosProxy(const Options& options);
  ~ChaosProxy();

  std::string address() const;
  Counts counts() const;
  // Begins to cut; before this nothing is cut.
  void Begin();

 private:
  static constexpr size_t kLateBytes = 64 << 10;
  // A connection that the client has lost.
  struct Past {
    LoopbackSocket far;
    std::string bytes;  // of the client's, on their way
  };

  void Serve();
  // Relays until the client's end is cut or gone. False: the proxy is to stop.
  bool Relay(LoopbackSocket* near, LoopbackSocket* far);
  // Moves at most so many bytes to the client, and returns how many; 0: an end is gone.
  size_t MoveDown(const LoopbackSocket& near, const LoopbackSocket& far, size_t most);
  void CutLate(LoopbackSocket* near, LoopbackSocket* far);
  bool begun() const;
  uint64_t DrawLimit();

  const Options options_;
  const LoopbackSocket listener_;
  int stop_[2] = {-1, -1};  // a pipe; readable when it is over
  std::mt19937_64 random_;  // the thread's
  Past past_;
  uint64_t pieces_until_late_ = 0;  // that the daemon sends on the next connection
  mutable absl::Mutex mu_;
  Counts counts_ ABSL_GUARDED_BY(mu_);
  bool begun_ ABSL_GUARDED_BY(mu_) = false;
  std::thread thread_;
};

}  // namespace ballast
