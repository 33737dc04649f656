// The certificate that the daemon shows, and the authorities of those that it takes: read from the files of section tls,
// and read again when they change, so that they are rotated without a restart. What is there is checked first
// (proto/tls/certificate_files.h). New files that are not right change nothing: what was there before stays in use, and
// the log (tls_reload) and the metrics say so. The keys are in this process's memory alone.
//
// A pair whose files are replaced one after the other is not taken in between (server/base/file_watcher.h). Thread-safe.
#pragma once

#include <cstdint>
#include <memory>
#include <string>

#include "absl/base/thread_annotations.h"
#include "absl/status/status.h"
#include "absl/status/statusor.h"
#include "absl/synchronization/mutex.h"
#include "absl/time/time.h"
#include "proto/tls/certificate_files.h"

#include "server/base/file_watcher.h"
#include "server/config/config.h"
#include "server/config/config_check.h"
#include "server/metrics/metrics.h"

namespace ballast {

// What the files hold; never changed.
struct Certificates {
  CertifiedKey own;
  Authorities clients;  // empty: any client is let in
  uint64_t number = 1;  // of those that were taken since the start
};

class CertificateKeeper {
 public:
  // `metrics` outlives it. FAILED_PRECONDITION: as the files' check says, with the key of the configuration in front.
  static absl::StatusOr<std::unique_ptr<CertificateKeeper>> Open(const Config::Tls& tls, Metrics* metrics,
                                                                 absl::Duration look_every = FileWatcher::kLookEvery);

  // Those in use, for a handshake that begins now.
  std::shared_ptr<const Certificates> current() const;

 private:
  CertificateKeeper(const Config::Tls& tls, Metrics* metrics) : tls_(tls), metrics_(metrics) {}
  void ReadAgain();
  void Take(absl::StatusOr<Certificates> read);
  void ShowDates(const Certificates& taken) const;
  void WarnOfExpiry();

  const Config::Tls tls_;
  Metrics* const metrics_;
  uint64_t warned_number_ = 0;  // whose expiry was logged; the watcher's thread's
  mutable absl::Mutex mu_;
  std::shared_ptr<const Certificates> current_ ABSL_GUARDED_BY(mu_);
  std::unique_ptr<FileWatcher> watcher_;  // last: its thread uses the rest
};

// What is wrong with the files that the configuration names for TLS, by the key that names them; empty path: nothing.
ConfigError CheckTlsFiles(const Config& config);

}  // namespace ballast
