#include "client/cpp/ctl/authority.h"

#include <openssl/ec.h>
#include <openssl/err.h>
#include <openssl/pem.h>
#include <openssl/rand.h>
#include <openssl/x509v3.h>

#include <algorithm>
#include <array>
#include <utility>

#include "absl/strings/ascii.h"
#include "absl/strings/match.h"
#include "absl/strings/str_cat.h"
#include "absl/strings/str_join.h"

#include "client/cpp/transport/dial.h"

namespace ballast::ctl {
namespace {

absl::Status Failed(const char* what) {
  std::array<char, 256> why{};
  ERR_error_string_n(ERR_get_error(), why.data(), why.size());
  ERR_clear_error();
  return absl::InternalError(absl::StrCat("OpenSSL cannot ", what, ": ", why.data()));
}

// As OpenSSL's configuration has it: DNS:node7.
absl::StatusOr<std::string> AlternativeName(const std::string& name) {
  if (IsIpAddress(name)) return absl::StrCat("IP:", name);
  const bool is_uri = absl::StrContains(name, "://");
  const bool plain = std::all_of(name.begin(), name.end(), [&](unsigned char c) {
    return absl::ascii_isalnum(c) || c == '-' || c == '.' || c == '_' || c == '*' || (is_uri && (c == ':' || c == '/'));
  });
  if (!plain || name.empty()) {
    return absl::InvalidArgumentError(
        absl::StrCat("'", name, "' is neither a host's name, without a port, nor an address"));
  }
  return absl::StrCat(is_uri ? "URI:" : "DNS:", name);
}

absl::Status AddExtension(X509* certificate, X509* issuer, int nid, const std::string& value) {
  X509V3_CTX context;
  X509V3_set_ctx_nodb(&context);
  X509V3_set_ctx(&context, issuer, certificate, nullptr, nullptr, 0);
  X509_EXTENSION* const extension = X509V3_EXT_conf_nid(nullptr, &context, nid, value.c_str());
  if (extension == nullptr) return Failed("make a certificate's extension");
  X509_add_ext(certificate, extension, -1);
  X509_EXTENSION_free(extension);
  return absl::OkStatus();
}

void SetTime(ASN1_TIME* field, absl::Time time) { ASN1_TIME_set(field, absl::ToTimeT(time)); }

// Without extensions, and not signed yet.
OpensslPtr<X509> Blank(const std::string& common_name, const Validity& validity, EVP_PKEY* key) {
  OpensslPtr<X509> made(X509_new());
  X509_set_version(made.get(), X509_VERSION_3);
  std::array<unsigned char, 16> serial{};
  RAND_bytes(serial.data(), serial.size());
  serial[0] = static_cast<unsigned char>((serial[0] & 0x3f) | 0x40);  // above 0, and of full length
  BIGNUM* const number = BN_bin2bn(serial.data(), serial.size(), nullptr);
  BN_to_ASN1_INTEGER(number, X509_get_serialNumber(made.get()));
  BN_free(number);
  SetTime(X509_getm_notBefore(made.get()), validity.not_before);
  SetTime(X509_getm_notAfter(made.get()), validity.not_after);
  X509_NAME_add_entry_by_txt(X509_get_subject_name(made.get()), "CN", MBSTRING_UTF8,
                             reinterpret_cast<const unsigned char*>(common_name.c_str()), -1, -1, 0);
  X509_set_pubkey(made.get(), key);
  return made;
}

std::string Text(BIO* bio) {
  const char* data = nullptr;
  const long bytes = BIO_get_mem_data(bio, &data);
  return {data, static_cast<size_t>(bytes)};
}

absl::StatusOr<PemPair> ToPem(X509* certificate, EVP_PKEY* key) {
  const OpensslPtr<BIO> certificate_bio(BIO_new(BIO_s_mem())), key_bio(BIO_new(BIO_s_secmem()));
  if (PEM_write_bio_X509(certificate_bio.get(), certificate) != 1 ||
      PEM_write_bio_PKCS8PrivateKey(key_bio.get(), key, nullptr, nullptr, 0, nullptr, nullptr) != 1) {
    return Failed("write a certificate");
  }
  return PemPair{.certificate = Text(certificate_bio.get()), .key = Text(key_bio.get())};
}

using Extensions = std::vector<std::pair<int, std::string>>;

absl::Status Sign(X509* certificate, X509* issuer, EVP_PKEY* issuer_key, const Extensions& extensions) {
  X509_set_issuer_name(certificate, X509_get_subject_name(issuer));
  for (const auto& [nid, value] : extensions) {
    if (auto s = AddExtension(certificate, issuer, nid, value); !s.ok()) return s;
  }
  return X509_sign(certificate, issuer_key, EVP_sha256()) > 0 ? absl::OkStatus() : Failed("sign a certificate");
}

}  // namespace

absl::StatusOr<Authority> Authority::Make(const std::string& common_name, const Validity& validity) {
  Authority made;
  made.key_.reset(EVP_EC_gen("P-256"));
  if (made.key_ == nullptr) return Failed("make a key");
  made.certificate_ = Blank(common_name, validity, made.key_.get());
  X509* const own = made.certificate_.get();
  const absl::Status is_signed = Sign(own, own, made.key_.get(),
                                      {{NID_basic_constraints, "critical,CA:TRUE"},
                                       {NID_key_usage, "critical,keyCertSign,cRLSign"},
                                       {NID_subject_key_identifier, "hash"}});
  if (!is_signed.ok()) return is_signed;
  auto pem = ToPem(own, made.key_.get());
  if (!pem.ok()) return pem.status();
  made.pem_ = *std::move(pem);
  return made;
}

absl::StatusOr<PemPair> Authority::Issue(const PairRequest& request) const {
  std::vector<std::string> names;
  for (const std::string& name : request.names) {
    auto alternative = AlternativeName(name);
    if (!alternative.ok()) return alternative.status();
    names.push_back(*std::move(alternative));
  }
  const OpensslPtr<EVP_PKEY> key(EVP_EC_gen("P-256"));
  if (key == nullptr) return Failed("make a key");
  const OpensslPtr<X509> made = Blank(request.common_name, request.validity, key.get());
  const absl::Status is_signed =
      Sign(made.get(), certificate_.get(), key_.get(),
           {{NID_basic_constraints, "critical,CA:FALSE"},
            {NID_key_usage, "critical,digitalSignature"},
            {NID_ext_key_usage, request.end == TlsEnd::kDaemon ? "serverAuth" : "clientAuth"},
            {NID_subject_alt_name, absl::StrJoin(names, ",")},
            {NID_subject_key_identifier, "hash"},
            {NID_authority_key_identifier, "keyid:always"}});
  if (!is_signed.ok()) return is_signed;
  return ToPem(made.get(), key.get());
}

}  // namespace ballast::ctl
