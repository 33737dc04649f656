// OpenSSL's objects as values that free themselves, and its times as absl's.
#pragma once

#include <openssl/bio.h>
#include <openssl/evp.h>
#include <openssl/ssl.h>
#include <openssl/x509.h>
#include <openssl/x509v3.h>

#include <array>
#include <ctime>
#include <memory>
#include <string>
#include <string_view>
#include <vector>

#include "absl/time/time.h"

namespace ballast {

struct OpensslFree {
  void operator()(BIO* bio) const { BIO_free_all(bio); }
  void operator()(EVP_PKEY* key) const { EVP_PKEY_free(key); }
  void operator()(SSL* ssl) const { SSL_free(ssl); }
  void operator()(SSL_CTX* context) const { SSL_CTX_free(context); }
  void operator()(X509* certificate) const { X509_free(certificate); }
};
template <typename Object>
using OpensslPtr = std::unique_ptr<Object, OpensslFree>;

// Reads from `text`, which outlives it.
inline OpensslPtr<BIO> BioOf(std::string_view text) {
  return OpensslPtr<BIO>(BIO_new_mem_buf(text.data(), static_cast<int>(text.size())));
}

// One of those that a certificate is for: bytes as they lie in it, which may be anything.
struct AlternativeName {
  int type = 0;  // GEN_DNS, GEN_IPADD, GEN_URI; others have no bytes here
  std::string bytes;
};
inline std::vector<AlternativeName> AlternativeNamesOf(const X509* certificate) {
  auto* names = static_cast<GENERAL_NAMES*>(X509_get_ext_d2i(certificate, NID_subject_alt_name, nullptr, nullptr));
  std::vector<AlternativeName> found;
  for (int i = 0; i < sk_GENERAL_NAME_num(names); ++i) {
    const GENERAL_NAME* name = sk_GENERAL_NAME_value(names, i);
    AlternativeName& made = found.emplace_back();
    made.type = name->type;
    const ASN1_STRING* const text = name->type == GEN_DNS     ? name->d.dNSName
                                    : name->type == GEN_IPADD ? name->d.iPAddress
                                    : name->type == GEN_URI   ? name->d.uniformResourceIdentifier
                                                              : nullptr;
    if (text == nullptr) continue;
    made.bytes.assign(reinterpret_cast<const char*>(ASN1_STRING_get0_data(text)),
                      static_cast<size_t>(ASN1_STRING_length(text)));
  }
  GENERAL_NAMES_free(names);
  return found;
}

inline std::string CommonNameOf(const X509_NAME* name) {
  std::array<char, 256> text{};
  X509_NAME_get_text_by_NID(name, NID_commonName, text.data(), text.size());
  return text.data();
}

inline absl::Time TimeOf(const ASN1_TIME* time) {
  std::tm parts{};
  return ASN1_TIME_to_tm(time, &parts) == 1 ? absl::FromTimeT(timegm(&parts)) : absl::InfinitePast();
}

}  // namespace ballast
