// TLS in front of a plain TCP port of this machine: takes connections, makes the handshake with the certificate that is in
// use at that moment, and hands the bytes on, both ways. CivetWeb's own TLS is not used: built as Debian 12 builds it,
// it crashes at the first request with OpenSSL 3.
//
// At most kMost connections at a time, which take three descriptors each and so fit those that are kept for the daemon's own
// use (server/base/descriptors.h). The next takes the place of the oldest that has not ended its handshake, or waits for one
// to go. A connection reaches the plain port when its handshake is over; it is cut where that takes longer than kHandshakeS,
// or all of it longer than kMostS. One thread, asleep while nothing moves. Thread-safe.
#pragma once

#include <netinet/in.h>

#include <cstdint>
#include <memory>
#include <string>
#include <thread>
#include <vector>

#include "absl/status/statusor.h"
#include "proto/tls/openssl.h"

#include "server/tls/certificate_keeper.h"

namespace ballast {

class TlsRelay {
 public:
  static constexpr size_t kMost = 32;
  static constexpr double kHandshakeS = 5, kMostS = 30;

  // host: an IPv4 address; port 0 picks a free one. inner_port: at 127.0.0.1. certificates: outlive it. UNAVAILABLE is the
  // system's word for why it cannot listen.
  static absl::StatusOr<std::unique_ptr<TlsRelay>> Start(const std::string& host, uint16_t port, uint16_t inner_port,
                                                         const CertificateKeeper* certificates);
  ~TlsRelay();  // connections are cut
  TlsRelay(const TlsRelay&) = delete;
  TlsRelay& operator=(const TlsRelay&) = delete;

  uint16_t port() const { return port_; }

 private:
  class Link;

  TlsRelay(uint16_t inner_port, const CertificateKeeper* certificates);
  absl::Status Listen(const std::string& host, uint16_t port);
  void Run();
  void Accept();
  // The oldest that has not ended its handshake.
  std::vector<std::unique_ptr<Link>>::iterator Idle();
  // Takes those that are over off the list.
  void Move();

  const CertificateKeeper* const certificates_;
  OpensslPtr<SSL_CTX> context_;
  sockaddr_in inner_{};
  int listener_fd_ = -1, stop_fd_ = -1;  // an eventfd
  uint16_t port_ = 0;
  std::vector<std::unique_ptr<Link>> links_;  // the thread's
  std::thread thread_;
};

}  // namespace ballast
