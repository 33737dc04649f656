#include "server/shm/shm_listener.h"

#include <fcntl.h>
#include <gmock/gmock.h>
#include <gtest/gtest.h>
#include <poll.h>
#include <sys/resource.h>
#include <sys/un.h>
#include <unistd.h>

#include <cstring>
#include <string>

#include "absl/strings/str_cat.h"

namespace ballast {
namespace {

class ShmListenerTest : public ::testing::Test {
 protected:
  // By a socket that was there before: with no descriptor left a client could not make one. Static, as all that is
  // called then: sanitizers open a pipe to look at an object.
  static void Connect(int fd, const std::string& path) {
    sockaddr_un to{};
    to.sun_family = AF_UNIX;
    std::memcpy(to.sun_path, path.data(), path.size());
    EXPECT_EQ(connect(fd, reinterpret_cast<const sockaddr*>(&to), sizeof to), 0) << std::strerror(errno);
  }
  // That the other end hangs up; it would wait two seconds for a hello, and longer for what it cannot accept.
  static bool HungUp(int fd) {
    pollfd waited{.fd = fd, .events = POLLRDHUP, .revents = 0};
    return poll(&waited, 1, 30000) == 1;
  }
  static void LimitDescriptors(rlim_t most) {
    rlimit limit{};
    ASSERT_EQ(getrlimit(RLIMIT_NOFILE, &limit), 0);
    limit.rlim_cur = most;
    ASSERT_EQ(setrlimit(RLIMIT_NOFILE, &limit), 0);
  }

  const std::string path_ = absl::StrCat(::testing::TempDir(), "listener-", getpid());
  Sessions sessions_;
  const RpcEnvironment environment_{.sessions = &sessions_};
};

TEST_F(ShmListenerTest, WithoutAFileDescriptorWhoComesIsTurnedAway) {
  auto listener = ShmListener::Start(environment_, path_, "");
  ASSERT_TRUE(listener.ok()) << listener.status();
  rlimit before{};
  ASSERT_EQ(getrlimit(RLIMIT_NOFILE, &before), 0);
  const int poor = socket(AF_UNIX, SOCK_SEQPACKET | SOCK_CLOEXEC, 0);
  const int scarce = socket(AF_UNIX, SOCK_SEQPACKET | SOCK_CLOEXEC, 0);
  const int lowest_free = open("/dev/null", O_RDONLY | O_CLOEXEC);
  close(lowest_free);
  LimitDescriptors(static_cast<rlim_t>(lowest_free));
  Connect(poor, path_);
  EXPECT_TRUE(HungUp(poor));
  // There is one, which the daemon keeps for itself.
  LimitDescriptors(static_cast<rlim_t>(lowest_free) + 1);
  Connect(scarce, path_);
  EXPECT_TRUE(HungUp(scarce));
  LimitDescriptors(before.rlim_cur);
  const auto late = ShmSocket::Connect(path_);
  ASSERT_TRUE(late.ok()) << late.status();
  EXPECT_FALSE(late->Ask({}, 10).ok()) << "it is heard, and no session has this token";
  close(poor);
  close(scarce);
}

}  // namespace
}  // namespace ballast
