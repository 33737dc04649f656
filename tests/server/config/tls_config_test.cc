// Who may reach the ports: section tls, insecure, and how the metrics' port is protected.
#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include <filesystem>
#include <fstream>
#include <map>
#include <string>
#include <vector>

#include "absl/strings/str_cat.h"

#include "server/config/config.h"

namespace ballast {
namespace {

using ::testing::AllOf;
using ::testing::ElementsAre;
using ::testing::HasSubstr;
using ::testing::IsEmpty;

using Arguments = std::vector<std::string>;
using Environment = std::map<std::string, std::string>;

std::string ErrorOf(const std::string& text) {
  std::string made = (std::filesystem::temp_directory_path() / "ballast_tls_config_XXXXXX").string();
  EXPECT_NE(mkdtemp(made.data()), nullptr);
  const std::string file = made + "/ballast.yaml";
  std::ofstream(file) << text;
  const std::string error(ParseCommandLine({"--config", file}, {}).status().message());
  std::filesystem::remove_all(made);
  return error;
}

TEST(TlsConfigTest, AMetricsPortThatOthersReachIsWarnedAbout) {
  const auto warnings = [](const Arguments& arguments) { return ParseCommandLine(arguments, {})->warnings; };
  EXPECT_THAT(warnings({"--ops_http.listen=10.0.0.1:9464"}), ElementsAre(HasSubstr("can read the metrics")));
  EXPECT_THAT(warnings({"--ops_http.listen=10.0.0.1:9464", "--ops_http.token_file=/t"}),
              ElementsAre(HasSubstr("reads the token")));
  EXPECT_THAT(warnings({"--ops_http.listen=10.0.0.1:9464", "--ops_http.token_file=/t", "--ops_http.tls",
                        "--tls.certificate=/c", "--tls.key=/k", "--tls.client_ca=/a"}),
              IsEmpty());
}

TEST(TlsConfigTest, APortThatOthersReachWantsTlsOrAWordForIt) {
  for (const char* listen : {"0.0.0.0:7700", "[::]:7700", "node7:7700", "10.0.0.1:0"}) {
    EXPECT_THAT(ErrorOf(absl::StrCat("device: cpu\nlisten: \"", listen, "\"\n")),
                AllOf(HasSubstr("ballast.yaml:2: listen: "), HasSubstr("configure tls"), HasSubstr("127.0.0.1"),
                      HasSubstr("insecure: true")))
        << listen;
  }
  EXPECT_TRUE(ParseCommandLine({"--listen=0.0.0.0:7700", "--insecure"}, {}).ok());
  EXPECT_TRUE(ParseCommandLine({"--listen=unix:/run/x"}, {}).ok());
  const Environment tls = {{"BALLAST_DAEMON_TLS_CERTIFICATE", "/c"},
                           {"BALLAST_DAEMON_TLS_KEY", "/k"},
                           {"BALLAST_DAEMON_TLS_CLIENT_CA", "/a"}};
  const auto line = ParseCommandLine({"--listen=0.0.0.0:7700"}, tls);
  ASSERT_TRUE(line.ok()) << line.status();
  EXPECT_TRUE(line->config.tls.on() && line->config.tls.requires_clients());
  EXPECT_EQ(line->config.tls.key, "/k");
  EXPECT_THAT(line->warnings, IsEmpty());
}

TEST(TlsConfigTest, TlsWantsACertificateItsKeyAndTheClientsAuthorities) {
  const auto error = [](const std::string& keys) { return ErrorOf("tls:\n" + keys); };
  const std::string pair = "  certificate: /c\n  key: /k\n";
  EXPECT_EQ(error(pair + "  client_ca: /a\n"), "");
  EXPECT_EQ(error(pair + "  client_certificates: none\n"), "");
  EXPECT_THAT(error("  certificate: /c\n"), AllOf(HasSubstr("ballast.yaml:2: tls.certificate: wants tls.key")));
  EXPECT_THAT(error("  key: /k\n"), HasSubstr("ballast.yaml:2: tls.key: wants tls.certificate"));
  EXPECT_THAT(error("  client_ca: /a\n"), HasSubstr("tls.client_ca: wants tls.certificate"));
  EXPECT_THAT(error("  certificate: c\n  key: /k\n"), HasSubstr("'c' is no absolute path"));
  EXPECT_THAT(error(pair + "  client_ca: a\n"), HasSubstr("ballast.yaml:4: tls.client_ca: 'a' is no absolute path"));
  EXPECT_THAT(error(pair), AllOf(HasSubstr("wants tls.client_ca"), HasSubstr("client_certificates: none")));
  EXPECT_THAT(error(pair + "  client_ca: /a\n  client_certificates: none\n"), HasSubstr("leave one of the two out"));
  EXPECT_THAT(error(pair + "  client_certificates: maybe\n"), HasSubstr("'maybe' is none of require, none"));
  EXPECT_THAT(ErrorOf("listen: unix:/run/x\ntls:\n" + pair + "  client_ca: /a\n"),
              HasSubstr("ballast.yaml:3: tls.certificate: listen is unix:/run/x, a Unix socket"));
  EXPECT_THAT(ErrorOf("ops_http:\n  tls: true\n"), HasSubstr("ballast.yaml:2: ops_http.tls: wants tls.certificate"));
  EXPECT_THAT(ErrorOf("ops_http:\n  token_file: token\n"), HasSubstr("'token' is no absolute path"));
}

}  // namespace
}  // namespace ballast
