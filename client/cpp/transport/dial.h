// A TCP connection, with or without TLS, beside gRPC's: for HTTP of the daemon's ops port, and to find out what gRPC does
// not tell. Blocks for timeout_s at most in each call. Thread-compatible.
#pragma once

#include <memory>
#include <string>

#include "absl/status/status.h"
#include "absl/status/statusor.h"
#include "absl/strings/string_view.h"
#include "absl/time/time.h"
#include "proto/tls/openssl.h"

#include "client/cpp/transport/steady.h"

namespace ballast {

struct HostAndPort {
  std::string host, port;  // the host without brackets
};
// INVALID_ARGUMENT: there is no port.
absl::StatusOr<HostAndPort> SplitAddress(const std::string& address);

// An IPv4 or IPv6 address, without brackets.
bool IsIpAddress(const std::string& host);

class Dial {
 public:
  // address: HOST:PORT. UNAVAILABLE says why there is no connection, with the address in front.
  static absl::StatusOr<std::unique_ptr<Dial>> Tcp(const std::string& address, double timeout_s);
  ~Dial();
  Dial(const Dial&) = delete;
  Dial& operator=(const Dial&) = delete;

  // Makes a client's handshake with `ssl`, through which all goes from then on. As SSL_get_error says it:
  // SSL_ERROR_NONE, or why not; SSL_ERROR_WANT_READ: the other end did not answer in time.
  int Shake(OpensslPtr<SSL> ssl);
  SSL* ssl() const { return ssl_.get(); }

  bool Write(absl::string_view bytes);
  // What has come, at most this much; empty: the other end has closed, or nothing came in time.
  std::string Read(size_t most_bytes);

 private:
  Dial(int fd, double timeout_s) : fd_(fd), timeout_s_(timeout_s) {}
  void BeginCall() { give_up_ = SteadyNow() + absl::Seconds(timeout_s_); }
  bool Await(short events) const;
  // Waits for what OpenSSL wants after this result. False: it wants nothing more, or it did not come in time.
  bool AwaitSsl(int result);

  const int fd_;
  const double timeout_s_;
  absl::Time give_up_ = absl::InfiniteFuture();  // of the call under way, however many bytes come meanwhile
  OpensslPtr<SSL> ssl_;
  int ssl_error_ = 0;  // of the last call
};

// For a handshake whose other end must have a certificate of these authorities (PEM; empty: any certificate will do) for
// this host.
OpensslPtr<SSL> ClientSsl(const std::string& authorities, const std::string& host);

}  // namespace ballast
