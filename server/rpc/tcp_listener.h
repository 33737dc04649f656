// The gRPC port: accepts connections and hands those it admits to gRPC. gRPC 1.51 can accept by itself, but spins when
// the process has no file descriptor left, and may never accept again after that. Here some are always left: at most
// limits.connections are admitted, and only while kKeptDescriptors stay free (server/base/descriptors.h). A connection
// that is not admitted gets an HTTP/2 GOAWAY that says why, which stock clients show, or, where the port speaks TLS, a
// TLS alert, which says nothing; the client may come again.
//
// One thread, asleep while nobody comes. Thread-safe.
#pragma once

#include <sys/socket.h>

#include <cstdint>
#include <functional>
#include <memory>
#include <string>
#include <thread>
#include <vector>

#include "absl/status/status.h"
#include "absl/status/statusor.h"

#include "server/base/descriptors.h"
#include "server/metrics/metrics.h"
#include "server/rpc/connection_table.h"

namespace ballast {

class TcpListener {
 public:
  // Takes the descriptor over. Called by the listener's thread; must not block.
  using OnConnection = std::function<void(int listener_fd, int fd)>;

  // listen: HOST:PORT; a name is bound at each of its addresses, a wildcard of either family at both families, as gRPC
  // does; port 0 picks a free one. Not yet accepting. UNAVAILABLE names the address and the fix.
  static absl::StatusOr<std::unique_ptr<TcpListener>> Bind(const std::string& listen);
  ~TcpListener();  // the port is closed; connections go on

  uint16_t port() const;
  // Where the port is reached from this machine.
  sockaddr_storage dial_address() const;

  // Once. `table`: admits; `metrics`: counts; both outlive this. tls: what the port speaks.
  void Serve(ConnectionTable* table, Metrics* metrics, bool tls, OnConnection on_connection);

 private:
  TcpListener() = default;
  bool Add(const sockaddr* address, socklen_t bytes, int* error);
  void Run();
  void AcceptOne(int listener_fd);
  void Admit(int listener_fd, int fd, const sockaddr_storage& peer);
  void Refuse(int fd, const std::string& peer, const absl::Status& why) const;

  std::vector<int> fds_;
  int stop_fd_ = -1;   // an eventfd
  bool rest_ = false;  // there is not even the spare descriptor
  SpareDescriptor spare_;
  ConnectionTable* table_ = nullptr;
  Metrics* metrics_ = nullptr;
  bool tls_ = false;
  OnConnection on_connection_;
  std::thread thread_;
};

// limits.connections as configured, or with 0 the default: half of the descriptors that are not kept, since a trainer
// of this host takes two, and at most 4096. FAILED_PRECONDITION: the process may not open as many.
absl::StatusOr<uint32_t> MostConnections(uint32_t configured, uint64_t descriptors);

}  // namespace ballast
