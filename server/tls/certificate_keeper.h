// The certificate that the daemon shows, and the authorities of those that it takes: read from the files of section tls,
// and read again when they change, so that they are rotated without a restart. What is there is checked first
// (proto/tls/certificate_files.h). New files that are not right change nothing: what was there before stays in use, and
// the log (tls_reload) and the metrics say so. The keys are in this process's memory alone.
//
// Files are looked at every second, and read when they have been the same at two looks: a pair whose files are replaced
// one after the other is not taken in between. One thread of its own, asleep between looks. Thread-safe.
#pragma once

#include <array>
#include <cstdint>
#include <memory>
#include <string>
#include <thread>

#include "absl/base/thread_annotations.h"
#include "absl/status/status.h"
#include "absl/status/statusor.h"
#include "absl/synchronization/mutex.h"
#include "absl/time/time.h"
#include "proto/tls/certificate_files.h"

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
  static constexpr absl::Duration kLookEvery = absl::Seconds(1);

  // `metrics` outlives it. FAILED_PRECONDITION: as the files' check says, with the key of the configuration in front.
  static absl::StatusOr<std::unique_ptr<CertificateKeeper>> Open(const Config::Tls& tls, Metrics* metrics,
                                                                 absl::Duration look_every = kLookEvery);
  ~CertificateKeeper();

  // Those in use, for a handshake that begins now.
  std::shared_ptr<const Certificates> current() const;

 private:
  using Stamps = std::array<FileStamp, 3>;

  CertificateKeeper(const Config::Tls& tls, Metrics* metrics, absl::Duration look_every);
  Stamps Look() const;
  void Run();
  void LookAgain();
  void Take(absl::StatusOr<Certificates> read);
  void ShowDates(const Certificates& taken) const;
  void WarnOfExpiry();

  const Config::Tls tls_;
  Metrics* const metrics_;
  const absl::Duration look_every_;
  Stamps judged_, looked_;      // of the files that were read last, and of the last look; the thread's
  uint64_t warned_number_ = 0;  // whose expiry was logged; the thread's
  mutable absl::Mutex mu_;
  bool stop_ ABSL_GUARDED_BY(mu_) = false;
  std::shared_ptr<const Certificates> current_ ABSL_GUARDED_BY(mu_);
  std::thread thread_;
};

// What is wrong with the files that the configuration names for TLS, by the key that names them; empty path: nothing.
ConfigError CheckTlsFiles(const Config& config);

}  // namespace ballast
