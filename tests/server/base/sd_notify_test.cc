#include "server/base/sd_notify.h"

#include <sys/socket.h>
#include <sys/un.h>
#include <unistd.h>

#include <array>
#include <filesystem>

#include "absl/strings/str_cat.h"
#include "gtest/gtest.h"

namespace ballast {
namespace {

TEST(SdNotifyTest, SendsOneDatagram) {
  const std::string path =
      (std::filesystem::temp_directory_path() / absl::StrCat("ballast_notify_", getpid())).string();
  sockaddr_un address{};
  address.sun_family = AF_UNIX;
  path.copy(address.sun_path, sizeof(address.sun_path) - 1);
  const int fd = socket(AF_UNIX, SOCK_DGRAM, 0);
  ASSERT_EQ(bind(fd, reinterpret_cast<const sockaddr*>(&address), sizeof(address)), 0);
  EXPECT_TRUE(SdNotify(path, "READY=1"));
  std::array<char, 64> text{};
  EXPECT_EQ(recv(fd, text.data(), text.size(), 0), 7);
  EXPECT_STREQ(text.data(), "READY=1");
  close(fd);
  std::filesystem::remove(path);
  EXPECT_FALSE(SdNotify(path, "READY=1")) << "nobody listens";
  EXPECT_FALSE(SdNotify("", "READY=1")) << "not started by systemd";
}

}  // namespace
}  // namespace ballast
