// Who is connected to the gRPC port. The table bounds the number of connections, leaves room beside any one address,
// and bounds the calls that clients make gRPC create.
//
// gRPC owns the descriptors and does not tell when it closes one. A descriptor was closed if its socket has another
// inode than before, or none; the table looks at that when it is full.
//
// A client that opens streams and resets them at once makes gRPC create any number of calls, some 22 kB each: gRPC's
// limit of streams does not count those that were reset, and while gRPC reads on, none of them ends. So the table
// counts calls as gRPC creates them. When there are too many, it cuts the connections over which no rank has attached and
// no run is followed, and admits nobody until the calls are gone. If as many come all the same, it cuts those of readers,
// too.
//
// Thread-safe.
#pragma once

#include <sys/socket.h>

#include <atomic>
#include <cstdint>
#include <memory>
#include <string>
#include <unordered_map>

#include "absl/base/thread_annotations.h"
#include "absl/status/status.h"
#include "absl/strings/string_view.h"
#include "absl/synchronization/mutex.h"

namespace ballast {

class ConnectionTable {
 public:
  // The most open calls: kMostCalls in all, one more for each reader that a run has taken in, and kCallsOfTrusted more for
  // each connection over which a rank has attached. The latter is what HTTP/2 lets a connection have, since many ranks may
  // share it.
  static constexpr int64_t kMostCalls = 1024, kCallsOfTrusted = 64;

  explicit ConnectionTable(uint32_t most = 0) { Limit(most); }
  // No address may have more than three quarters of `most`, but each may have one: a client that floods the daemon
  // leaves room for others.
  void Limit(uint32_t most);

  // Takes the connection in. RESOURCE_EXHAUSTED says which limit it meets. `peer`: as in accept.
  absl::Status Admit(int fd, const sockaddr_storage& peer);
  uint32_t connections() const;  // some may be closed since
  // The same, without those that were closed more than a second ago.
  uint32_t CountOpen();
  // A rank has attached over the connection of this peer. `peer`: as gRPC says it.
  void Trust(const std::string& peer);

  // gRPC has created a call. It does so in the middle of a read, so this does not wait.
  void OnCall();
  void OnCallOver() { --calls_; }
  // A call over the connection of this peer is one of the readers that a run may have (RunSpec.follow.readers,
  // relay.readers), which are bounded there, until what is returned is gone.
  std::shared_ptr<void> CountReader(const std::string& peer);

 private:
  struct Connection {
    uint64_t inode = 0;
    std::string peer;
    std::string uri;  // as gRPC says who it is
    bool trusted = false, reads = false, cut = false;
  };
  using ByFd = std::unordered_map<int, Connection>;

  void Forget(ByFd::iterator connection) ABSL_EXCLUSIVE_LOCKS_REQUIRED(mu_);
  void ForgetClosed() ABSL_EXCLUSIVE_LOCKS_REQUIRED(mu_);
  void ForgetClosedNow() ABSL_EXCLUSIVE_LOCKS_REQUIRED(mu_);
  absl::Status Check(const std::string& peer) const ABSL_EXCLUSIVE_LOCKS_REQUIRED(mu_);
  // Those that may be open beside kMostCalls.
  int64_t CallsBesides() const ABSL_EXCLUSIVE_LOCKS_REQUIRED(mu_);
  absl::Status CheckCalls();
  // If there are too many calls, cuts the connections over which no rank has attached; returns how many.
  uint64_t CutOthers() ABSL_EXCLUSIVE_LOCKS_REQUIRED(mu_);
  uint64_t Cut(bool reading) ABSL_EXCLUSIVE_LOCKS_REQUIRED(mu_);  // those that read, or those that do not

  std::atomic<int64_t> calls_ = 0, made_ = 0;  // that are open; ever
  const std::shared_ptr<std::atomic<int64_t>> readers_ = std::make_shared<std::atomic<int64_t>>(0);
  mutable absl::Mutex mu_;
  uint32_t most_ ABSL_GUARDED_BY(mu_) = 0, most_of_peer_ ABSL_GUARDED_BY(mu_) = 0;
  ByFd by_fd_ ABSL_GUARDED_BY(mu_);
  std::unordered_map<std::string, uint32_t> of_peer_ ABSL_GUARDED_BY(mu_);  // how many
  double looked_at_s_ ABSL_GUARDED_BY(mu_) = -1;                            // for those that are closed
  double counted_at_s_ ABSL_GUARDED_BY(mu_) = -1;
  bool flooded_ ABSL_GUARDED_BY(mu_) = false;  // some were cut, and their calls are there
  int64_t made_at_cut_ ABSL_GUARDED_BY(mu_) = 0;
};

// Why a connection is not taken: reason is a word of ballast_connections_refused_total.
absl::Status RefusedConnection(absl::string_view reason, absl::string_view why);
std::string ReasonOf(const absl::Status& refused);

}  // namespace ballast
