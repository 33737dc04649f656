#include "server/rpc/connection_table.h"

#include <arpa/inet.h>
#include <gmock/gmock.h>
#include <gtest/gtest.h>
#include <unistd.h>

#include <array>
#include <memory>
#include <string>
#include <utility>
#include <vector>

#include "absl/strings/str_cat.h"

#include "server/base/clock.h"

namespace ballast {
namespace {

using ::testing::HasSubstr;

sockaddr_storage V4(const char* text) {
  sockaddr_storage address{};
  auto& v4 = reinterpret_cast<sockaddr_in&>(address);
  v4.sin_family = AF_INET;
  EXPECT_EQ(inet_pton(AF_INET, text, &v4.sin_addr), 1);
  return address;
}

sockaddr_storage V6(const char* text) {
  sockaddr_storage address{};
  auto& v6 = reinterpret_cast<sockaddr_in6&>(address);
  v6.sin6_family = AF_INET6;
  EXPECT_EQ(inet_pton(AF_INET6, text, &v6.sin6_addr), 1);
  return address;
}

class ConnectionTableTest : public ::testing::Test {
 protected:
  ~ConnectionTableTest() override {
    for (const int fd : fds_) close(fd);
  }
  int NewSocket() { return fds_.emplace_back(socket(AF_INET, SOCK_STREAM, 0)); }
  void CloseOne() {
    close(fds_.front());
    fds_.erase(fds_.begin());
  }
  // A full table is looked through every 20 ms.
  static bool AdmitsInTime(ConnectionTable* table, int fd, const sockaddr_storage& peer) {
    const double begin_s = MonotonicSeconds();
    while (!table->Admit(fd, peer).ok()) {
      if (MonotonicSeconds() - begin_s > 30) return false;
    }
    return true;
  }

  std::vector<int> fds_;
};

TEST_F(ConnectionTableTest, TakesAsManyAsItMayAndMoreWhenOneIsClosed) {
  ConnectionTable table(4);
  for (int i = 0; i < 3; ++i) EXPECT_TRUE(table.Admit(NewSocket(), V4("10.0.0.1")).ok());
  EXPECT_TRUE(table.Admit(NewSocket(), V4("10.0.0.2")).ok());
  EXPECT_EQ(table.connections(), 4u);
  const int next = NewSocket();
  EXPECT_THAT(std::string(table.Admit(next, V4("10.0.0.3")).message()), HasSubstr("this daemon takes 4"));
  CloseOne();
  EXPECT_TRUE(AdmitsInTime(&table, next, V4("10.0.0.3")));
  EXPECT_EQ(table.connections(), 4u);
}

TEST_F(ConnectionTableTest, OneAddressLeavesAQuarterToOthers) {
  ConnectionTable table(8);
  for (int i = 0; i < 6; ++i) EXPECT_TRUE(table.Admit(NewSocket(), V4("10.0.0.1")).ok());
  EXPECT_THAT(std::string(table.Admit(NewSocket(), V4("10.0.0.1")).message()), HasSubstr("one may have 6"));
  EXPECT_THAT(std::string(table.Admit(NewSocket(), V6("::ffff:10.0.0.1")).message()), HasSubstr("of this address"));
  EXPECT_TRUE(table.Admit(NewSocket(), V4("10.0.0.2")).ok());
  CloseOne();
  EXPECT_TRUE(AdmitsInTime(&table, NewSocket(), V4("10.0.0.1")));
}

TEST_F(ConnectionTableTest, AddressesOfOneIpv6NetworkCountAsOneHost) {
  ConnectionTable table(4);
  for (const char* each : {"2001:db8::1", "2001:db8::2", "2001:db8::ffff:3"}) {
    EXPECT_TRUE(table.Admit(NewSocket(), V6(each)).ok());
  }
  EXPECT_FALSE(table.Admit(NewSocket(), V6("2001:db8::4")).ok());
  EXPECT_TRUE(table.Admit(NewSocket(), V6("2001:db8:1::4")).ok());
}

TEST_F(ConnectionTableTest, AReusedDescriptorIsCountedOnce) {
  ConnectionTable table(4);
  for (int i = 0; i < 20; ++i) {
    EXPECT_TRUE(table.Admit(NewSocket(), V4("10.0.0.1")).ok()) << i;
    EXPECT_EQ(table.connections(), 1u);
    CloseOne();
  }
}

class TrustTest : public ConnectionTableTest {
 protected:
  // This end of a connection whose other end says something and listens.
  int Connected(uint16_t* port) {
    sockaddr_in at{
        .sin_family = AF_INET, .sin_port = 0, .sin_addr = {.s_addr = htonl(INADDR_LOOPBACK)}, .sin_zero = {}};
    socklen_t bytes = sizeof at;
    auto* address = reinterpret_cast<sockaddr*>(&at);
    const int listener = NewSocket(), other = NewSocket();
    EXPECT_EQ(bind(listener, address, bytes), 0);
    EXPECT_EQ(listen(listener, 1), 0);
    EXPECT_EQ(getsockname(listener, address, &bytes), 0);
    EXPECT_EQ(connect(other, address, bytes), 0);
    EXPECT_EQ(send(other, "words", 5, 0), 5);
    const int fd = fds_.emplace_back(accept(listener, address, &bytes));
    *port = ntohs(at.sin_port);
    return fd;
  }
  // And what it was sent is there.
  static bool Open(int fd) {
    std::array<char, 8> got;
    return recv(fd, got.data(), got.size(), MSG_PEEK) > 0;
  }
};

TEST_F(TrustTest, RanksThatShareAConnectionKeepNobodyOut) {
  ConnectionTable table(8);
  uint16_t port = 0;
  const int shared = Connected(&port);
  sockaddr_storage peer = V4("127.0.0.1");
  reinterpret_cast<sockaddr_in&>(peer).sin_port = htons(port);
  EXPECT_TRUE(table.Admit(shared, peer).ok());
  table.Trust(absl::StrCat("ipv4:127.0.0.1:", port));
  for (int64_t i = 0; i < 2 * ConnectionTable::kMostCalls; ++i) table.OnCall();  // more than HTTP/2 lets it have
  EXPECT_TRUE(table.Admit(NewSocket(), V4("10.0.0.1")).ok());
  for (int64_t i = 0; i < ConnectionTable::kMostCalls; ++i) table.OnCall();  // now with one that is cut
  EXPECT_FALSE(table.Admit(NewSocket(), V4("10.0.0.2")).ok());
  for (int64_t i = 0; i < 3 * ConnectionTable::kMostCalls - 64; ++i) table.OnCallOver();
  EXPECT_TRUE(table.Admit(NewSocket(), V4("10.0.0.2")).ok()) << "its stream each, of 64 ranks, are no flood";
}

TEST_F(TrustTest, UntrustedConnectionsAreCutTogetherWithTheirCalls) {
  ConnectionTable table(8);
  uint16_t port = 0, other_port = 0;
  const int trusted = Connected(&port), other = Connected(&other_port);
  for (const auto& [fd, its_port] : {std::pair(trusted, port), std::pair(other, other_port)}) {
    sockaddr_storage peer = V4("127.0.0.1");
    reinterpret_cast<sockaddr_in&>(peer).sin_port = htons(its_port);
    EXPECT_TRUE(table.Admit(fd, peer).ok());
  }
  table.Trust(absl::StrCat("ipv4:127.0.0.1:", port));
  constexpr int64_t kMost = ConnectionTable::kMostCalls + ConnectionTable::kCallsOfTrusted;
  for (int64_t i = 0; i < kMost - 1; ++i) table.OnCall();
  EXPECT_TRUE(Open(other)) << "as many as there may be";
  for (int64_t i = 0; i < kMost; ++i) table.OnCall();
  EXPECT_TRUE(Open(trusted));
  EXPECT_FALSE(Open(other));
  const int late = NewSocket();
  EXPECT_THAT(std::string(table.Admit(late, V4("10.0.0.1")).message()), HasSubstr("too many calls at once"));
  for (int64_t i = 0; i < 2 * kMost - 1; ++i) table.OnCallOver();
  EXPECT_TRUE(table.Admit(late, V4("10.0.0.1")).ok());
}

class ReadersTest : public TrustTest {
 protected:
  void SetUp() override {
    for (auto [fd, peer] : {std::pair(&reading_, &reader_), std::pair(&other_, &stranger_)}) {
      uint16_t port = 0;
      *fd = Connected(&port);
      sockaddr_storage from = V4("127.0.0.1");
      reinterpret_cast<sockaddr_in&>(from).sin_port = htons(port);
      EXPECT_TRUE(table_.Admit(*fd, from).ok());
      *peer = absl::StrCat("ipv4:127.0.0.1:", port);
    }
  }
  void Call(int64_t times) {
    for (int64_t i = 0; i < times; ++i) table_.OnCall();
  }

  static constexpr int64_t kMost = ConnectionTable::kMostCalls;
  ConnectionTable table_{8};
  int reading_ = 0, other_ = 0;
  std::string reader_, stranger_;
};

TEST_F(ReadersTest, ThoseThatRunsHaveTakenInAreNoFlood) {
  std::vector<std::shared_ptr<void>> readers;
  for (int64_t i = 0; i < 3 * kMost; ++i) {
    Call(1);
    readers.push_back(table_.CountReader(reader_));
  }
  EXPECT_TRUE(Open(reading_) && Open(other_));
  EXPECT_TRUE(table_.Admit(NewSocket(), V4("10.0.0.1")).ok());
  readers.resize(readers.size() - 128);  // whose calls are there still
  Call(kMost - 128 - 1);
  EXPECT_TRUE(Open(other_));
  Call(1);
  EXPECT_FALSE(Open(other_)) << "what else there is, is";
}

TEST_F(ReadersTest, AStrangersFloodDoesNotCutThem) {
  const auto reader = table_.CountReader(reader_);
  Call(kMost + 64);
  EXPECT_FALSE(Open(other_));
  Call(kMost - 64);  // that had been read by then
  EXPECT_TRUE(Open(reading_));
}

TEST_F(ReadersTest, OneThatFloodsIsCutAfterTheOthers) {
  const auto reader = table_.CountReader(reader_);
  Call(3 * kMost);
  EXPECT_FALSE(Open(other_));
  EXPECT_FALSE(Open(reading_));
}

TEST_F(ReadersTest, OneThatFloodsAloneIsCutAtOnce) {
  const auto reader = table_.CountReader(reader_), other = table_.CountReader(stranger_);
  Call(kMost + 64);
  EXPECT_FALSE(Open(reading_));
}

TEST_F(ConnectionTableTest, ATableOfOneTakesOne) {
  ConnectionTable table(1);
  EXPECT_TRUE(table.Admit(NewSocket(), V4("10.0.0.1")).ok());
  EXPECT_FALSE(table.Admit(NewSocket(), V4("10.0.0.2")).ok());
}

}  // namespace
}  // namespace ballast
