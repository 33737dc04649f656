// How many calls gRPC has in hand, counted from before any code of the daemon's hears of them. A client that opens
// streams and resets them at once has as many calls made as it likes: gRPC's limit of streams counts none that was
// reset, and while it reads on, none of them ends. A call takes some 22 kB. So whoever owns the connections is told
// when there are many, and cuts those that no rank has attached over (server/tcp_listener.h).
//
// Thread-safe.
#pragma once

#include <atomic>
#include <cstdint>
#include <functional>
#include <string>
#include <vector>

#include "absl/base/thread_annotations.h"
#include "absl/synchronization/mutex.h"

namespace ballast {

class CallGuard {
 public:
  static constexpr int64_t kLookEvery = 1024;  // calls more

  // Called whenever kLookEvery more calls are open, and when a peer is to be trusted; by gRPC's threads, in the middle
  // of a read: must not block. nullptr: nobody any more.
  void Watch(std::function<void()> look);
  void OnCall();
  void OnCallOver() { --open_; }
  int64_t open() const { return open_; }

  // A rank has attached over this connection. `peer`: as gRPC says it.
  void Trust(const std::string& peer);
  // Those since the last time.
  std::vector<std::string> TakeTrusted();

 private:
  std::atomic<int64_t> open_ = 0;
  absl::Mutex mu_;
  std::function<void()> look_ ABSL_GUARDED_BY(mu_);
  std::vector<std::string> trusted_ ABSL_GUARDED_BY(mu_);
};

}  // namespace ballast
