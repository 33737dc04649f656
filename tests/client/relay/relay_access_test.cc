// Who may read what of whom: a relay shows its upstream a certificate and a token, and asks its own readers for theirs.
#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include "proto/tls/sha256.h"

#include "tests/certificates.h"
#include "tests/client/follow/followed_training.h"
#include "tests/client/relay/relay_daemon.h"
#include "tests/eventually.h"

namespace ballast {
namespace {

using ::testing::AllOf;
using ::testing::HasSubstr;

constexpr char kTrainer[] = "ballast_trainer-token", kRelay[] = "ballast_relay-token",
               kReader[] = "ballast_reader-token";

class RelayAccessTest : public ::testing::Test {
 protected:
  RelayAccessTest() {
    files_.WritePair("daemon", TestCertificates::DaemonPair(authority_));
    files_.WritePair("client", TestCertificates::TrainerPair(authority_));
    files_.Write("ca.crt", authority_.pem().certificate, 0644);
    files_.Write("other.crt", TestCertificates::MakeAuthority("another CA").pem().certificate, 0644);
    for (const char* token : {kTrainer, kRelay, kReader}) files_.Write(token, token, 0600);
  }
  // A daemon to which a client brings a certificate, and a token of one of these grants: its token, run and scope.
  using Grants = std::vector<std::vector<std::string>>;
  Config Guarded(Config config, const std::string& name, const Grants& grants) const {
    std::string text = "grants:\n";
    for (const auto& grant : grants) {
      absl::StrAppend(&text, "- {name: ", grant[0], ", token_sha256: ", Sha256Hex(grant[0]), ", runs: ['", grant[1],
                      "'], scope: ", grant[2], "}\n");
    }
    config.access = files_.Write(name + ".yaml", text, 0600);
    config.tls = {
        .certificate = files_.Path("daemon.crt"), .key = files_.Path("daemon.key"), .client_ca = files_.Path("ca.crt")};
    return config;
  }
  Config Relaying(const std::string& upstream, const std::string& ca = "ca.crt") const {
    Config config = RelayOf(upstream);
    config.relay.ca = files_.Path(ca);
    config.relay.certificate = files_.Path("client.crt");
    config.relay.key = files_.Path("client.key");
    config.relay.token_file = files_.Path(kRelay);
    return config;
  }
  ClientOptions As(const std::string& server, const std::string& token) const {
    return {.server = server,
            .tls = {.ca = files_.Path("ca.crt"),
                    .certificate = files_.Path("client.crt"),
                    .key = files_.Path("client.key")},
            .token_file = files_.Path(token),
            .connect_timeout_s = 30,
            .log = [](const std::string&) {}};
  }
  void Train(const std::string& server) {
    trainer_ = Client::Connect(As(server, kTrainer)).value();
    v1::RunSpec spec = LeastSquares::Spec();
    spec.mutable_follow();
    ASSERT_TRUE(trainer_->CreateRun(spec).ok());
    ASSERT_TRUE(trainer_->Attach({.run_id = kRun}).ok());
    ASSERT_TRUE(problem_.UploadAndBind(*trainer_).ok());
  }
  // What a relay that nobody is asked to prove anything to says of its upstream.
  static std::string FailureOf(const RealDaemon& relay) {
    return Settled([client = BareClient(relay.address())] { return client.Failure(kRun); },
                   AllOf(::testing::Not(HasSubstr("has not heard")), ::testing::Not("")));
  }

  const TestCertificates files_;
  const ctl::Authority authority_ = TestCertificates::MakeAuthority();
  const Grants upstream_grants_ = {{kTrainer, "*", "push"}, {kRelay, kRun, "pull"}};
  std::unique_ptr<Client> trainer_;
  LeastSquares problem_;
};

TEST_F(RelayAccessTest, EachAsksItsOwnReaders) {
  const RealDaemon daemon(Guarded(RealDaemon::Small(), "upstream", upstream_grants_));
  Train(daemon.address());
  const RealDaemon relay(Guarded(Relaying(daemon.address()), "relay", {{kReader, kRun, "pull"}}));
  auto reader = Subscriber::Open(As(relay.address(), kReader), {.run_id = kRun}).value();
  Reach(*reader, 0);
  EXPECT_EQ(Subscriber::Open(As(relay.address(), kTrainer), {.run_id = kRun}).status().code(),
            absl::StatusCode::kUnauthenticated);
  EXPECT_EQ(Subscriber::Open(As(daemon.address(), kReader), {.run_id = kRun}).status().code(),
            absl::StatusCode::kUnauthenticated);
  ASSERT_TRUE(problem_.Step(*trainer_).ok());
  EXPECT_EQ(Reach(*reader, 1).step, 1u);
}

TEST_F(RelayAccessTest, AnUpstreamWhoseCertificateItDoesNotTrustIsNotRead) {
  const RealDaemon daemon(Guarded(RealDaemon::Small(), "upstream", upstream_grants_));
  const RealDaemon relay(Relaying(daemon.address(), "other.crt"));
  EXPECT_THAT(FailureOf(relay), AllOf(HasSubstr(daemon.address()), HasSubstr("certificate")));
}

TEST_F(RelayAccessTest, AnUpstreamThatDoesNotKnowItsTokenSaysSo) {
  const RealDaemon daemon(Guarded(RealDaemon::Small(), "upstream", {{kTrainer, "*", "push"}}));
  Train(daemon.address());
  const RealDaemon relay(Relaying(daemon.address()));
  EXPECT_THAT(FailureOf(relay), HasSubstr("token"));
  const BareClient client(relay.address());
  client.GetRun(kRun);
  EXPECT_EQ(client.error.error_code(), grpc::StatusCode::UNAVAILABLE);
}

TEST_F(RelayAccessTest, AFileThatIsNotThereIsNamed) {
  Config config = Relaying("127.0.0.1:1");
  config.relay.token_file = files_.Path("gone");
  EXPECT_THAT(FailureOf(RealDaemon(config)), HasSubstr("gone"));
}

}  // namespace
}  // namespace ballast
