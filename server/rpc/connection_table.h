// Who is connected to the gRPC port, so that there are never more than a limit, no one address takes all of it, and
// nobody has more calls made than the daemon has memory for.
//
// gRPC owns the descriptors and does not tell when it closes one. So nobody is told here either: a descriptor whose
// socket has another inode than it had, or none, was closed. That is looked at when the table is full.
//
// A client that opens streams and resets them at once has gRPC make as many calls as it likes, some 22 kB each: its
// limit of streams counts none that was reset, and while it reads on, none of them ends. So calls are counted as gRPC
// makes them. Where there are many, the connections are cut over which no rank has attached, and nobody is admitted
// until the calls are gone.
//
// Thread-safe.
#pragma once

#include <sys/socket.h>

#include <atomic>
#include <cstdint>
#include <string>
#include <unordered_map>

#include "absl/base/thread_annotations.h"
#include "absl/status/status.h"
#include "absl/synchronization/mutex.h"

namespace ballast {

class ConnectionTable {
 public:
  // Open calls: of all who come and go, and of each connection over which a rank has attached: as many as HTTP/2 lets
  // it have, for many ranks may share it.
  static constexpr int64_t kMostCalls = 1024, kCallsOfTrusted = 64;

  explicit ConnectionTable(uint32_t most = 0) { Limit(most); }
  // No address has more than three quarters of `most`, at least one: whoever floods the daemon leaves room for others.
  void Limit(uint32_t most);

  // Takes the connection in. RESOURCE_EXHAUSTED says which limit it meets. `peer`: as in accept.
  absl::Status Admit(int fd, const sockaddr_storage& peer);
  uint32_t connections() const;  // some may be closed since
  // A rank has attached over the connection of this peer. `peer`: as gRPC says it.
  void Trust(const std::string& peer);

  // gRPC has made a call, which it does in the middle of a read: does not wait.
  void OnCall();
  void OnCallOver() { --calls_; }

 private:
  struct Connection {
    uint64_t inode = 0;
    std::string peer;
    std::string uri;  // as gRPC says who it is
    bool trusted = false, cut = false;
  };
  using ByFd = std::unordered_map<int, Connection>;

  void Forget(ByFd::iterator connection) ABSL_EXCLUSIVE_LOCKS_REQUIRED(mu_);
  void ForgetClosed() ABSL_EXCLUSIVE_LOCKS_REQUIRED(mu_);
  void ForgetClosedNow() ABSL_EXCLUSIVE_LOCKS_REQUIRED(mu_);
  absl::Status Check(const std::string& peer) const ABSL_EXCLUSIVE_LOCKS_REQUIRED(mu_);
  int64_t CallsOfTrusted() const ABSL_EXCLUSIVE_LOCKS_REQUIRED(mu_);
  absl::Status CheckCalls();
  // Disconnects those over which no rank has attached, if there are too many calls; how many.
  uint64_t CutOthers() ABSL_EXCLUSIVE_LOCKS_REQUIRED(mu_);

  std::atomic<int64_t> calls_ = 0;
  mutable absl::Mutex mu_;
  uint32_t most_ ABSL_GUARDED_BY(mu_) = 0, most_of_peer_ ABSL_GUARDED_BY(mu_) = 0;
  ByFd by_fd_ ABSL_GUARDED_BY(mu_);
  std::unordered_map<std::string, uint32_t> of_peer_ ABSL_GUARDED_BY(mu_);  // how many
  double looked_at_s_ ABSL_GUARDED_BY(mu_) = -1;                            // for those that are closed
  bool flooded_ ABSL_GUARDED_BY(mu_) = false;                               // some were cut, and their calls are there
};

}  // namespace ballast
