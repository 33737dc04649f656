// A pair as what one end of a handshake shows. Thread-safe: functions without a state.
#pragma once

#include <openssl/ssl.h>

#include "proto/tls/certificate_files.h"

namespace ballast {

// Has `ssl` show this certificate with its chain. False: OpenSSL does not take it, which ReadCertifiedKey would have said.
bool Show(const CertifiedKey& pair, SSL* ssl);

}  // namespace ballast
