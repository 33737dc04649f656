#include "proto/tls/shown_certificate.h"

#include <openssl/err.h>
#include <openssl/pem.h>

#include "proto/tls/openssl.h"

namespace ballast {

bool Show(const CertifiedKey& pair, SSL* ssl) {
  const OpensslPtr<BIO> certificates = BioOf(pair.certificate);
  const OpensslPtr<X509> own(PEM_read_bio_X509(certificates.get(), nullptr, nullptr, nullptr));
  const OpensslPtr<EVP_PKEY> key(PEM_read_bio_PrivateKey(BioOf(pair.key).get(), nullptr, nullptr, nullptr));
  if (own == nullptr || key == nullptr) return false;
  if (SSL_use_certificate(ssl, own.get()) != 1 || SSL_use_PrivateKey(ssl, key.get()) != 1) return false;
  SSL_clear_chain_certs(ssl);
  while (X509* next = PEM_read_bio_X509(certificates.get(), nullptr, nullptr, nullptr)) SSL_add0_chain_cert(ssl, next);
  ERR_clear_error();  // of the file's end
  return true;
}

}  // namespace ballast
