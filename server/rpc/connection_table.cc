#include "server/rpc/connection_table.h"

#include <arpa/inet.h>
#include <malloc.h>
#include <netinet/in.h>
#include <sys/stat.h>

#include <algorithm>
#include <array>
#include <cstring>
#include <iterator>
#include <utility>

#include "absl/strings/cord.h"
#include "absl/strings/str_cat.h"

#include "server/base/clock.h"
#include "server/base/log.h"

namespace ballast {
namespace {

// A full table is searched for closed connections no more often than this, however many clients try to connect.
constexpr double kLookEveryS = 0.02;
constexpr double kCountEveryS = 1;
constexpr char kReason[] = "ballast-reason";
// Connections are cut no more often than this, however many calls there are.
constexpr int64_t kLookEveryCalls = 64;

// 0: there is no socket.
uint64_t InodeOf(int fd) {
  struct stat found {};
  return fstat(fd, &found) == 0 && S_ISSOCK(found.st_mode) ? found.st_ino : 0;
}

// The bytes of an IPv4 address, also one written as IPv6; or the network part of an IPv6 address, since a host may have
// all addresses of its network.
std::string KeyOf(const sockaddr_storage& peer) {
  if (peer.ss_family == AF_INET) {
    const auto& v4 = reinterpret_cast<const sockaddr_in&>(peer);
    return {reinterpret_cast<const char*>(&v4.sin_addr), sizeof v4.sin_addr};
  }
  if (peer.ss_family != AF_INET6) return "";
  const in6_addr& v6 = reinterpret_cast<const sockaddr_in6&>(peer).sin6_addr;
  const char* bytes = reinterpret_cast<const char*>(&v6);
  return IN6_IS_ADDR_V4MAPPED(&v6) ? std::string(bytes + 12, 4) : std::string(bytes, 8);
}

std::string UriOf(const sockaddr_storage& peer) {
  std::array<char, INET6_ADDRSTRLEN> host{};
  const std::string key = KeyOf(peer);
  const auto port = ntohs(reinterpret_cast<const sockaddr_in&>(peer).sin_port);  // sin6_port is at the same place
  if (key.size() == sizeof(in_addr)) {
    inet_ntop(AF_INET, key.data(), host.data(), host.size());
    return absl::StrCat("ipv4:", host.data(), ":", port);
  }
  if (peer.ss_family != AF_INET6) return "";
  inet_ntop(AF_INET6, &reinterpret_cast<const sockaddr_in6&>(peer).sin6_addr, host.data(), host.size());
  return absl::StrCat("ipv6:%5B", host.data(), "%5D:", port);
}

// Cuts the connection so that gRPC finds it closed, without the bytes received before: after a shutdown gRPC would
// still read those, megabytes of them.
bool Disconnect(int fd) {
  const sockaddr nobody{.sa_family = AF_UNSPEC, .sa_data = {}};
  return connect(fd, &nobody, sizeof nobody) == 0;
}

}  // namespace

void ConnectionTable::Forget(ByFd::iterator connection) {
  const auto peer = of_peer_.find(connection->second.peer);
  if (--peer->second == 0) of_peer_.erase(peer);
  by_fd_.erase(connection);
}

void ConnectionTable::ForgetClosed() {
  const double now_s = MonotonicSeconds();
  if (now_s < looked_at_s_ + kLookEveryS) return;
  looked_at_s_ = now_s;
  ForgetClosedNow();
}

void ConnectionTable::ForgetClosedNow() {
  for (auto it = by_fd_.begin(); it != by_fd_.end();) {
    const auto next = std::next(it);
    if (InodeOf(it->first) != it->second.inode) Forget(it);
    it = next;
  }
}

void ConnectionTable::Limit(uint32_t most) {
  absl::MutexLock lock(&mu_);
  most_ = most;
  most_of_peer_ = most - most / 4;
}

uint32_t ConnectionTable::connections() const {
  absl::MutexLock lock(&mu_);
  return static_cast<uint32_t>(by_fd_.size());
}

uint32_t ConnectionTable::CountOpen() {
  absl::MutexLock lock(&mu_);
  if (const double now_s = MonotonicSeconds(); now_s >= counted_at_s_ + kCountEveryS) {
    counted_at_s_ = now_s;
    ForgetClosedNow();
  }
  return static_cast<uint32_t>(by_fd_.size());
}

void ConnectionTable::Trust(const std::string& peer) {
  absl::MutexLock lock(&mu_);
  for (auto& [fd, connection] : by_fd_) connection.trusted |= connection.uri == peer;
}

void ConnectionTable::OnCall() {
  const int64_t calls = ++calls_;
  ++made_;
  if (calls % kLookEveryCalls != 0 || calls < kMostCalls) return;
  uint64_t cut = 0;
  {
    absl::MutexLock lock(&mu_);
    cut = CutOthers();
  }
  if (cut == 0) return;
  Log(LogLevel::kWarn, "calls_flooded", "more calls were open than there can be: connections were cut",
      {{"calls", calls}, {"connections", cut}});
}

std::shared_ptr<void> ConnectionTable::CountReader(const std::string& peer) {
  {
    absl::MutexLock lock(&mu_);
    for (auto& [fd, connection] : by_fd_) connection.reads |= connection.uri == peer;
  }
  ++*readers_;
  return {readers_.get(), [readers = readers_](void*) { --*readers; }};
}

int64_t ConnectionTable::CallsBesides() const {
  return *readers_ + kCallsOfTrusted * std::count_if(by_fd_.begin(), by_fd_.end(),
                                                     [](const auto& each) { return each.second.trusted; });
}

uint64_t ConnectionTable::CutOthers() {
  ForgetClosedNow();
  if (calls_ < kMostCalls + CallsBesides()) return 0;
  uint64_t cut = Cut(/*reading=*/false);
  // Calls that gRPC had read by then, of those that were cut, are no readers' doing.
  const bool by_readers = flooded_ ? made_ >= made_at_cut_ + kMostCalls : cut == 0;
  if (by_readers) cut += Cut(/*reading=*/true);
  if (cut > 0) made_at_cut_ = made_;
  flooded_ = flooded_ || cut > 0;  // who is trusted is not cut, and keeps nobody out
  return cut;
}

uint64_t ConnectionTable::Cut(bool reading) {
  uint64_t cut = 0;
  for (auto& [fd, connection] : by_fd_) {
    if (connection.trusted || connection.cut || connection.reads != reading) continue;
    // If gRPC has closed it just now, and its number already belongs to another connection, that one is cut instead;
    // its client comes again.
    connection.cut = Disconnect(fd);
    cut += connection.cut ? 1 : 0;
  }
  return cut;
}

absl::Status ConnectionTable::CheckCalls() {
  bool over = false;
  {
    absl::MutexLock lock(&mu_);
    if (!flooded_) return absl::OkStatus();
    over = calls_ < kMostCalls / 2 + CallsBesides();
    flooded_ = !over;
  }
  if (!over) return RefusedConnection("calls", "too many calls at once; the daemon is getting rid of them");
  malloc_trim(0);  // each thread that made such calls keeps their memory for itself, else
  return absl::OkStatus();
}

absl::Status ConnectionTable::Check(const std::string& peer) const {
  if (by_fd_.size() >= most_) {
    return RefusedConnection("all",
                             absl::StrCat("too many connections; this daemon takes ", most_, " (limits.connections)"));
  }
  const auto found = of_peer_.find(peer);
  if (found == of_peer_.end() || found->second < most_of_peer_) return absl::OkStatus();
  return RefusedConnection("address", absl::StrCat("too many connections of this address; one may have ", most_of_peer_,
                                                   ", three quarters of limits.connections"));
}

absl::Status ConnectionTable::Admit(int fd, const sockaddr_storage& peer) {
  if (absl::Status flooded = CheckCalls(); !flooded.ok()) return flooded;
  absl::MutexLock lock(&mu_);
  // Its number was free, so the connection that had it is closed.
  if (const auto before = by_fd_.find(fd); before != by_fd_.end()) Forget(before);
  const std::string key = KeyOf(peer);
  if (!Check(key).ok()) ForgetClosed();
  if (absl::Status refused = Check(key); !refused.ok()) return refused;
  by_fd_[fd] = {.inode = InodeOf(fd), .peer = key, .uri = UriOf(peer)};
  ++of_peer_[key];
  return absl::OkStatus();
}

absl::Status RefusedConnection(absl::string_view reason, absl::string_view why) {
  absl::Status refused = absl::ResourceExhaustedError(why);
  refused.SetPayload(kReason, absl::Cord(reason));
  return refused;
}

std::string ReasonOf(const absl::Status& refused) {
  const auto reason = refused.GetPayload(kReason);
  return reason ? std::string(*reason) : "all";
}

}  // namespace ballast
