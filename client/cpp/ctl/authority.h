// A certificate authority for development and tests: makes its own certificate, and pairs that it signs. Keys are of the
// curve P-256. Its key lies beside the certificates, and nothing revokes one: for production an authority is meant that
// keeps its key elsewhere. Thread-compatible.
#pragma once

#include <memory>
#include <string>
#include <vector>

#include "absl/status/statusor.h"
#include "absl/time/time.h"
#include "proto/tls/certificate_files.h"
#include "proto/tls/openssl.h"

namespace ballast::ctl {

struct Validity {
  absl::Time not_before, not_after;
};

// Both in PEM.
struct PemPair {
  std::string certificate, key;
};

struct PairRequest {
  std::string common_name;
  TlsEnd end = TlsEnd::kClient;
  // What the certificate is for: host names, IP addresses, and URIs such as spiffe://DOMAIN/PATH.
  std::vector<std::string> names;
  Validity validity;
};

class Authority {
 public:
  static absl::StatusOr<Authority> Make(const std::string& common_name, const Validity& validity);

  const PemPair& pem() const { return pem_; }
  // INVALID_ARGUMENT: one of the names is none.
  absl::StatusOr<PemPair> Issue(const PairRequest& request) const;

 private:
  Authority() = default;
  OpensslPtr<X509> certificate_;
  OpensslPtr<EVP_PKEY> key_;
  PemPair pem_;
};

}  // namespace ballast::ctl
