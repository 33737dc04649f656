#include "proto/tls/certificate_files.h"

#include <fcntl.h>
#include <openssl/err.h>
#include <openssl/pem.h>
#include <sys/stat.h>
#include <unistd.h>

#include <algorithm>
#include <cerrno>
#include <cstring>
#include <utility>
#include <vector>

#include "absl/cleanup/cleanup.h"
#include "absl/strings/cord.h"
#include "absl/strings/match.h"
#include "absl/strings/str_cat.h"
#include "absl/strings/str_format.h"
#include "proto/tls/openssl.h"

namespace ballast {
namespace {

constexpr size_t kMostBytes = 1 << 20;
constexpr char kAboutKeyUrl[] = "ballast/about-key";  // a status has this where the key is at fault
constexpr char kPemHint[] = "it must be PEM, with -----BEGIN CERTIFICATE-----";

using Chain = std::vector<OpensslPtr<X509>>;

absl::Status Wrong(const std::string& file, const std::string& what) {
  ERR_clear_error();
  return absl::FailedPreconditionError(absl::StrCat(file, ": ", what));
}

absl::Status AboutKey(absl::Status wrong) {
  wrong.SetPayload(kAboutKeyUrl, absl::Cord());
  return wrong;
}

std::string Day(absl::Time time) { return absl::FormatTime("%Y-%m-%d %H:%M:%S UTC", time, absl::UTCTimeZone()); }

std::string SpiffeId(const X509* certificate) {
  std::string found;
  for (const AlternativeName& name : AlternativeNamesOf(certificate)) {
    if (name.type == GEN_URI && absl::StartsWith(name.bytes, "spiffe://")) found = name.bytes;
  }
  return found;
}

absl::Status CheckMode(const std::string& file, const struct stat& found) {
  const bool of_root = found.st_uid == 0 && geteuid() != 0;  // and the group is the daemon's, or it could not read it
  const mode_t allowed = of_root ? S_IRWXU | S_IRWXG : S_IRWXU;
  if ((found.st_mode & (S_IRWXU | S_IRWXG | S_IRWXO) & ~allowed) == 0) return absl::OkStatus();
  // Root looks at what is another user's to use: chmod 600 would take it from that user.
  if (found.st_uid == 0 && (found.st_mode & S_IRWXO) == 0) {
    return Wrong(file, absl::StrFormat("its group can read or write this secret (mode %04o), which is right only for a "
                                       "user of that group: look as that user, or chmod 600 %s",
                                       found.st_mode & 07777, file));
  }
  return Wrong(file, absl::StrFormat("others than its owner can read or write this secret (mode %04o): chmod 600 %s, "
                                     "and make a new one if another user may have read it",
                                     found.st_mode & 07777, file));
}

absl::StatusOr<std::string> ReadWhole(const std::string& file, bool secret) {
  // A pipe that nobody writes to would hold an open without O_NONBLOCK.
  const int fd = open(file.c_str(), O_RDONLY | O_CLOEXEC | O_NONBLOCK);
  struct stat found {};
  if (fd < 0)
    return Wrong(file, absl::StrCat("cannot be read: ", std::strerror(errno), "; correct the path or its rights"));
  const absl::Cleanup closed = [fd] { close(fd); };
  if (fstat(fd, &found) != 0 || !S_ISREG(found.st_mode)) return Wrong(file, "is no file; name a file");
  if (const absl::Status mode = secret ? CheckMode(file, found) : absl::OkStatus(); !mode.ok()) return mode;
  std::string text(kMostBytes + 1, '\0');
  size_t bytes = 0;
  for (ssize_t more = 1; more > 0 && bytes < text.size(); bytes += static_cast<size_t>(std::max<ssize_t>(more, 0))) {
    more = read(fd, text.data() + bytes, text.size() - bytes);
    if (more < 0) return Wrong(file, absl::StrCat("cannot be read: ", std::strerror(errno)));
  }
  if (bytes > kMostBytes) return Wrong(file, "is longer than 1 MiB; name the right file");
  text.resize(bytes);
  return text;
}

absl::StatusOr<Chain> ParseCertificates(const std::string& file, const std::string& pem) {
  Chain chain;
  const OpensslPtr<BIO> bio = BioOf(pem);
  while (X509* next = PEM_read_bio_X509(bio.get(), nullptr, nullptr, nullptr)) chain.emplace_back(next);
  const bool ended = ERR_GET_REASON(ERR_peek_last_error()) == PEM_R_NO_START_LINE;
  if (chain.empty() && ended) return Wrong(file, absl::StrCat("holds no certificate: ", kPemHint));
  if (!ended) return Wrong(file, absl::StrCat("certificate ", chain.size() + 1, " in it cannot be read: ", kPemHint));
  ERR_clear_error();
  return chain;
}

// `which`: "" of the file's only certificate, else which of them.
absl::Status CheckDates(const std::string& file, const X509* certificate, const std::string& which, absl::Time now) {
  const absl::Time begin = TimeOf(X509_get0_notBefore(certificate)), end = TimeOf(X509_get0_notAfter(certificate));
  if (now > end) {
    return Wrong(file,
                 absl::StrCat(which, "expired at ", Day(end), "; put a new one there (it is now ", Day(now), ")"));
  }
  if (now >= begin) return absl::OkStatus();
  return Wrong(file, absl::StrCat(which, "is not yet valid, only from ", Day(begin),
                                  " on; wait, or correct this machine's "
                                  "clock (it is now ",
                                  Day(now), ")"));
}

absl::Status CheckChain(const std::string& file, const Chain& chain, absl::Time now) {
  for (size_t i = 0; i < chain.size(); ++i) {
    const std::string which = chain.size() == 1 ? "" : absl::StrCat("certificate ", i + 1, " in it ");
    if (auto s = CheckDates(file, chain[i].get(), which, now); !s.ok()) return s;
    if (i + 1 == chain.size()) break;
    X509* const issuer = chain[i + 1].get();
    const bool signed_by_next = X509_check_issued(issuer, chain[i].get()) == X509_V_OK &&
                                X509_verify(chain[i].get(), X509_get0_pubkey(issuer)) == 1;
    if (!signed_by_next) {
      return Wrong(file, absl::StrCat("certificate ", i + 2, " in it did not sign certificate ", i + 1,
                                      "; its own comes first, then those of the authorities that signed it, in order"));
    }
  }
  return absl::OkStatus();
}

absl::Status CheckPurpose(const std::string& file, X509* certificate, TlsEnd end) {
  const bool daemon = end == TlsEnd::kDaemon;
  const int purpose = daemon ? X509_PURPOSE_SSL_SERVER : X509_PURPOSE_SSL_CLIENT;
  if (X509_check_purpose(certificate, purpose, /*ca=*/0) == 1) return absl::OkStatus();
  return Wrong(file, daemon
                         ? "is no certificate for a daemon (extended key usage serverAuth is missing); was a trainer's "
                           "named in its place?"
                         : "is no certificate for a client (extended key usage clientAuth is missing); was the "
                           "daemon's named in its place?");
}

// OpenSSL would ask at the terminal.
int NoPassphrase(char*, int, int, void* asked) {
  *static_cast<bool*>(asked) = true;
  return -1;
}

absl::Status CheckKey(const std::string& key_file, const std::string& pem, const std::string& certificate_file,
                      X509* certificate) {
  bool asked = false;
  const OpensslPtr<EVP_PKEY> key(PEM_read_bio_PrivateKey(BioOf(pem).get(), nullptr, NoPassphrase, &asked));
  if (asked) return Wrong(key_file, "has a passphrase; write it without one (openssl pkey -in OLD -out NEW), mode 600");
  if (key == nullptr) return Wrong(key_file, "holds no private key: it must be PEM, with -----BEGIN PRIVATE KEY-----");
  if (X509_check_private_key(certificate, key.get()) == 1) return absl::OkStatus();
  return Wrong(key_file, absl::StrCat("is the key of another certificate than ", certificate_file,
                                      "; name the two files of one pair"));
}

// gRPC 1.51 ends the process by an address that is none.
absl::Status CheckAddresses(const std::string& certificate_file, const X509* certificate) {
  for (const AlternativeName& name : AlternativeNamesOf(certificate)) {
    if (name.type != GEN_IPADD || name.bytes.size() == 4 || name.bytes.size() == 16) continue;
    return Wrong(certificate_file,
                 absl::StrCat("has an IP address of ", name.bytes.size(), " bytes; have it made anew"));
  }
  return absl::OkStatus();
}

// What OpenSSL does not take for a handshake, such as a key that is too short or a signature by SHA-1, is known only when
// it is given it.
absl::Status CheckTaken(const std::string& certificate_file, const Chain& chain) {
  const OpensslPtr<SSL_CTX> context(SSL_CTX_new(TLS_method()));
  bool taken = context != nullptr && SSL_CTX_use_certificate(context.get(), chain.front().get()) == 1;
  for (size_t i = 1; taken && i < chain.size(); ++i) {
    taken = SSL_CTX_add1_chain_cert(context.get(), chain[i].get()) == 1;
  }
  if (taken) return absl::OkStatus();
  const char* const why = ERR_reason_error_string(ERR_peek_last_error());
  ERR_clear_error();
  return Wrong(certificate_file, absl::StrCat("is not taken by OpenSSL (", why == nullptr ? "no reason given" : why,
                                              "); have one made with a key of today's length and SHA-256"));
}

}  // namespace

absl::StatusOr<std::string> ReadSmallFile(const std::string& file) { return ReadWhole(file, /*secret=*/false); }
absl::StatusOr<std::string> ReadSecretFile(const std::string& file) { return ReadWhole(file, /*secret=*/true); }

absl::StatusOr<CertifiedKey> ReadCertifiedKey(const std::string& certificate_file, const std::string& key_file,
                                              TlsEnd end, absl::Time now) {
  auto certificate = ReadSmallFile(certificate_file);
  if (!certificate.ok()) return certificate.status();
  auto key = ReadSecretFile(key_file);
  if (!key.ok()) return AboutKey(key.status());
  const auto chain = ParseCertificates(certificate_file, *certificate);
  if (!chain.ok()) return chain.status();
  X509* const own = chain->front().get();
  if (auto s = CheckKey(key_file, *key, certificate_file, own); !s.ok()) return AboutKey(s);
  if (auto s = CheckChain(certificate_file, *chain, now); !s.ok()) return s;
  if (auto s = CheckPurpose(certificate_file, own, end); !s.ok()) return s;
  if (auto s = CheckAddresses(certificate_file, own); !s.ok()) return s;
  if (auto s = CheckTaken(certificate_file, *chain); !s.ok()) return s;
  const std::string spiffe = SpiffeId(own);
  CertifiedKey pair{.certificate = *std::move(certificate),
                    .key = *std::move(key),
                    .subject = spiffe.empty() ? CommonNameOf(X509_get_subject_name(own)) : spiffe,
                    .issuer = CommonNameOf(X509_get_issuer_name(chain->back().get())),
                    .not_before = absl::InfinitePast(),
                    .not_after = absl::InfiniteFuture()};
  for (const auto& each : *chain) {
    pair.not_before = std::max(pair.not_before, TimeOf(X509_get0_notBefore(each.get())));
    pair.not_after = std::min(pair.not_after, TimeOf(X509_get0_notAfter(each.get())));
  }
  return pair;
}

bool IsAboutKey(const absl::Status& wrong) { return wrong.GetPayload(kAboutKeyUrl).has_value(); }

absl::StatusOr<Authorities> ReadAuthorities(const std::string& file, absl::Time now) {
  auto text = ReadSmallFile(file);
  if (!text.ok()) return text.status();
  const auto certificates = ParseCertificates(file, *text);
  if (!certificates.ok()) return certificates.status();
  Authorities found{
      .certificates = *std::move(text), .not_before = absl::InfinitePast(), .not_after = absl::InfinitePast()};
  absl::Status unusable = absl::OkStatus();
  for (size_t i = 0; i < certificates->size(); ++i) {
    X509* const each = (*certificates)[i].get();
    const std::string which = certificates->size() == 1 ? "" : absl::StrCat("certificate ", i + 1, " in it ");
    if (X509_check_ca(each) == 0) {
      return Wrong(file, absl::StrCat(which,
                                      "is not the certificate of an authority (CA); name the one that signed the "
                                      "other end's certificate"));
    }
    const absl::Status dates = CheckDates(file, each, which, now);
    if (unusable.ok()) unusable = dates;
    const absl::Time not_after = TimeOf(X509_get0_notAfter(each));
    if (!dates.ok() || not_after < found.not_after) continue;
    found.not_before = TimeOf(X509_get0_notBefore(each));
    found.not_after = not_after;
  }
  if (found.not_after == absl::InfinitePast()) return unusable;
  return found;
}

FileStamp StampOf(const std::string& file) {
  struct stat found {};
  if (stat(file.c_str(), &found) != 0) return {};
  const auto nanoseconds = [](const timespec& time) { return int64_t{time.tv_sec} * 1'000'000'000 + time.tv_nsec; };
  return {.device = found.st_dev,
          .inode = found.st_ino,
          .bytes = static_cast<uint64_t>(found.st_size),
          .written_ns = nanoseconds(found.st_mtim),
          .changed_ns = nanoseconds(found.st_ctim)};
}

}  // namespace ballast
