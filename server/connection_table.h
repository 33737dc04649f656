// Who is connected to the gRPC port, so that there are never more than a limit, and no one address takes all of it.
//
// gRPC owns the descriptors and does not tell when it closes one. So nobody is told here either: a descriptor whose
// socket has another inode than it had, or none, was closed. That is looked at when the table is full.
// Thread-compatible.
#pragma once

#include <sys/socket.h>

#include <cstdint>
#include <string>
#include <unordered_map>

#include "absl/status/status.h"

namespace ballast {

class ConnectionTable {
 public:
  // No address has more than three quarters of `most`, at least one: whoever floods the daemon leaves room for others.
  explicit ConnectionTable(uint32_t most) : most_(most), most_of_peer_(most - most / 4) {}

  // The connection of this peer, if it is here, is not cut. `peer`: as gRPC says it.
  void Trust(const std::string& peer);
  uint32_t trusted() const;
  // Disconnects those that are not trusted; gRPC notices, and closes them. Returns how many.
  uint32_t CutOthers();

  // Takes the connection in. RESOURCE_EXHAUSTED says which limit it meets. `peer`: as of accept.
  absl::Status Admit(int fd, const sockaddr_storage& peer);
  uint32_t connections() const { return static_cast<uint32_t>(by_fd_.size()); }  // some may be closed since

 private:
  struct Connection {
    uint64_t inode = 0;
    std::string peer;
    std::string uri;  // as gRPC says who it is
    bool trusted = false;
  };
  using ByFd = std::unordered_map<int, Connection>;

  void Forget(ByFd::iterator connection);
  void ForgetClosed();
  void ForgetClosedNow();
  absl::Status Check(const std::string& peer) const;

  const uint32_t most_, most_of_peer_;
  ByFd by_fd_;
  std::unordered_map<std::string, uint32_t> of_peer_;  // how many
  double looked_at_s_ = -1;                            // for those that are closed
};

}  // namespace ballast
