// OpenSSL's objects as values that free themselves, and its times as absl's.
#pragma once

#include <openssl/bio.h>
#include <openssl/evp.h>
#include <openssl/ssl.h>
#include <openssl/x509.h>

#include <array>
#include <ctime>
#include <memory>
#include <string>
#include <string_view>

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
