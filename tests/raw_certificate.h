// Certificates that no authority should make, signed by one nonetheless.
#pragma once

#include <gtest/gtest.h>
#include <openssl/pem.h>
#include <openssl/rsa.h>
#include <openssl/x509v3.h>

#include <string>

#include "proto/tls/openssl.h"

#include "client/cpp/ctl/authority.h"

namespace ballast {

// For a daemon, valid for an hour. `names`: of subjectAltName, as OpenSSL's configuration has it, such as DER:30...
inline ctl::PemPair MakeRawPair(const ctl::PemPair& authority, EVP_PKEY* key, const char* names) {
  const OpensslPtr<X509> issuer(PEM_read_bio_X509(BioOf(authority.certificate).get(), nullptr, nullptr, nullptr));
  const OpensslPtr<EVP_PKEY> signing(PEM_read_bio_PrivateKey(BioOf(authority.key).get(), nullptr, nullptr, nullptr));
  const OpensslPtr<X509> made(X509_new());
  X509_set_version(made.get(), 2);
  ASN1_INTEGER_set(X509_get_serialNumber(made.get()), 7);
  X509_gmtime_adj(X509_getm_notBefore(made.get()), -60);
  X509_gmtime_adj(X509_getm_notAfter(made.get()), 3600);
  X509_set_issuer_name(made.get(), X509_get_subject_name(issuer.get()));
  X509_set_pubkey(made.get(), key);
  X509_EXTENSION* const extension = X509V3_EXT_conf_nid(nullptr, nullptr, NID_subject_alt_name, names);
  EXPECT_NE(extension, nullptr);
  X509_add_ext(made.get(), extension, -1);
  X509_EXTENSION_free(extension);
  EXPECT_GT(X509_sign(made.get(), signing.get(), EVP_sha256()), 0);

  const auto text = [](auto write) {
    const OpensslPtr<BIO> out(BIO_new(BIO_s_mem()));
    write(out.get());
    char* bytes = nullptr;
    const long size = BIO_get_mem_data(out.get(), &bytes);
    return std::string(bytes, static_cast<size_t>(size));
  };
  return {.certificate = text([&](BIO* out) { PEM_write_bio_X509(out, made.get()); }),
          .key = text([&](BIO* out) { PEM_write_bio_PrivateKey(out, key, nullptr, nullptr, 0, nullptr, nullptr); })};
}

}  // namespace ballast
