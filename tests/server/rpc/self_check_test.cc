#include "server/rpc/self_check.h"

#include <arpa/inet.h>
#include <gmock/gmock.h>
#include <gtest/gtest.h>
#include <poll.h>
#include <unistd.h>

#include <array>
#include <atomic>
#include <string>
#include <thread>

#include "server/base/clock.h"
#include "tests/eventually.h"

namespace ballast {
namespace {

using ::testing::HasSubstr;

// A listening socket whose every connection gets these bytes and is closed.
class Port {
 public:
  explicit Port(std::string first_bytes, bool hears = false) : first_bytes_(std::move(first_bytes)), hears_(hears) {
    auto& v4 = reinterpret_cast<sockaddr_in&>(address_);
    v4.sin_family = AF_INET;
    v4.sin_addr.s_addr = htonl(INADDR_LOOPBACK);
    socklen_t bytes = sizeof(sockaddr_in);
    EXPECT_EQ(bind(fd_, reinterpret_cast<sockaddr*>(&address_), bytes), 0);
    EXPECT_EQ(getsockname(fd_, reinterpret_cast<sockaddr*>(&address_), &bytes), 0);
    EXPECT_EQ(listen(fd_, 16), 0);
    thread_ = std::thread([this] { Answer(); });
  }
  ~Port() { Close(); }
  void Close() {
    if (!thread_.joinable()) return;
    shutdown(fd_, SHUT_RDWR);
    thread_.join();
    close(fd_);
  }
  const sockaddr_storage& address() const { return address_; }
  int answered() const { return answered_; }

 private:
  void Answer() {
    for (int client; (client = accept(fd_, nullptr, nullptr)) >= 0; close(client)) {
      send(client, first_bytes_.data(), first_bytes_.size(), MSG_NOSIGNAL);
      // What the client says is read, so that closing does not throw the answer away.
      std::array<char, 1024> said;
      pollfd hears{.fd = client, .events = POLLIN, .revents = 0};
      if (hears_ && poll(&hears, 1, 1000) == 1) {
        EXPECT_GE(recv(client, said.data(), said.size(), 0), 0);
      }
      ++answered_;
    }
  }
  const std::string first_bytes_;
  const bool hears_;  // the client says something
  const int fd_ = socket(AF_INET, SOCK_STREAM | SOCK_CLOEXEC, 0);
  std::atomic<int> answered_ = 0;
  sockaddr_storage address_{};
  std::thread thread_;
};

const std::string kSettingsFrame("\0\0\0\4\0\0\0\0\0", 9);

// What it says once `words` are in it; the last it said where they are not within 30 s. A port that is closed says more
// than one thing: a connection that it had not taken is reset, the next is refused.
std::string Await(const SelfCheck& check, const std::string& words) {
  const double begin_s = MonotonicSeconds();
  std::string said;
  do {
    std::this_thread::yield();
    said = std::string(check.status().message());
  } while (said.find(words) == std::string::npos && MonotonicSeconds() - begin_s < 30);
  return said;
}

TEST(SelfCheckTest, APortThatSpeaksHttp2IsFineUntilItIsGone) {
  Port port(kSettingsFrame);
  SelfCheck check(port.address(), /*tls=*/false, 0.01);
  EXPECT_TRUE(check.status().ok());
  port.Close();
  const std::string kRefused = "the gRPC port does not answer: Connection refused";
  EXPECT_THAT(Await(check, kRefused), HasSubstr(kRefused));
}

TEST(SelfCheckTest, APortThatSpeaksTlsIsFineAlsoWhereItTurnsConnectionsAway) {
  const std::string kNotTls = "does not speak TLS";
  for (const std::string& answer : {std::string("\x16\3\3\0\x7a\2\0\0\x76", 9), std::string("\x15\3\3\0\2\2\x50", 7)}) {
    Port port(answer, /*hears=*/true);
    const SelfCheck check(port.address(), /*tls=*/true, 0.01);
    ASSERT_TRUE(Soon([&] { return port.answered() > 2; }));
    EXPECT_TRUE(check.status().ok()) << check.status();
  }
  Port plain(kSettingsFrame, /*hears=*/true);
  EXPECT_THAT(Await(SelfCheck(plain.address(), /*tls=*/true, 0.01), kNotTls), HasSubstr(kNotTls));
}

TEST(SelfCheckTest, APortThatDoesNotSpeakHttp2IsUnavailable) {
  const std::string kClosed = "closed the connection", kNotHttp2 = "does not speak HTTP/2";
  Port silent("");
  EXPECT_THAT(Await(SelfCheck(silent.address(), /*tls=*/false, 0.01), kClosed), HasSubstr(kClosed));
  Port other("HTTP/1.1 400 Bad Request\r\n");
  EXPECT_THAT(Await(SelfCheck(other.address(), /*tls=*/false, 0.01), kNotHttp2), HasSubstr(kNotHttp2));
}

TEST(SelfCheckTest, AStopDoesNotWaitForAnAnswer) {
  const int deaf = socket(AF_INET, SOCK_STREAM | SOCK_CLOEXEC, 0);
  sockaddr_storage address{};
  auto& v4 = reinterpret_cast<sockaddr_in&>(address);
  v4.sin_family = AF_INET;
  v4.sin_addr.s_addr = htonl(INADDR_LOOPBACK);
  socklen_t bytes = sizeof(sockaddr_in);
  ASSERT_EQ(bind(deaf, reinterpret_cast<sockaddr*>(&address), bytes), 0);
  ASSERT_EQ(getsockname(deaf, reinterpret_cast<sockaddr*>(&address), &bytes), 0);
  ASSERT_EQ(listen(deaf, 16), 0);  // connected to by the kernel, and never accepted
  const double begin_s = MonotonicSeconds();
  {
    const SelfCheck check(address, 0);
    const int met = accept(deaf, nullptr, nullptr);  // it is waiting for the first frame
    EXPECT_GE(met, 0);
    close(deaf);
    EXPECT_TRUE(check.status().ok());
  }
  EXPECT_LT(MonotonicSeconds() - begin_s, SelfCheck::kAnswerS);
}

}  // namespace
}  // namespace ballast
