#include "tests/client/cutting_proxy.h"

#include <poll.h>
#include <unistd.h>

#include <limits>
#include <utility>

#include "absl/strings/str_cat.h"

namespace ballast {

CuttingProxy::CuttingProxy(const std::string& target, std::deque<uint64_t> cuts)
    : target_port_(PortOf(target)), listener_(LoopbackSocket::Listen()), cuts_(std::move(cuts)) {
  if (pipe(stop_) == 0) thread_ = std::thread([this] { Loop(); });
}

CuttingProxy::~CuttingProxy() {
  close(stop_[1]);
  thread_.join();
  close(stop_[0]);
}

std::string CuttingProxy::address() const { return absl::StrCat("127.0.0.1:", listener_.port()); }

int CuttingProxy::connections() const {
  absl::MutexLock lock(&mu_);
  return connections_;
}

// One connection at a time: a client has one.
void CuttingProxy::Loop() {
  for (;;) {
    pollfd waited[] = {{stop_[0], POLLIN, 0}, {listener_.fd(), POLLIN, 0}};
    if (poll(waited, 2, -1) < 0 || waited[0].revents != 0) return;
    const LoopbackSocket near = listener_.Accept();
    uint64_t limit = std::numeric_limits<uint64_t>::max();
    {
      absl::MutexLock lock(&mu_);
      ++connections_;
      if (!cuts_.empty()) {
        limit = cuts_.front();
        cuts_.pop_front();
      }
    }
    const LoopbackSocket far = LoopbackSocket::ConnectTo(target_port_);
    if (far.is_open()) Relay(near, far, limit);
  }
}

void CuttingProxy::Relay(const LoopbackSocket& near, const LoopbackSocket& far, uint64_t limit) {
  for (uint64_t moved = 0; moved < limit;) {
    pollfd waited[] = {{stop_[0], POLLIN, 0}, {near.fd(), POLLIN, 0}, {far.fd(), POLLIN, 0}};
    if (poll(waited, 3, -1) < 0 || waited[0].revents != 0) return;
    const bool up = waited[1].revents != 0;
    const std::string bytes = (up ? near : far).Receive(4096);
    if (bytes.empty() || !(up ? far : near).Send(bytes)) return;
    moved += bytes.size();
  }
}

}  // namespace ballast
