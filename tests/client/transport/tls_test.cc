// TLS between a client and a daemon in this process.
#include <gmock/gmock.h>
#include <gtest/gtest.h>
#include <signal.h>

#include <atomic>
#include <filesystem>
#include <memory>
#include <thread>
#include <vector>

#include "absl/strings/str_cat.h"
#include "absl/synchronization/notification.h"

#include "client/cpp/client.h"
#include "client/cpp/ctl/http_probe.h"
#include "client/cpp/transport/dial.h"
#include "client/cpp/transport/tls_account.h"
#include "tests/certificates.h"
#include "tests/client/loopback_socket.h"
#include "tests/client/real_daemon.h"
#include "tests/eventually.h"
#include "tests/raw_certificate.h"
#include "tests/server/captured_log.h"
#include "tests/server/specs.h"

namespace ballast {
namespace {

using ::testing::AllOf;
using ::testing::HasSubstr;
using ::testing::Not;

class TlsTest : public ::testing::Test {
 protected:
  TlsTest() {
    WriteDaemon(TestCertificates::DaemonPair(authority_));
    files_.WritePair("trainer", TestCertificates::TrainerPair(authority_));
    files_.Write("ca.crt", authority_.pem().certificate, 0644);
  }

  void WriteDaemon(const ctl::PemPair& pair) const { files_.WritePair("daemon", pair); }

  Config DaemonConfig(bool requires_clients = true) const {
    Config config = RealDaemon::Small();
    config.tls = {.certificate = files_.Path("daemon.crt"), .key = files_.Path("daemon.key")};
    if (requires_clients) config.tls.client_ca = files_.Path("ca.crt");
    config.tls.client_certificates = requires_clients ? "require" : "none";
    return config;
  }
  ClientTls Tls(const std::string& own = "trainer", const std::string& ca = "ca.crt") const {
    if (own.empty()) return {.ca = files_.Path(ca)};
    return {.ca = files_.Path(ca), .certificate = files_.Path(own + ".crt"), .key = files_.Path(own + ".key")};
  }
  static absl::StatusOr<std::unique_ptr<Client>> Connect(const std::string& server, const ClientTls& tls) {
    return Client::Connect({.server = server, .tls = tls, .connect_timeout_s = 30, .log = [](const std::string&) {}});
  }
  static std::string ErrorOf(const std::string& server, const ClientTls& tls) {
    return std::string(Connect(server, tls).status().message());
  }

  const TestCertificates files_;
  const ctl::Authority authority_ = TestCertificates::MakeAuthority();
  const ctl::Authority other_ = TestCertificates::MakeAuthority("other CA");
};

TEST_F(TlsTest, BothEndsShowACertificate) {
  const RealDaemon daemon(DaemonConfig());
  const auto client = Connect(daemon.address(), Tls());
  ASSERT_TRUE(client.ok()) << client.status();
  EXPECT_TRUE((*client)->GetServer().ok());
}

TEST_F(TlsTest, TheLogNamesTheRanksIdentity) {
  const testing::CapturedLog log;
  RealDaemon daemon(DaemonConfig());
  const auto client = Connect(daemon.address(), Tls());
  ASSERT_TRUE(client.ok()) << client.status();
  ASSERT_TRUE((*client)->CreateRun(testing::SmallSpec()).ok());
  ASSERT_TRUE((*client)->Attach({.run_id = "r1", .transport = TransportChoice::kGrpc}).ok());
  EXPECT_THAT(log.Await({"attached", "identity=spiffe://test/trainer"}), Not(""));
}

TEST_F(TlsTest, ACommonNameIsNoSpiffeId) {
  const testing::CapturedLog log;
  files_.WritePair("poser", authority_
                                .Issue({.common_name = "spiffe://test/operator",
                                        .end = TlsEnd::kClient,
                                        .names = {"tenant-7"},
                                        .validity = ValidAround(absl::Now())})
                                .value());
  RealDaemon daemon(DaemonConfig());
  const auto client = Connect(daemon.address(), Tls("poser"));
  ASSERT_TRUE(client.ok()) << client.status();
  ASSERT_TRUE((*client)->CreateRun(testing::SmallSpec()).ok());
  ASSERT_TRUE((*client)->Attach({.run_id = "r1", .transport = TransportChoice::kGrpc}).ok());
  EXPECT_THAT(log.Await({"attached"}), Not(HasSubstr("spiffe")));
}

// A server that shows this certificate, once.
std::string AccountOf(const ctl::PemPair& shown, const ClientTls& tls) {
  const LoopbackSocket listener = LoopbackSocket::Listen();
  std::thread server([&] {
    sigset_t sigpipe;  // the client goes as soon as it has seen enough
    sigemptyset(&sigpipe);
    sigaddset(&sigpipe, SIGPIPE);
    pthread_sigmask(SIG_BLOCK, &sigpipe, nullptr);
    const OpensslPtr<SSL_CTX> context(SSL_CTX_new(TLS_server_method()));
    const OpensslPtr<X509> own(PEM_read_bio_X509(BioOf(shown.certificate).get(), nullptr, nullptr, nullptr));
    const OpensslPtr<EVP_PKEY> key(PEM_read_bio_PrivateKey(BioOf(shown.key).get(), nullptr, nullptr, nullptr));
    EXPECT_EQ(SSL_CTX_use_certificate(context.get(), own.get()), 1);
    EXPECT_EQ(SSL_CTX_use_PrivateKey(context.get(), key.get()), 1);
    const LoopbackSocket accepted = listener.Accept();
    const OpensslPtr<SSL> ssl(SSL_new(context.get()));
    SSL_set_fd(ssl.get(), accepted.fd());
    SSL_accept(ssl.get());
  });
  std::string account = TlsAccount(absl::StrCat("127.0.0.1:", listener.port()), tls);
  server.join();
  return account;
}

TEST_F(TlsTest, NamesOfACertificateThatAreNoneAreNotReadBeyondTheirEndNorShownAsTheyAre) {
  // An authority of the same name is enough for them to be looked at.
  const ctl::Authority posing = TestCertificates::MakeAuthority();
  const OpensslPtr<EVP_PKEY> key(EVP_RSA_gen(2048));
  EXPECT_THAT(AccountOf(MakeRawPair(posing.pem(), key.get(), "DER:3003870101"), Tls()),  // an address of one byte
              HasSubstr("only for an address that is none"));
  EXPECT_THAT(AccountOf(MakeRawPair(posing.pem(), key.get(), "DER:300782051b5b33316d"), Tls()),  // colours a terminal
              HasSubstr("only for \\x1b[31m"));
}

TEST_F(TlsTest, AServerThatGoesDuringTheHandshakeEndsNoProcess) {
  const LoopbackSocket listener = LoopbackSocket::Listen();
  const auto dial = Dial::Tcp(absl::StrCat("127.0.0.1:", listener.port()), 5);
  ASSERT_TRUE(dial.ok()) << dial.status();
  listener.Accept().Reset();
  EXPECT_THAT((*dial)->Shake(ClientSsl("", "127.0.0.1")), Not(SSL_ERROR_NONE));
  EXPECT_THAT((*dial)->Shake(ClientSsl("", "127.0.0.1")), Not(SSL_ERROR_NONE)) << "written to what is gone";
}

TEST_F(TlsTest, AServerThatDripsBytesHoldsNobodyUp) {
  const LoopbackSocket listener = LoopbackSocket::Listen();
  constexpr int kDrops = 400;
  std::atomic<int> dropped = 0;
  std::thread server([&] {
    const LoopbackSocket accepted = listener.Accept();
    absl::Notification never;
    accepted.Send(std::string("\x16\x03\x03\x40\x00", 5));  // the head of a record of 16 KiB
    while (dropped < kDrops && accepted.Send(std::string(1, '\0'))) {
      ++dropped;
      never.WaitForNotificationWithTimeout(absl::Milliseconds(50));
    }
  });
  const auto dial = Dial::Tcp(absl::StrCat("127.0.0.1:", listener.port()), 0.3);
  ASSERT_TRUE(dial.ok()) << dial.status();
  EXPECT_EQ((*dial)->Shake(ClientSsl("", "127.0.0.1")), SSL_ERROR_WANT_READ);
  EXPECT_LT(dropped, kDrops);
  dropped = kDrops;
  server.join();
}

TEST_F(TlsTest, AClientWithoutACertificateIsToldWhatToGive) {
  const RealDaemon daemon(DaemonConfig());
  EXPECT_THAT(
      ErrorOf(daemon.address(), Tls("")),
      AllOf(HasSubstr("it wants a client's certificate, signed by 'test CA'"), HasSubstr("BALLAST_TLS_CERTIFICATE")));
}

TEST_F(TlsTest, ADaemonMayLetEverybodyIn) {
  const RealDaemon daemon(DaemonConfig(/*requires_clients=*/false));
  EXPECT_EQ(ErrorOf(daemon.address(), Tls("")), "");
  EXPECT_EQ(ErrorOf(daemon.address(), Tls()), "");
}

TEST_F(TlsTest, WrongAuthoritiesAreNamedWithTheirFile) {
  const RealDaemon daemon(DaemonConfig());
  files_.Write("other.crt", other_.pem().certificate, 0644);
  files_.WritePair("stranger", TestCertificates::TrainerPair(other_));
  EXPECT_THAT(ErrorOf(daemon.address(), Tls("trainer", "other.crt")),
              AllOf(HasSubstr(files_.Path("other.crt") + " is not the authority that signed its certificate"),
                    HasSubstr("'test CA' did")));
  EXPECT_THAT(ErrorOf(daemon.address(), Tls("stranger")),
              AllOf(HasSubstr("it does not take " + files_.Path("stranger.crt")), HasSubstr("'other CA' signed"),
                    HasSubstr("those that 'test CA' signed")));
}

TEST_F(TlsTest, ACertificateForAnotherHostIsNamedWithItsHosts) {
  WriteDaemon(TestCertificates::DaemonPair(authority_, ValidAround(absl::Now()), {"node7", "10.0.0.1"}));
  const RealDaemon daemon(DaemonConfig());
  EXPECT_THAT(ErrorOf(daemon.address(), Tls()),
              HasSubstr("its certificate is not for 127.0.0.1, only for node7, 10.0.0.1"));
}

TEST_F(TlsTest, TheClientsOwnFilesAreCheckedBeforeItConnects) {
  const absl::Time now = absl::Now();
  files_.WritePair("old", TestCertificates::TrainerPair(authority_, {now - absl::Hours(2), now - absl::Hours(1)}));
  files_.WritePair("young", TestCertificates::TrainerPair(authority_, {now + absl::Hours(1), now + absl::Hours(2)}));
  const std::string nobody = "127.0.0.1:1";
  EXPECT_THAT(ErrorOf(nobody, Tls("old")), HasSubstr("old.crt: expired at"));
  EXPECT_THAT(ErrorOf(nobody, Tls("young")), HasSubstr("young.crt: is not yet valid"));
  EXPECT_THAT(ErrorOf(nobody, Tls("daemon")), HasSubstr("daemon.crt: is no certificate for a client"));
  EXPECT_THAT(ErrorOf(nobody, Tls("none")), HasSubstr("none.crt: cannot be read: No such file"));
  ClientTls mixed = Tls();
  mixed.key = files_.Path("old.key");
  EXPECT_THAT(ErrorOf(nobody, mixed), HasSubstr("old.key: is the key of another certificate than"));
  std::filesystem::permissions(files_.Path("trainer.key"), std::filesystem::perms::all);
  EXPECT_THAT(ErrorOf(nobody, Tls()), HasSubstr("trainer.key: others than its owner can read"));
  EXPECT_THAT(ErrorOf(nobody, {.ca = files_.Path("ca.crt"), .certificate = "x"}),
              HasSubstr("a certificate and no key"));
  EXPECT_THAT(ErrorOf(nobody, {.certificate = "x", .key = "y"}), HasSubstr("tls wants ca"));
  EXPECT_THAT(ErrorOf("unix:/tmp/x", Tls()), HasSubstr("a Unix socket, which TLS is not for"));
}

TEST_F(TlsTest, OneEndWithoutTlsIsTold) {
  const RealDaemon plain, encrypted(DaemonConfig());
  EXPECT_THAT(ErrorOf(plain.address(), Tls()), HasSubstr("it does not speak TLS"));
  EXPECT_THAT(ErrorOf(encrypted.address(), {}), AllOf(HasSubstr("it speaks TLS"), HasSubstr("BALLAST_TLS_CA")));
}

TEST_F(TlsTest, ANameWithASecretInItIsRefusedAndNotRepeated) {
  for (const char* server : {"user:hunter2@node7:7700", "https://node7:7700/hunter2", "node7:7700?token=hunter2"}) {
    EXPECT_THAT(ErrorOf(server, {}),
                AllOf(HasSubstr("without a scheme, a user, a password"), Not(HasSubstr("hunter2"))));
  }
}

TEST_F(TlsTest, ANewPairHoldsForTheNextConnectionAndThoseThatAreThereGoOn) {
  const RealDaemon daemon(DaemonConfig());
  const auto before = Connect(daemon.address(), Tls());
  ASSERT_TRUE(before.ok()) << before.status();
  files_.Write("other.crt", other_.pem().certificate, 0644);
  WriteDaemon(TestCertificates::DaemonPair(other_));
  EXPECT_SOON(daemon.metrics(), HasSubstr("ballast_tls_reloads_total{result=\"success\"} 1"));
  EXPECT_TRUE((*before)->GetServer().ok());
  EXPECT_EQ(ErrorOf(daemon.address(), Tls("trainer", "other.crt")), "");
  EXPECT_THAT(ErrorOf(daemon.address(), Tls()), HasSubstr("is not the authority"));
}

TEST_F(TlsTest, AClientComesBackToADaemonThatIsStartedAnew) {
  Config config = DaemonConfig();
  auto daemon = std::make_unique<RealDaemon>(config);
  config.listen = daemon->address();
  const auto client = Connect(daemon->address(), Tls());
  ASSERT_TRUE(client.ok()) << client.status();
  daemon.reset();
  EXPECT_FALSE((*client)->GetServer().ok()) << "it knows that the daemon is gone";
  daemon = std::make_unique<RealDaemon>(config);
  const auto runs = (*client)->ListRuns();
  EXPECT_TRUE(runs.ok()) << runs.status();
}

TEST_F(TlsTest, ABadPairLeavesTheOneBeforeInUse) {
  const RealDaemon daemon(DaemonConfig());
  files_.Write("daemon.key", TestCertificates::DaemonPair(authority_).key, 0600);
  EXPECT_SOON(daemon.metrics(), HasSubstr("ballast_tls_reloads_total{result=\"failed\"} 1"));
  EXPECT_EQ(ErrorOf(daemon.address(), Tls()), "");
}

TEST_F(TlsTest, NewAuthoritiesOfClientsHoldForTheNextConnection) {
  const RealDaemon daemon(DaemonConfig());
  files_.WritePair("stranger", TestCertificates::TrainerPair(other_));
  EXPECT_THAT(ErrorOf(daemon.address(), Tls("stranger")), HasSubstr("it does not take"));
  // The client's own list is the same file here, and still has the daemon's authority.
  files_.Write("ca.crt", authority_.pem().certificate + other_.pem().certificate, 0644);
  EXPECT_SOON(daemon.metrics(), HasSubstr("ballast_tls_reloads_total{result=\"success\"} 1"));
  EXPECT_EQ(ErrorOf(daemon.address(), Tls("stranger")), "");
}

TEST_F(TlsTest, TheOpsPortSpeaksHttps) {
  Config config = DaemonConfig();
  config.ops_http.tls = true;
  const RealDaemon daemon(config);
  const auto get = [&](const std::string& authorities) {
    return ctl::HttpGet(daemon.ops_address(), "/metrics", 10, authorities);
  };
  const auto answer = get(authority_.pem().certificate);
  ASSERT_TRUE(answer.ok()) << answer.status();
  EXPECT_EQ(answer->status, 200);
  EXPECT_GT(answer->body.size(), 16u << 10) << "more than a record of TLS";
  EXPECT_THAT(answer->body, HasSubstr("ballast_tls_certificate_expiry_timestamp_seconds"));
  EXPECT_FALSE(get("").ok());
  EXPECT_THAT(std::string(get(other_.pem().certificate).status().message()), HasSubstr("certificate"));
  WriteDaemon(TestCertificates::DaemonPair(other_));
  EXPECT_SOON(daemon.metrics(), HasSubstr("ballast_tls_reloads_total{result=\"success\"} 1"));
  EXPECT_TRUE(get(other_.pem().certificate).ok());
}

TEST_F(TlsTest, SilentClientsDoNotKeepTheOpsPortFromOthers) {
  Config config = DaemonConfig();
  config.ops_http.tls = true;
  const RealDaemon daemon(config);
  std::vector<std::unique_ptr<Dial>> silent;
  for (int i = 0; i < 80; ++i) silent.push_back(Dial::Tcp(daemon.ops_address(), 30).value());
  const auto answer = ctl::HttpGet(daemon.ops_address(), "/livez", 60, authority_.pem().certificate);
  ASSERT_TRUE(answer.ok()) << answer.status();
  EXPECT_EQ(answer->status, 200);
}

}  // namespace
}  // namespace ballast
