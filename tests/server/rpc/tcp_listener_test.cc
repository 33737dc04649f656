#include "server/rpc/tcp_listener.h"

#include <arpa/inet.h>
#include <fcntl.h>
#include <gmock/gmock.h>
#include <gtest/gtest.h>
#include <netinet/in.h>
#include <netinet/tcp.h>
#include <poll.h>
#include <sys/resource.h>
#include <unistd.h>

#include <array>
#include <string>

#include "absl/strings/str_cat.h"
#include "absl/synchronization/mutex.h"
#include "absl/time/time.h"

namespace ballast {
namespace {

using ::testing::AllOf;
using ::testing::HasSubstr;

int Dial(int family, uint16_t port) {
  sockaddr_storage to{};
  to.ss_family = static_cast<sa_family_t>(family);
  if (family == AF_INET) reinterpret_cast<sockaddr_in&>(to).sin_addr.s_addr = htonl(INADDR_LOOPBACK);
  if (family == AF_INET6) reinterpret_cast<sockaddr_in6&>(to).sin6_addr = in6addr_loopback;
  reinterpret_cast<sockaddr_in&>(to).sin_port = htons(port);
  const int fd = socket(family, SOCK_STREAM | SOCK_CLOEXEC, 0);
  const socklen_t bytes = family == AF_INET ? sizeof(sockaddr_in) : sizeof(sockaddr_in6);
  if (connect(fd, reinterpret_cast<const sockaddr*>(&to), bytes) == 0) return fd;
  close(fd);
  return -1;
}

// What comes until the other end closes, or 30 s are over.
std::string ReadAll(int fd) {
  std::string got;
  std::array<char, 512> part;
  pollfd waited{.fd = fd, .events = POLLIN, .revents = 0};
  while (poll(&waited, 1, 30000) == 1) {
    const ssize_t more = recv(fd, part.data(), part.size(), 0);
    if (more <= 0) return got;
    got.append(part.data(), static_cast<size_t>(more));
  }
  return got + " and then nothing";
}

class TcpListenerTest : public ::testing::Test {
 protected:
  ~TcpListenerTest() override {
    listener_.reset();
    absl::MutexLock lock(&mu_);
    for (const int fd : admitted_) close(fd);
  }
  void Start(const std::string& listen, uint32_t connections = 8, bool tls = false) {
    auto made = TcpListener::Bind(listen);
    ASSERT_TRUE(made.ok()) << made.status();
    listener_ = *std::move(made);
    table_.Limit(connections);
    listener_->Serve(&table_, &metrics_, tls, [this](int, int fd) {
      absl::MutexLock lock(&mu_);
      admitted_.push_back(fd);
    });
  }
  bool Admitted(size_t wanted) {
    const auto there = [&]() ABSL_EXCLUSIVE_LOCKS_REQUIRED(mu_) { return admitted_.size() >= wanted; };
    absl::MutexLock lock(&mu_);
    return mu_.AwaitWithTimeout(absl::Condition(&there), absl::Seconds(30));
  }

  absl::Mutex mu_;
  std::vector<int> admitted_ ABSL_GUARDED_BY(mu_);
  ConnectionTable table_;
  Metrics metrics_{BuildInfo{}};
  std::unique_ptr<TcpListener> listener_;
};

TEST_F(TcpListenerTest, APortIsPickedAndTold) {
  Start("127.0.0.1:0");
  EXPECT_NE(listener_->port(), 0);
  const int fd = Dial(AF_INET, listener_->port());
  EXPECT_TRUE(Admitted(1));
  close(fd);
}

// gRPC pings only while a call is open, so the host of an idle client may vanish without a word.
TEST_F(TcpListenerTest, WhatIsAdmittedIsKeptAliveByTcp) {
  Start("127.0.0.1:0");
  const int fd = Dial(AF_INET, listener_->port());
  ASSERT_TRUE(Admitted(1));
  const auto option = [this](int level, int name) {
    absl::MutexLock lock(&mu_);
    int value = -1;
    socklen_t bytes = sizeof value;
    EXPECT_EQ(getsockopt(admitted_.front(), level, name, &value, &bytes), 0);
    return value;
  };
  EXPECT_EQ(option(SOL_SOCKET, SO_KEEPALIVE), 1);
  EXPECT_EQ(option(IPPROTO_TCP, TCP_KEEPIDLE), 60);
  EXPECT_EQ(option(IPPROTO_TCP, TCP_KEEPINTVL), 10);
  EXPECT_EQ(option(IPPROTO_TCP, TCP_USER_TIMEOUT), 3000) << "ms; it ends a connection before the probes run out";
  EXPECT_EQ(option(IPPROTO_TCP, TCP_NODELAY), 1);
  close(fd);
}

TEST_F(TcpListenerTest, AWildcardOfEitherFamilyIsAllAddresses) {
  for (const char* listen : {"0.0.0.0:0", "[::]:0"}) {
    Start(listen);
    for (const int family : {AF_INET, AF_INET6}) {
      const int fd = Dial(family, listener_->port());
      EXPECT_TRUE(fd >= 0 || family == AF_INET6) << listen << "; a machine may have no IPv6";
      if (fd >= 0) close(fd);
    }
    EXPECT_EQ(listener_->dial_address().ss_family, AF_INET) << listen;
  }
}

TEST_F(TcpListenerTest, ANameIsBoundAtItsAddresses) {
  Start("localhost:0");
  const int fd = Dial(AF_INET, listener_->port());
  EXPECT_TRUE(Admitted(1));
  close(fd);
}

TEST_F(TcpListenerTest, APortInUseIsAnErrorThatNamesItAndTheFix) {
  Start("127.0.0.1:0");
  const std::string address = absl::StrCat("127.0.0.1:", listener_->port());
  EXPECT_THAT(std::string(TcpListener::Bind(address).status().message()),
              AllOf(HasSubstr(absl::StrCat("cannot listen on ", address, ": the address is in use")),
                    HasSubstr("port 0 picks a free one"), HasSubstr("stop what holds it")));
  // 192.0.2.0/24 is for documentation (RFC 5737): no machine has it.
  EXPECT_THAT(std::string(TcpListener::Bind("192.0.2.1:7700").status().message()),
              AllOf(HasSubstr("192.0.2.1:7700"), HasSubstr("Cannot assign requested address")));
  EXPECT_THAT(std::string(TcpListener::Bind("no.such.host.invalid:1").status().message()),
              HasSubstr("cannot listen on no.such.host.invalid:1"));
}

TEST_F(TcpListenerTest, ARefusedConnectionIsToldWhyInHttp2) {
  Start("127.0.0.1:0", 1);
  const int first = Dial(AF_INET, listener_->port());
  ASSERT_TRUE(Admitted(1));
  const int second = Dial(AF_INET, listener_->port());
  const std::string told = ReadAll(second);
  ASSERT_GT(told.size(), 26u);
  EXPECT_EQ(told[3], 4) << "SETTINGS";
  EXPECT_EQ(told[12], 7) << "GOAWAY";
  EXPECT_EQ(static_cast<size_t>(told[11]), told.size() - 18) << "its length";
  EXPECT_EQ(told.substr(26), "too many connections; this daemon takes 1 (limits.connections)");
  close(first);
  close(second);
}

TEST_F(TcpListenerTest, WhereThePortSpeaksTlsARefusedConnectionGetsAnAlert) {
  Start("127.0.0.1:0", 1, /*tls=*/true);
  const int first = Dial(AF_INET, listener_->port());
  ASSERT_TRUE(Admitted(1));
  const int second = Dial(AF_INET, listener_->port());
  EXPECT_EQ(ReadAll(second), std::string("\x15\3\3\0\2\2\x50", 7)) << "fatal, internal_error";
  close(first);
  close(second);
}

TEST_F(TcpListenerTest, WithoutAFileDescriptorWhoComesIsRefusedAndTheNextIsTaken) {
  Start("127.0.0.1:0");
  const int early = Dial(AF_INET, listener_->port());
  ASSERT_TRUE(Admitted(1));
  const int poor = socket(AF_INET, SOCK_STREAM | SOCK_CLOEXEC, 0);
  const int lowest_free = open("/dev/null", O_RDONLY | O_CLOEXEC);
  close(lowest_free);
  rlimit before{};
  ASSERT_EQ(getrlimit(RLIMIT_NOFILE, &before), 0);
  const rlimit none_left{.rlim_cur = static_cast<rlim_t>(lowest_free), .rlim_max = before.rlim_max};
  ASSERT_EQ(setrlimit(RLIMIT_NOFILE, &none_left), 0);
  const sockaddr_storage to = listener_->dial_address();
  EXPECT_EQ(connect(poor, reinterpret_cast<const sockaddr*>(&to), sizeof(sockaddr_in)), 0);
  const std::string told = ReadAll(poor);
  EXPECT_EQ(setrlimit(RLIMIT_NOFILE, &before), 0);
  EXPECT_THAT(told, HasSubstr("no file descriptor left"));  // here: a sanitizer looks at a matcher through a descriptor
  const int late = Dial(AF_INET, listener_->port());
  EXPECT_TRUE(Admitted(2));
  for (const int fd : {early, poor, late}) close(fd);
}

TEST(MostConnectionsTest, TheDefaultLimitFollowsFromTheDescriptors) {
  EXPECT_EQ(*MostConnections(0, 128), 14u);
  EXPECT_EQ(*MostConnections(0, 1024), 462u);
  EXPECT_EQ(*MostConnections(0, 1 << 20), 4096u);
  EXPECT_EQ(*MostConnections(10000, 20000), 10000u);
  EXPECT_THAT(std::string(MostConnections(1000, 1024).status().message()),
              AllOf(HasSubstr("limits.connections: 1000"), HasSubstr("the 1024 files"), HasSubstr("LimitNOFILE")));
  EXPECT_THAT(std::string(MostConnections(0, 127).status().message()), HasSubstr("needs 128 at least"));
}

}  // namespace
}  // namespace ballast
