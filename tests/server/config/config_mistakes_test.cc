// What of a configuration was once passed over, or accepted and of no use.
#include <filesystem>
#include <fstream>

#include "gmock/gmock.h"
#include "gtest/gtest.h"

#include "server/config/config.h"

namespace ballast {
namespace {

using ::testing::HasSubstr;
using ::testing::IsEmpty;

class ConfigMistakesTest : public ::testing::Test {
 protected:
  void SetUp() override { std::filesystem::create_directory(directory_); }
  void TearDown() override { std::filesystem::remove_all(directory_); }

  std::string Write(const std::string& text) const {
    const std::string file = (directory_ / "ballast.yaml").string();
    std::ofstream(file, std::ios::binary) << text;
    return file;
  }
  static std::string Error(const std::vector<std::string>& arguments) {
    return std::string(ParseCommandLine(arguments, {}).status().message());
  }
  std::string ErrorOf(const std::string& text) const { return Error({"--config", Write(text)}); }

  const std::filesystem::path directory_ =
      std::filesystem::temp_directory_path() /
      (std::string("ballast_") + ::testing::UnitTest::GetInstance()->current_test_info()->name());
};

TEST_F(ConfigMistakesTest, ANulByteIsRefusedWithItsLine) {
  const std::string file = Write(std::string("threads: 3\n\0access: /a.yaml\n", 27));
  EXPECT_EQ(Error({"--config", file}), file + ":2: has a NUL byte, which no text has; write the file anew");
}

TEST_F(ConfigMistakesTest, AnEmptyNameOfAFileIsRefused) {
  EXPECT_THAT(Error({"--config", ""}), HasSubstr("--config wants a file"));
  EXPECT_THAT(Error({"--config="}), HasSubstr("--config wants a file"));
}

TEST_F(ConfigMistakesTest, AnEmptyItemIsKeptInTheFileAndRefusedInAFlag) {
  const std::vector<std::string> wanted = {"/bin/cp", "--suffix", "", " {folder} "};
  const auto line = ParseCommandLine(
      {"--config", Write("storage:\n  dir: /data\n  on_published: [/bin/cp, --suffix, '', ' {folder} ']\n")}, {});
  ASSERT_TRUE(line.ok()) << line.status();
  EXPECT_EQ(line->config.storage.on_published, wanted);
  const auto again = ParseCommandLine({"--config", Write(PrintConfig(line->config))}, {});
  ASSERT_TRUE(again.ok()) << again.status();
  EXPECT_EQ(again->config.storage.on_published, wanted);
  EXPECT_EQ(
      Error({"--storage.on_published", "/bin/cp,,x"}),
      "--storage.on_published: '/bin/cp,,x' has an empty item; leave a comma out, or write [a, \"\"] in the file");
  EXPECT_THAT(ErrorOf("ops_http:\n  hosts: ['']\n"), HasSubstr("'' is no host name"));
  EXPECT_THAT(ErrorOf("relay:\n  upstream: a:1\n  runs: ['']\n"), HasSubstr("names a run without an id"));
  EXPECT_THAT(ErrorOf("relay:\n  upstream: a:1\n  runs: [Big_Model]\n"),
              HasSubstr("names 'Big_Model', as no run is called; wanted: 1 to 63 of a-z, 0-9 and -"));
  EXPECT_THAT(ParseCommandLine({"--ops_http.hosts", " "}, {})->config.ops_http.hosts, IsEmpty());
}

TEST_F(ConfigMistakesTest, AMessageHoldsABatchOfTheClients) {
  EXPECT_EQ(
      Error({"--limits.message_bytes=319KiB", "--limits.chunk_bytes=64KiB"}),
      "--limits.message_bytes: 326656 is out of range; choose 327680, which a batch of the clients' small messages "
      "needs, to 4194304");
  EXPECT_EQ(Error({"--limits.message_bytes=320KiB", "--limits.chunk_bytes=64KiB"}), "");
}

TEST_F(ConfigMistakesTest, TheHttpPortIsOneOfIpv4) {
  EXPECT_EQ(Error({"--ops_http.listen=[::1]:9464"}),
            "--ops_http.listen: '[::1]:9464' is an address of IPv6, at which the HTTP port cannot be; write "
            "127.0.0.1:9464, or 0.0.0.0:9464 for all");
}

}  // namespace
}  // namespace ballast
