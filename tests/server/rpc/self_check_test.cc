#include "server/rpc/self_check.h"

#include <arpa/inet.h>
#include <gmock/gmock.h>
#include <gtest/gtest.h>
#include <unistd.h>

#include <string>
#include <thread>

#include "server/base/clock.h"

namespace ballast {
namespace {

using ::testing::HasSubstr;

// A listening socket whose every connection gets these bytes and is closed.
class Port {
 public:
  explicit Port(std::string first_bytes) : first_bytes_(std::move(first_bytes)) {
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

 private:
  void Answer() const {
    for (int client; (client = accept(fd_, nullptr, nullptr)) >= 0; close(client)) {
      send(client, first_bytes_.data(), first_bytes_.size(), MSG_NOSIGNAL);
    }
  }
  const std::string first_bytes_;
  const int fd_ = socket(AF_INET, SOCK_STREAM | SOCK_CLOEXEC, 0);
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
  SelfCheck check(port.address(), 0.01);
  EXPECT_TRUE(check.status().ok());
  port.Close();
  const std::string kRefused = "the gRPC port does not answer: Connection refused";
  EXPECT_THAT(Await(check, kRefused), HasSubstr(kRefused));
}

TEST(SelfCheckTest, APortThatDoesNotSpeakHttp2IsUnavailable) {
  const std::string kClosed = "closed the connection", kNotHttp2 = "does not speak HTTP/2";
  Port silent("");
  EXPECT_THAT(Await(SelfCheck(silent.address(), 0.01), kClosed), HasSubstr(kClosed));
  Port other("HTTP/1.1 400 Bad Request\r\n");
  EXPECT_THAT(Await(SelfCheck(other.address(), 0.01), kNotHttp2), HasSubstr(kNotHttp2));
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
