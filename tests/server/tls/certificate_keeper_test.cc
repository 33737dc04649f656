#include "server/tls/certificate_keeper.h"

#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include "absl/strings/str_cat.h"

#include "tests/certificates.h"
#include "tests/eventually.h"
#include "tests/server/captured_log.h"

namespace ballast {
namespace {

using ::testing::AllOf;
using ::testing::HasSubstr;
using ::testing::Not;

constexpr absl::Duration kLookEvery = absl::Milliseconds(1);

class CertificateKeeperTest : public ::testing::Test {
 protected:
  CertificateKeeperTest() {
    files_.WritePair("daemon", TestCertificates::DaemonPair(authority_));
    files_.Write("ca.crt", authority_.pem().certificate, 0644);
  }

  Config::Tls Tls() const {
    return {
        .certificate = files_.Path("daemon.crt"), .key = files_.Path("daemon.key"), .client_ca = files_.Path("ca.crt")};
  }
  std::unique_ptr<CertificateKeeper> Open() { return CertificateKeeper::Open(Tls(), &metrics_, kLookEvery).value(); }
  std::string Reloads(const char* result, int times) const {
    return absl::StrCat("ballast_tls_reloads_total{result=\"", result, "\"} ", times, "\n");
  }

  const TestCertificates files_;
  const ctl::Authority authority_ = TestCertificates::MakeAuthority();
  Metrics metrics_{BuildInfo{}};
};

TEST_F(CertificateKeeperTest, WhatIsThereIsInUseAndItsDatesAreShown) {
  const auto keeper = Open();
  EXPECT_EQ(keeper->current()->own.subject, "ballastd");
  EXPECT_EQ(keeper->current()->clients.certificates, authority_.pem().certificate);
  EXPECT_THAT(metrics_.Serialize(),
              AllOf(HasSubstr("ballast_tls_certificate_expiry_timestamp_seconds{file=\"certificate\"}"),
                    HasSubstr("ballast_tls_certificate_expiry_timestamp_seconds{file=\"client_ca\"}"),
                    HasSubstr("ballast_tls_certificate_start_timestamp_seconds{file=\"certificate\"}"),
                    HasSubstr(Reloads("success", 0)), HasSubstr(Reloads("failed", 0))));
}

TEST_F(CertificateKeeperTest, WithoutTlsThereAreNoDates) {
  EXPECT_THAT(metrics_.Serialize(), Not(HasSubstr("ballast_tls_certificate_expiry")));
}

TEST_F(CertificateKeeperTest, WhatIsWrongAtTheStartIsRefused) {
  files_.Write("daemon.key", "none", 0600);
  const auto opened = CertificateKeeper::Open(Tls(), &metrics_, kLookEvery);
  EXPECT_THAT(std::string(opened.status().message()), HasSubstr("daemon.key: holds no private key"));
}

TEST_F(CertificateKeeperTest, ANewPairIsTakenIntoUse) {
  const testing::CapturedLog log;
  const auto keeper = Open();
  const std::shared_ptr<const Certificates> before = keeper->current();
  files_.WritePair("daemon", TestCertificates::DaemonPair(authority_));
  EXPECT_SOON(keeper->current()->number, 2u);
  EXPECT_NE(keeper->current()->own.certificate, before->own.certificate);
  EXPECT_EQ(before->number, 1u) << "a handshake under way has it";
  EXPECT_SOON(metrics_.Serialize(), HasSubstr(Reloads("success", 1)));  // counted after that
  EXPECT_THAT(log.Await({"tls_reload", "identity=ballastd", "not_after="}), Not(""));
}

TEST_F(CertificateKeeperTest, ABadPairChangesNothingAndAGoodOneIsTakenAfterIt) {
  const testing::CapturedLog log;
  const auto keeper = Open();
  const std::string own = keeper->current()->own.certificate;
  files_.Write("daemon.key", TestCertificates::DaemonPair(authority_).key, 0600);
  EXPECT_SOON(metrics_.Serialize(), HasSubstr(Reloads("failed", 1)));
  EXPECT_EQ(keeper->current()->own.certificate, own);
  EXPECT_THAT(log.Await({"tls_reload", "daemon.key: is the key of another certificate"}), Not(HasSubstr("PRIVATE")));
  files_.WritePair("daemon", TestCertificates::DaemonPair(authority_));
  EXPECT_SOON(keeper->current()->number, 2u);
  EXPECT_SOON(metrics_.Serialize(), HasSubstr(Reloads("success", 1)));  // counted after that
}

TEST_F(CertificateKeeperTest, RightsAreLookedAtAgain) {
  const auto keeper = Open();
  ASSERT_EQ(chmod(files_.Path("daemon.key").c_str(), 0644), 0);
  EXPECT_SOON(metrics_.Serialize(), HasSubstr(Reloads("failed", 1)));
  ASSERT_EQ(chmod(files_.Path("daemon.key").c_str(), 0600), 0);
  EXPECT_SOON(metrics_.Serialize(), HasSubstr(Reloads("success", 1)));
}

TEST_F(CertificateKeeperTest, NewAuthoritiesAreTakenIntoUse) {
  const auto keeper = Open();
  const std::string both = authority_.pem().certificate + TestCertificates::MakeAuthority("next").pem().certificate;
  files_.Write("ca.crt", both, 0644);
  EXPECT_SOON(keeper->current()->clients.certificates, both);
}

TEST_F(CertificateKeeperTest, OneThatExpiresSoonIsWarnedOf) {
  const testing::CapturedLog log;
  const absl::Time now = absl::Now();
  files_.WritePair("daemon", TestCertificates::DaemonPair(authority_, {now - absl::Hours(10), now + absl::Hours(1)}));
  const auto keeper = Open();
  EXPECT_THAT(log.Await({"certificate_expiring", "ballastd"}), Not(""));
}

TEST_F(CertificateKeeperTest, TheCheckNamesTheKeyOfTheConfiguration) {
  Config config;
  EXPECT_EQ(CheckTlsFiles(config).path, "");
  config.tls = Tls();
  EXPECT_EQ(CheckTlsFiles(config).path, "");
  config.ops_http.token_file = files_.Write("token", "0123456789abcdef\n", 0600);
  EXPECT_EQ(CheckTlsFiles(config).path, "");
  config.ops_http.token_file = files_.Write("token", "short\n", 0600);
  EXPECT_EQ(CheckTlsFiles(config).path, "ops_http.token_file");
  files_.Write("ca.crt", "none", 0644);
  EXPECT_EQ(CheckTlsFiles(config).path, "tls.client_ca");
  files_.Write("daemon.key", "none", 0600);
  EXPECT_EQ(CheckTlsFiles(config).path, "tls.key");
  files_.Write("daemon.crt", "none", 0644);
  EXPECT_EQ(CheckTlsFiles(config).path, "tls.certificate");
  EXPECT_THAT(CheckTlsFiles(config).problem, HasSubstr("daemon.crt: holds no certificate"));
}

}  // namespace
}  // namespace ballast
