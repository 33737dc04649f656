#include "tests/client/cutting_proxy.h"

#include <arpa/inet.h>
#include <netinet/in.h>
#include <netinet/tcp.h>
#include <poll.h>
#include <unistd.h>

#include <limits>
#include <utility>
#include <vector>

#include "absl/strings/str_cat.h"

namespace ballast {
namespace {

sockaddr_in Loopback(uint16_t port) {
  sockaddr_in address{};
  address.sin_family = AF_INET;
  address.sin_port = htons(port);
  address.sin_addr.s_addr = htonl(INADDR_LOOPBACK);
  return address;
}

// Closes with a reset, as a lost machine's next packet would.
void Reset(int fd) {
  const linger now{.l_onoff = 1, .l_linger = 0};
  setsockopt(fd, SOL_SOCKET, SO_LINGER, &now, sizeof(now));
  close(fd);
}

void SendAtOnce(int fd) {
  const int on = 1;
  setsockopt(fd, IPPROTO_TCP, TCP_NODELAY, &on, sizeof(on));
}

// Moves what is there; 0 when the connection is over.
size_t Move(int from, int to) {
  std::vector<char> buffer(4096);
  const ssize_t got = recv(from, buffer.data(), buffer.size(), 0);
  if (got <= 0) return 0;
  for (ssize_t sent = 0; sent < got;) {
    const ssize_t n = send(to, buffer.data() + sent, static_cast<size_t>(got - sent), MSG_NOSIGNAL);
    if (n <= 0) return 0;
    sent += n;
  }
  return static_cast<size_t>(got);
}

}  // namespace

CuttingProxy::CuttingProxy(const std::string& target, std::deque<uint64_t> cuts)
    : target_port_(static_cast<uint16_t>(std::stoi(target.substr(target.rfind(':') + 1)))), cuts_(std::move(cuts)) {
  listener_ = socket(AF_INET, SOCK_STREAM, 0);
  sockaddr_in address = Loopback(0);
  socklen_t size = sizeof(address);
  const bool listening = bind(listener_, reinterpret_cast<sockaddr*>(&address), size) == 0 &&
                         listen(listener_, 8) == 0 &&
                         getsockname(listener_, reinterpret_cast<sockaddr*>(&address), &size) == 0 && pipe(stop_) == 0;
  if (listening) port_ = ntohs(address.sin_port);
  thread_ = std::thread([this] { Serve(); });
}

CuttingProxy::~CuttingProxy() {
  close(stop_[1]);
  thread_.join();
  close(stop_[0]);
  close(listener_);
}

std::string CuttingProxy::address() const { return absl::StrCat("127.0.0.1:", port_); }

int CuttingProxy::connections() const {
  absl::MutexLock lock(&mu_);
  return connections_;
}

// One connection at a time: a client has one.
void CuttingProxy::Serve() {
  for (;;) {
    pollfd waited[] = {{stop_[0], POLLIN, 0}, {listener_, POLLIN, 0}};
    if (poll(waited, 2, -1) < 0 || waited[0].revents != 0) return;
    const int near = accept(listener_, nullptr, nullptr);
    uint64_t limit = std::numeric_limits<uint64_t>::max();
    {
      absl::MutexLock lock(&mu_);
      ++connections_;
      if (!cuts_.empty()) {
        limit = cuts_.front();
        cuts_.pop_front();
      }
    }
    const int far = socket(AF_INET, SOCK_STREAM, 0);
    const sockaddr_in address = Loopback(target_port_);
    SendAtOnce(near);
    SendAtOnce(far);
    if (connect(far, reinterpret_cast<const sockaddr*>(&address), sizeof(address)) == 0) Relay(near, far, limit);
    Reset(near);
    Reset(far);
  }
}

void CuttingProxy::Relay(int near, int far, uint64_t limit) {
  for (uint64_t moved = 0; moved < limit;) {
    pollfd waited[] = {{stop_[0], POLLIN, 0}, {near, POLLIN, 0}, {far, POLLIN, 0}};
    if (poll(waited, 3, -1) < 0 || waited[0].revents != 0) return;
    const int from = waited[1].revents != 0 ? near : far;
    const size_t n = Move(from, from == near ? far : near);
    if (n == 0) return;
    moved += n;
  }
}

}  // namespace ballast
