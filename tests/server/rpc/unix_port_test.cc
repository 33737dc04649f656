#include "server/rpc/unix_port.h"

#include <sys/socket.h>
#include <sys/stat.h>
#include <sys/un.h>
#include <unistd.h>

#include <cstring>
#include <filesystem>
#include <fstream>

#include "gmock/gmock.h"
#include "gtest/gtest.h"

namespace ballast {
namespace {

using ::testing::HasSubstr;

class UnixPortTest : public ::testing::Test {
 protected:
  void SetUp() override { ASSERT_NE(mkdtemp(folder_.data()), nullptr); }
  void TearDown() override { std::filesystem::remove_all(folder_); }
  std::string path() const { return folder_ + "/grpc"; }
  // A socket at the path; whoever closes it leaves the path.
  int Listen() const {
    sockaddr_un address{};
    address.sun_family = AF_UNIX;
    std::memcpy(address.sun_path, path().data(), path().size());
    const int fd = socket(AF_UNIX, SOCK_STREAM | SOCK_CLOEXEC, 0);
    EXPECT_EQ(bind(fd, reinterpret_cast<const sockaddr*>(&address), sizeof address), 0);
    EXPECT_EQ(listen(fd, 1), 0);
    return fd;
  }
  std::string Error(const std::string& at) const { return std::string(ReadyUnixPort("unix:" + at).message()); }

  std::string folder_ = "/tmp/ballast-port-XXXXXX";
};

TEST_F(UnixPortTest, APathWithoutASocketIsFree) {
  EXPECT_EQ(Error(path()), "");
  EXPECT_FALSE(std::filesystem::exists(path()));
}

TEST_F(UnixPortTest, ADaemonThatAnswersKeepsItsSocket) {
  const int fd = Listen();
  EXPECT_THAT(Error(path()), HasSubstr("cannot listen on unix:" + path() + ": a daemon answers there"));
  EXPECT_TRUE(std::filesystem::is_socket(path()));
  close(fd);
}

TEST_F(UnixPortTest, TheSocketOfOneThatIsGoneIsRemoved) {
  close(Listen());
  EXPECT_EQ(Error(path()), "");
  EXPECT_FALSE(std::filesystem::exists(path()));
}

TEST_F(UnixPortTest, WhatKeepsItFromListeningIsNamed) {
  EXPECT_THAT(Error(folder_ + "/none/grpc"), HasSubstr(": No such file or directory; "));
  std::ofstream(path()) << "text";
  EXPECT_THAT(Error(path()), HasSubstr(": a file is there, which is no socket; "));
  EXPECT_TRUE(std::filesystem::exists(path()));
}

}  // namespace
}  // namespace ballast
