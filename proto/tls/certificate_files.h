// The files that TLS needs, read and checked before they are used: a certificate with its key, and the authorities that
// the other end's certificate must come from. What is wrong is said before a connection fails by it: an error names the
// file and what to do, and never shows what is in a key. Thread-safe: functions without a state.
#pragma once

#include <cstdint>
#include <string>

#include "absl/status/status.h"
#include "absl/status/statusor.h"
#include "absl/time/time.h"

namespace ballast {

// Which end of a connection a certificate is for.
enum class TlsEnd { kDaemon, kClient };

// A certificate and its key, in PEM.
struct CertifiedKey {
  std::string certificate;  // its own first, then those of the authorities that signed it, in order, without the root
  std::string key;          // secret
  std::string subject;      // its SPIFFE ID if it has one, else its subject's common name
  std::string issuer;       // the common name of who signed the last of the chain
  // When all of the chain is valid.
  absl::Time not_before, not_after;
};

// FAILED_PRECONDITION names the file: it cannot be read, is not PEM, has expired, is not valid yet, is for the other
// end, or the chain is out of order; or the key is another certificate's, has a passphrase, or can be read by others
// than its owner. A key that root owns may be read by its group, as the files of a mounted secret are.
absl::StatusOr<CertifiedKey> ReadCertifiedKey(const std::string& certificate_file, const std::string& key_file,
                                              TlsEnd end, absl::Time now);
// Whether an error of it is about the key, and not the certificate: one file may hold both.
bool IsAboutKey(const absl::Status& wrong);

struct Authorities {
  std::string certificates;          // PEM
  absl::Time not_before, not_after;  // of the one that is valid longest
};

// FAILED_PRECONDITION likewise: there is none, one is no authority's, or none is valid now.
absl::StatusOr<Authorities> ReadAuthorities(const std::string& file, absl::Time now);

// A text file of at most 1 MiB. FAILED_PRECONDITION names it.
absl::StatusOr<std::string> ReadSmallFile(const std::string& file);
// The same of one that nobody but its owner may read, as a key.
absl::StatusOr<std::string> ReadSecretFile(const std::string& file);

// Changes whenever a file is written, replaced, or its rights are changed; equal where it is not there.
struct FileStamp {
  uint64_t device = 0, inode = 0, bytes = 0;
  int64_t written_ns = 0, changed_ns = 0;  // since 1970
  bool operator==(const FileStamp&) const = default;
};
FileStamp StampOf(const std::string& file);

}  // namespace ballast
