#include "proto/tls/certificate_files.h"

#include <gmock/gmock.h>
#include <gtest/gtest.h>
#include <openssl/pem.h>

#include "tests/certificates.h"
#include "tests/raw_certificate.h"

namespace ballast {
namespace {

using ::testing::AllOf;
using ::testing::HasSubstr;
using ::testing::Not;
using ::testing::StartsWith;

class CertificateFilesTest : public ::testing::Test {
 protected:
  CertificateFilesTest() { files_.WritePair("daemon", TestCertificates::DaemonPair(authority_)); }

  std::string ErrorOf(const std::string& name, TlsEnd end = TlsEnd::kDaemon) const {
    return ErrorOf(name + ".crt", name + ".key", end);
  }
  // Never with what is in the key.
  std::string ErrorOf(const std::string& certificate, const std::string& key, TlsEnd end = TlsEnd::kDaemon) const {
    const auto read = ReadCertifiedKey(files_.Path(certificate), files_.Path(key), end, now_);
    EXPECT_THAT(std::string(read.status().message()), Not(HasSubstr("PRIVATE KEY-----\nM")));
    return std::string(read.status().message());
  }
  std::string ErrorOfAuthorities(const std::string& name) const {
    return std::string(ReadAuthorities(files_.Path(name), now_).status().message());
  }
  auto Of(const std::string& name, const std::string& what) const {
    return AllOf(StartsWith(files_.Path(name)), HasSubstr(what));
  }

  const absl::Time now_ = absl::Now();
  const TestCertificates files_;
  const ctl::Authority authority_ = TestCertificates::MakeAuthority();
};

TEST_F(CertificateFilesTest, APairIsReadWithItsSubjectAndDates) {
  files_.WritePair("trainer", TestCertificates::TrainerPair(authority_));
  const auto daemon = ReadCertifiedKey(files_.Path("daemon.crt"), files_.Path("daemon.key"), TlsEnd::kDaemon, now_);
  const auto trainer = ReadCertifiedKey(files_.Path("trainer.crt"), files_.Path("trainer.key"), TlsEnd::kClient, now_);
  ASSERT_TRUE(daemon.ok() && trainer.ok()) << daemon.status() << trainer.status();
  EXPECT_EQ(daemon->subject, "ballastd");
  EXPECT_EQ(trainer->subject, "spiffe://test/trainer");
  EXPECT_EQ(daemon->issuer, "test CA");
  EXPECT_LT(daemon->not_before, now_);
  EXPECT_GT(daemon->not_after, now_ + absl::Minutes(59));
  EXPECT_THAT(daemon->key, HasSubstr("PRIVATE KEY"));
}

TEST_F(CertificateFilesTest, AFileThatIsNotThereOrNoFileIsNamed) {
  EXPECT_THAT(ErrorOf("none.crt", "daemon.key"), Of("none.crt", "No such file"));
  EXPECT_THAT(ErrorOf("daemon.crt", "none.key"), Of("none.key", "No such file"));
  EXPECT_THAT(ErrorOf("", "daemon.key"), HasSubstr("is no file"));
  ASSERT_EQ(mkfifo(files_.Path("pipe").c_str(), 0600), 0);
  EXPECT_THAT(ErrorOf("daemon.crt", "pipe"), Of("pipe", "is no file")) << "nobody writes to it";
  files_.Write("long.crt", std::string((1 << 20) + 1, '\n'), 0644);
  EXPECT_THAT(ErrorOf("long.crt", "daemon.key"), Of("long.crt", "longer than 1 MiB"));
}

TEST_F(CertificateFilesTest, WhatIsNoCertificateOrKeyIsNamed) {
  const std::string pem = ReadSmallFile(files_.Path("daemon.crt")).value();
  files_.Write("text", "hello\n", 0600);
  files_.Write("torn.crt", pem.substr(0, pem.size() / 2) + "\n-----END CERTIFICATE-----\n", 0644);
  files_.Write("twice.crt", pem + pem.substr(0, pem.size() / 2), 0644);
  EXPECT_THAT(ErrorOf("text", "daemon.key"), Of("text", "holds no certificate"));
  EXPECT_THAT(ErrorOf("torn.crt", "daemon.key"), Of("torn.crt", "certificate 1 in it cannot be read"));
  EXPECT_THAT(ErrorOf("twice.crt", "daemon.key"), Of("twice.crt", "certificate 2 in it cannot be read"));
  EXPECT_THAT(ErrorOf("daemon.crt", "text"), Of("text", "holds no private key"));
  EXPECT_THAT(ErrorOf("daemon.key", "daemon.key"), Of("daemon.key", "holds no certificate"));
}

TEST_F(CertificateFilesTest, OneThatOpensslTakesForNoHandshakeIsRefusedBeforeIt) {
  const OpensslPtr<EVP_PKEY> weak(EVP_RSA_gen(512)), strong(EVP_RSA_gen(2048));
  files_.WritePair("strong", MakeRawPair(authority_.pem(), strong.get(), "DNS:localhost"));
  EXPECT_EQ(ErrorOf("strong"), "");
  files_.WritePair("weak", MakeRawPair(authority_.pem(), weak.get(), "DNS:localhost"));
  EXPECT_THAT(ErrorOf("weak"), Of("weak.crt", "is not taken by OpenSSL (ee key too small)"));
  files_.WritePair("short", MakeRawPair(authority_.pem(), strong.get(), "DER:3003870101"));
  EXPECT_THAT(ErrorOf("short"), Of("short.crt", "an IP address of 1 bytes"));
}

TEST_F(CertificateFilesTest, AKeyOfAnotherPairIsNamedWithBothFiles) {
  files_.WritePair("other", TestCertificates::DaemonPair(authority_));
  EXPECT_THAT(ErrorOf("daemon.crt", "other.key"),
              Of("other.key", "is the key of another certificate than " + files_.Path("daemon.crt")));
}

TEST_F(CertificateFilesTest, AKeyThatOthersMayReadIsRefused) {
  const std::string key = ReadSecretFile(files_.Path("daemon.key")).value();
  for (const mode_t mode : {0644, 0640, 0604, 0602}) {
    files_.Write("open.key", key, mode);
    EXPECT_THAT(ErrorOf("daemon.crt", "open.key"), Of("open.key", "chmod 600")) << mode;
  }
  files_.Write("open.key", key, 0400);
  EXPECT_EQ(ErrorOf("daemon.crt", "open.key"), "");
}

TEST_F(CertificateFilesTest, AKeyWithAPassphraseIsRefusedWithoutAskingForIt) {
  const std::string key = ReadSecretFile(files_.Path("daemon.key")).value();
  const OpensslPtr<EVP_PKEY> parsed(PEM_read_bio_PrivateKey(BioOf(key).get(), nullptr, nullptr, nullptr));
  const OpensslPtr<BIO> bio(BIO_new(BIO_s_mem()));
  ASSERT_EQ(PEM_write_bio_PKCS8PrivateKey(bio.get(), parsed.get(), EVP_aes_128_cbc(), "open", 4, nullptr, nullptr), 1);
  const char* data = nullptr;
  const auto bytes = static_cast<size_t>(BIO_get_mem_data(bio.get(), &data));
  files_.Write("locked.key", std::string(data, bytes), 0600);
  EXPECT_THAT(ErrorOf("daemon.crt", "locked.key"), Of("locked.key", "has a passphrase"));
}

TEST_F(CertificateFilesTest, DatesAreNamed) {
  files_.WritePair("old", TestCertificates::DaemonPair(authority_, {now_ - absl::Hours(2), now_ - absl::Hours(1)}));
  files_.WritePair("young", TestCertificates::DaemonPair(authority_, {now_ + absl::Hours(1), now_ + absl::Hours(2)}));
  EXPECT_THAT(ErrorOf("old"), Of("old.crt", "expired at 20"));
  EXPECT_THAT(ErrorOf("young"), Of("young.crt", "is not yet valid"));
}

TEST_F(CertificateFilesTest, APairForTheOtherEndIsRefused) {
  files_.WritePair("trainer", TestCertificates::TrainerPair(authority_));
  EXPECT_THAT(ErrorOf("trainer"), Of("trainer.crt", "no certificate for a daemon"));
  EXPECT_THAT(ErrorOf("daemon", TlsEnd::kClient), Of("daemon.crt", "no certificate for a client"));
}

TEST_F(CertificateFilesTest, AChainIsInOrder) {
  const std::string own = ReadSmallFile(files_.Path("daemon.crt")).value();
  const std::string& root = authority_.pem().certificate;
  files_.Write("chain.crt", own + root, 0644);
  files_.Write("turned.crt", own + TestCertificates::MakeAuthority().pem().certificate, 0644);
  EXPECT_EQ(ErrorOf("chain.crt", "daemon.key"), "");
  EXPECT_THAT(ErrorOf("turned.crt", "daemon.key"), Of("turned.crt", "certificate 2 in it did not sign certificate 1"));
}

TEST_F(CertificateFilesTest, AChainIsValidAsLongAsAllOfIt) {
  const auto old = TestCertificates::MakeAuthority("old", {now_ - absl::Hours(2), now_ - absl::Hours(1)});
  const ctl::PemPair pair = TestCertificates::DaemonPair(old);
  files_.WritePair("chain", {.certificate = pair.certificate + old.pem().certificate, .key = pair.key});
  EXPECT_THAT(ErrorOf("chain"), Of("chain.crt", "certificate 2 in it expired"));
}

TEST_F(CertificateFilesTest, AuthoritiesAreReadAndAtLeastOneIsValid) {
  const auto old = TestCertificates::MakeAuthority("old", {now_ - absl::Hours(2), now_ - absl::Hours(1)});
  files_.Write("ca.crt", authority_.pem().certificate, 0644);
  files_.Write("both.crt", old.pem().certificate + authority_.pem().certificate, 0644);
  files_.Write("old.crt", old.pem().certificate, 0644);
  EXPECT_EQ(ErrorOfAuthorities("ca.crt"), "");
  EXPECT_EQ(ErrorOfAuthorities("both.crt"), "") << "an authority that is being replaced";
  EXPECT_THAT(ErrorOfAuthorities("old.crt"), Of("old.crt", "expired"));
  EXPECT_THAT(ErrorOfAuthorities("daemon.crt"), Of("daemon.crt", "is not the certificate of an authority"));
}

TEST_F(CertificateFilesTest, AStampTellsFilesApart) {
  const FileStamp before = StampOf(files_.Path("daemon.key"));
  EXPECT_EQ(before, StampOf(files_.Path("daemon.key")));
  files_.Write("daemon.key", ReadSecretFile(files_.Path("daemon.key")).value(), 0600);
  EXPECT_NE(before, StampOf(files_.Path("daemon.key")));
  EXPECT_EQ(StampOf(files_.Path("none")), FileStamp());
}

}  // namespace
}  // namespace ballast
