// Checks from outside whether the gRPC port still answers: dials it every two seconds and reads the first frame, which
// an HTTP/2 server sends by itself; or, where the port speaks TLS, says a ClientHello and reads the first record, which
// only gRPC's handshake answers, and which needs no certificate. So /livez costs no connection, however often it is asked.
//
// A port that is full (server/rpc/tcp_listener.h) has answered, too: a restart would end the runs, but not the flood.
// One thread of its own, asleep between dials. Thread-safe.
#pragma once

#include <sys/socket.h>

#include <string>
#include <thread>

#include "absl/base/thread_annotations.h"
#include "absl/status/status.h"
#include "absl/synchronization/mutex.h"

namespace ballast {

class SelfCheck {
 public:
  static constexpr double kEveryS = 2;
  static constexpr double kAnswerS = 10;  // a machine may be busy

  explicit SelfCheck(const sockaddr_storage& at, bool tls = false, double every_s = kEveryS);
  ~SelfCheck() { Stop(); }
  // Ends the thread; the status stays as it is. One thread, once or more.
  void Stop();

  // The result of the last dial: OK (also before the first), or UNAVAILABLE with what happened. It is at most
  // every_s + kAnswerS old.
  absl::Status status() const;

 private:
  void Run();
  absl::Status Dial() const;
  // Waits for the events. False: they did not come within kAnswerS of `begin_s`, or it is time to stop.
  bool Await(int fd, short events, double begin_s) const;

  const sockaddr_storage at_;
  const std::string hello_;  // what it says first; empty: nothing, and an answer of HTTP/2 is wanted
  const double every_s_;
  const int stop_fd_;  // an eventfd
  mutable absl::Mutex mu_;
  absl::Status status_ ABSL_GUARDED_BY(mu_);
  std::thread thread_;
};

}  // namespace ballast
