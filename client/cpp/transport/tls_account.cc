#include "client/cpp/transport/tls_account.h"

#include <arpa/inet.h>
#include <grpcpp/security/tls_certificate_provider.h>
#include <grpcpp/security/tls_credentials_options.h>
#include <openssl/err.h>

#include <algorithm>
#include <array>
#include <utility>
#include <vector>

#include "absl/strings/escaping.h"
#include "absl/strings/str_cat.h"
#include "absl/strings/str_join.h"
#include "absl/time/clock.h"
#include "proto/tls/certificate_files.h"
#include "proto/tls/openssl.h"
#include "proto/tls/shown_certificate.h"
#include "proto/unix_address.h"

#include "client/cpp/transport/dial.h"

namespace ballast {
namespace {

constexpr double kTimeoutS = 2;      // of each step of the account
constexpr unsigned kLookEveryS = 5;  // at the files
constexpr int kAlertReason = 1000;   // OpenSSL's reasons of alerts, less their numbers
constexpr int kInternalError = 80;   // a daemon that turns a connection away says this alone (RFC 8446, 6.2)

absl::Status CheckTogether(const std::string& server, const ClientTls& tls) {
  if (IsUnixAddress(server)) {
    return absl::InvalidArgumentError(
        absl::StrCat(server, " is a Unix socket, which TLS is not for: leave tls out, or name HOST:PORT"));
  }
  if (tls.ca.empty()) {
    return absl::InvalidArgumentError(
        "tls wants ca (BALLAST_TLS_CA), the file of the authority that signed the daemon's certificate");
  }
  if (tls.certificate.empty() == tls.key.empty()) return absl::OkStatus();
  return absl::InvalidArgumentError(
      absl::StrCat("tls has ", tls.key.empty() ? "a certificate and no key" : "a key and no certificate",
                   ": name both (BALLAST_TLS_CERTIFICATE, BALLAST_TLS_KEY), or none"));
}

// What the files hold.
struct ClientFiles {
  std::string authorities;
  CertifiedKey own;  // empty: it has none
};

absl::StatusOr<ClientFiles> ReadFiles(const ClientTls& tls) {
  const absl::Time now = absl::Now();
  ClientFiles files;
  auto authorities = ReadAuthorities(tls.ca, now);
  if (!authorities.ok()) return authorities.status();
  files.authorities = std::move(authorities->certificates);
  if (tls.certificate.empty()) return files;
  auto own = ReadCertifiedKey(tls.certificate, tls.key, TlsEnd::kClient, now);
  if (!own.ok()) return own.status();
  files.own = *std::move(own);
  return files;
}

// Bytes that a terminal or a log would take for more than text, as \\x1b.
std::string Shown(const std::string& text) { return absl::CHexEscape(text); }

std::string AddressOf(const std::string& bytes) {
  std::array<char, INET6_ADDRSTRLEN> text{};
  if (bytes.size() != 4 && bytes.size() != 16) return "an address that is none";
  return inet_ntop(bytes.size() == 4 ? AF_INET : AF_INET6, bytes.data(), text.data(), text.size());
}

// The hosts that a certificate is for. Nobody has vouched for it: it may hold anything.
std::string HostsOf(const X509* certificate) {
  std::vector<std::string> hosts;
  for (const AlternativeName& name : AlternativeNamesOf(certificate)) {
    if (name.type == GEN_DNS) hosts.push_back(Shown(name.bytes));
    if (name.type == GEN_IPADD) hosts.push_back(AddressOf(name.bytes));
  }
  return hosts.empty() ? "none" : absl::StrJoin(hosts, ", ");
}

// Why the daemon's certificate is not taken.
std::string OfItsCertificate(int verified, const X509* certificate, const std::string& host, const std::string& ca) {
  switch (verified) {
    case X509_V_ERR_CERT_HAS_EXPIRED:
      return "its certificate has expired: put a new one in the place of its tls.certificate";
    case X509_V_ERR_CERT_NOT_YET_VALID:
      return "its certificate is not yet valid: correct the clock of this machine, or of the one that made it";
    case X509_V_ERR_HOSTNAME_MISMATCH:
    case X509_V_ERR_IP_ADDRESS_MISMATCH:
      return absl::StrCat("its certificate is not for ", host, ", only for ", HostsOf(certificate),
                          ": name the server so, or give it a certificate for that name too (ballastctl certs init "
                          "--host ",
                          host, ")");
    case X509_V_ERR_UNABLE_TO_GET_ISSUER_CERT_LOCALLY:
    case X509_V_ERR_UNABLE_TO_VERIFY_LEAF_SIGNATURE:
    case X509_V_ERR_SELF_SIGNED_CERT_IN_CHAIN:
    case X509_V_ERR_DEPTH_ZERO_SELF_SIGNED_CERT:
    case X509_V_ERR_CERT_SIGNATURE_FAILURE:
      return absl::StrCat(ca, " is not the authority that signed its certificate ('",
                          Shown(CommonNameOf(X509_get_issuer_name(certificate))),
                          "' did): name that one as ca (BALLAST_TLS_CA)");
    default:
      return absl::StrCat("its certificate is not taken: ", X509_verify_cert_error_string(verified));
  }
}

// Why the daemon does not take this client, which it asked for a certificate.
std::string OfOwnCertificate(const SSL* ssl, const ClientTls& tls, const CertifiedKey& own) {
  std::vector<std::string> taken;
  const STACK_OF(X509_NAME)* const authorities = SSL_get0_peer_CA_list(ssl);
  for (int i = 0; i < sk_X509_NAME_num(authorities); ++i) {
    taken.push_back(absl::StrCat("'", Shown(CommonNameOf(sk_X509_NAME_value(authorities, i))), "'"));
  }
  const std::string of = taken.empty() ? "its tls.client_ca" : absl::StrJoin(taken, " or ");
  if (tls.certificate.empty()) {
    return absl::StrCat("it wants a client's certificate, signed by ", of,
                        ": give certificate and key (BALLAST_TLS_CERTIFICATE, BALLAST_TLS_KEY)");
  }
  return absl::StrCat("it does not take ", tls.certificate, ", which '", own.issuer, "' signed: it takes those that ",
                      of, " signed; name such a pair, or have tls.client_ca of the daemon name the authority");
}

// What the handshake says on its way.
struct Noted {
  bool asked = false;        // for a certificate
  int verified = X509_V_OK;  // the first thing that is wrong with the daemon's
};

int NoteThatItAsks(SSL* ssl, void*) {
  static_cast<Noted*>(SSL_get_app_data(ssl))->asked = true;
  return 1;
}

// Has the handshake go on, whatever is wrong: the certificate is looked at afterwards, and nothing is sent.
int NoteWhatIsWrong(int good, X509_STORE_CTX* context) {
  const auto* const ssl =
      static_cast<const SSL*>(X509_STORE_CTX_get_ex_data(context, SSL_get_ex_data_X509_STORE_CTX_idx()));
  int& verified = static_cast<Noted*>(SSL_get_app_data(ssl))->verified;
  if (good == 0 && verified == X509_V_OK) verified = X509_STORE_CTX_get_error(context);
  return 1;
}

// Of a client that wants TLS.
std::string AccountOfTls(Dial* dial, const std::string& host, const ClientTls& tls, const ClientFiles& files) {
  constexpr unsigned char kH2[] = {2, 'h', '2'};
  Noted noted;
  OpensslPtr<SSL> set_up = ClientSsl(files.authorities, host);
  SSL_set_alpn_protos(set_up.get(), kH2, sizeof kH2);
  SSL_set_app_data(set_up.get(), &noted);
  SSL_set_cert_cb(set_up.get(), NoteThatItAsks, nullptr);
  SSL_set_verify(set_up.get(), SSL_VERIFY_PEER, NoteWhatIsWrong);
  if (!files.own.key.empty()) Show(files.own, set_up.get());
  const int error = dial->Shake(std::move(set_up));
  SSL* const ssl = dial->ssl();
  const int reason = ERR_GET_REASON(ERR_peek_last_error());
  ERR_clear_error();
  if (const X509* certificate = SSL_get0_peer_certificate(ssl); certificate != nullptr && noted.verified != X509_V_OK) {
    return OfItsCertificate(noted.verified, certificate, host, tls.ca);
  }
  // A daemon's first words follow the handshake; one that does not take the client's certificate closes instead.
  if (error == SSL_ERROR_NONE) {
    return !dial->Read(1).empty() || !noted.asked ? "" : OfOwnCertificate(ssl, tls, files.own);
  }
  if (error != SSL_ERROR_SSL) return noted.asked ? OfOwnCertificate(ssl, tls, files.own) : "";
  if (reason == kAlertReason + kInternalError) {
    return "it turns connections away at the moment: its log says why (connection_refused)";
  }
  if (reason > kAlertReason) return noted.asked ? OfOwnCertificate(ssl, tls, files.own) : "";
  return "it does not speak TLS: switch it on there (section tls of its configuration), or leave tls out here "
         "(BALLAST_TLS_CA), if all may be read on the way";
}

// Of one that does not.
std::string AccountOfPlain(Dial* dial, const std::string& host) {
  dial->Shake(ClientSsl("", host));
  const int reason = ERR_GET_REASON(ERR_peek_last_error());
  ERR_clear_error();
  if (SSL_get0_peer_certificate(dial->ssl()) == nullptr && reason != kAlertReason + kInternalError) return "";
  return "it speaks TLS: give the file of the authority that signed its certificate (tls, or BALLAST_TLS_CA), and a "
         "certificate with its key (BALLAST_TLS_CERTIFICATE, BALLAST_TLS_KEY), if it asks for one";
}

}  // namespace

absl::StatusOr<std::shared_ptr<grpc::ChannelCredentials>> CredentialsFor(const std::string& server,
                                                                         const ClientTls& tls) {
  namespace tls_of_grpc = grpc::experimental;
  if (!tls.on()) return grpc::InsecureChannelCredentials();
  if (auto s = CheckTogether(server, tls); !s.ok()) return s;
  if (auto s = ReadFiles(tls).status(); !s.ok()) return s;
  tls_of_grpc::TlsChannelCredentialsOptions options;
  using Files = tls_of_grpc::FileWatcherCertificateProvider;
  options.set_certificate_provider(tls.certificate.empty()
                                       ? std::make_shared<Files>(tls.ca, kLookEveryS)
                                       : std::make_shared<Files>(tls.key, tls.certificate, tls.ca, kLookEveryS));
  options.watch_root_certs();
  if (!tls.certificate.empty()) options.watch_identity_key_cert_pairs();
  return tls_of_grpc::TlsCredentials(options);
}

std::string TlsAccount(const std::string& server, const ClientTls& tls) {
  if (IsUnixAddress(server)) return "";
  ClientFiles files;
  if (tls.on()) {
    auto read = ReadFiles(tls);
    if (!read.ok()) return std::string(read.status().message());
    files = *std::move(read);
  }
  const auto at = SplitAddress(server);
  const auto dial = Dial::Tcp(server, kTimeoutS);
  if (!at.ok() || !dial.ok()) return "";  // which gRPC tells
  return tls.on() ? AccountOfTls(dial->get(), at->host, tls, files) : AccountOfPlain(dial->get(), at->host);
}

}  // namespace ballast
