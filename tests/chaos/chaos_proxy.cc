#include "tests/chaos/chaos_proxy.h"

#include <poll.h>
#include <unistd.h>

#include <algorithm>
#include <limits>
#include <optional>
#include <utility>

#include "absl/strings/str_cat.h"

namespace ballast {
namespace {

// What a connection moves before its first gradient: cuts within it hit the handshake, Attach and Open.
constexpr uint64_t kOpeningBytes = 2000;
constexpr size_t kPieceBytes = 4096;
// How long the client's next bytes may take to count as on their way.
constexpr int kLateWaitMs = 2;

// At most so many bytes; 0: an end is gone.
size_t Move(const LoopbackSocket& from, const LoopbackSocket& to, size_t most) {
  const std::string bytes = from.Receive(most);
  return to.Send(bytes) ? bytes.size() : 0;
}

}  // namespace

ChaosProxy::ChaosProxy(const Options& options)
    : options_(options), listener_(LoopbackSocket::Listen()), random_(options.seed) {
  if (pipe(stop_) == 0) thread_ = std::thread([this] { Serve(); });
}

ChaosProxy::~ChaosProxy() {
  close(stop_[1]);
  thread_.join();
  close(stop_[0]);
}

std::string ChaosProxy::address() const { return absl::StrCat("127.0.0.1:", listener_.port()); }

ChaosProxy::Counts ChaosProxy::counts() const {
  absl::MutexLock lock(&mu_);
  return counts_;
}

void ChaosProxy::Begin() {
  absl::MutexLock lock(&mu_);
  begun_ = true;
}

bool ChaosProxy::begun() const {
  absl::MutexLock lock(&mu_);
  return begun_;
}

uint64_t ChaosProxy::DrawLimit() {
  return random_() % 12 == 0 ? random_() % kOpeningBytes : random_() % (2 * options_.mean_bytes);
}

// One connection at a time: a client has one.
void ChaosProxy::Serve() {
  for (bool going = true; going;) {
    pollfd waited[] = {{stop_[0], POLLIN, 0}, {listener_.fd(), POLLIN, 0}};
    if (poll(waited, 2, -1) < 0 || waited[0].revents != 0) return;
    LoopbackSocket near = listener_.Accept(), far = LoopbackSocket::ConnectTo(PortOf(options_.target));
    going = far.is_open() && Relay(&near, &far);
  }
}

bool ChaosProxy::Relay(LoopbackSocket* near, LoopbackSocket* far) {
  std::optional<uint64_t> left;  // bytes until the cut
  while (left != 0) {
    if (!left && begun()) left = DrawLimit();
    pollfd waited[] = {{stop_[0], POLLIN, 0}, {near->fd(), POLLIN, 0}, {far->fd(), POLLIN, 0}};
    if (poll(waited, 3, -1) < 0 || waited[0].revents != 0) return false;
    const size_t most = std::min<uint64_t>(kPieceBytes, left.value_or(kPieceBytes));
    const size_t n = waited[2].revents != 0 ? MoveDown(*near, *far, most) : Move(*near, *far, most);
    if (n == 0) return true;
    if (left) *left -= n;
  }
  const bool late = random_() % 2 == 0;
  {
    absl::MutexLock lock(&mu_);
    ++counts_.cuts;
    counts_.late += late ? 1 : 0;
  }
  if (late) CutLate(near, far);
  return true;
}

// Before a piece goes down, what was held back of the last connection goes up: the daemon has made its answer already.
size_t ChaosProxy::MoveDown(const LoopbackSocket& near, const LoopbackSocket& far, size_t most) {
  if (past_.far.is_open() && pieces_until_late_-- == 0) {
    // The daemon may have ended that connection by itself.
    if (past_.far.Send(past_.bytes)) past_.far.HalfClose();
    past_.bytes.clear();
    pieces_until_late_ = std::numeric_limits<uint64_t>::max();
  }
  return Move(far, near, most);
}

void ChaosProxy::CutLate(LoopbackSocket* near, LoopbackSocket* far) {
  std::string held;
  pollfd waited = {near->fd(), POLLIN, 0};
  while (held.size() < kLateBytes && poll(&waited, 1, kLateWaitMs) > 0) {
    const std::string bytes = near->Receive(kPieceBytes);
    if (bytes.empty()) break;
    held += bytes;
  }
  near->Reset();
  past_ = {std::move(*far), std::move(held)};
  pieces_until_late_ = random_() % 4;
}

}  // namespace ballast
