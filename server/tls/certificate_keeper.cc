#include "server/tls/certificate_keeper.h"

#include <algorithm>
#include <utility>
#include <vector>

#include "absl/strings/match.h"
#include "absl/strings/str_cat.h"
#include "absl/time/clock.h"
#include "proto/tls/token_file.h"

#include "server/base/log.h"
#include "server/base/status_macros.h"
#include "server/metrics/metric_table.h"

namespace ballast {
namespace {

std::string DayOf(absl::Time time) { return absl::FormatTime(absl::RFC3339_sec, time, absl::UTCTimeZone()); }

absl::StatusOr<Certificates> ReadCertificates(const Config::Tls& tls) {
  const absl::Time now = absl::Now();
  Certificates read;
  ASSIGN_OR_RETURN(read.own, ReadCertifiedKey(tls.certificate, tls.key, TlsEnd::kDaemon, now));
  if (tls.requires_clients()) {
    ASSIGN_OR_RETURN(read.clients, ReadAuthorities(tls.client_ca, now));
  }
  return read;
}

// As the alert BallastCertificateExpiring has it: a week before, or a sixth of its time where that is less.
bool ExpiresSoon(const CertifiedKey& own, absl::Time now) {
  return own.not_after - now < std::min(absl::Hours(24 * 7), (own.not_after - own.not_before) / 6);
}

}  // namespace

absl::StatusOr<std::unique_ptr<CertificateKeeper>> CertificateKeeper::Open(const Config::Tls& tls, Metrics* metrics,
                                                                           absl::Duration look_every) {
  std::unique_ptr<CertificateKeeper> keeper(new CertificateKeeper(tls, metrics));
  // Looked at first: what changes while it is read is read again.
  keeper->watcher_ = std::make_unique<FileWatcher>(std::vector{tls.certificate, tls.key, tls.client_ca}, look_every);
  ASSIGN_OR_RETURN(Certificates read, ReadCertificates(tls));
  keeper->ShowDates(read);
  keeper->current_ = std::make_shared<const Certificates>(std::move(read));
  keeper->watcher_->Start([self = keeper.get()] { self->ReadAgain(); },
                          [self = keeper.get()] { self->WarnOfExpiry(); });
  return keeper;
}

std::shared_ptr<const Certificates> CertificateKeeper::current() const {
  absl::MutexLock lock(&mu_);
  return current_;
}

void CertificateKeeper::ReadAgain() {
  absl::StatusOr<Certificates> read = ReadCertificates(tls_);
  if (watcher_->Steady()) Take(std::move(read));
}

void CertificateKeeper::Take(absl::StatusOr<Certificates> read) {
  if (read.ok()) {
    ShowDates(*read);
    absl::MutexLock lock(&mu_);
    read->number = current_->number + 1;
    current_ = std::make_shared<const Certificates>(*read);
  }
  // Who is told so may rely on it.
  metrics_->Count("ballast_tls_reloads_total", read.ok() ? "success" : "failed");
  metrics_->SetLastReload("tls", read.ok());
  if (!read.ok()) {
    return Log(LogLevel::kError, "tls_reload", "the new TLS files are not right; those before stay in use",
               {{"err", std::string(read.status().message())}});
  }
  Log(LogLevel::kInfo, "tls_reload", "the new TLS files are in use from the next connection on",
      {{"identity", read->own.subject}, {"not_after", DayOf(read->own.not_after)}});
}

void CertificateKeeper::ShowDates(const Certificates& taken) const {
  metrics_->SetCertificate("certificate", absl::ToDoubleSeconds(taken.own.not_before - absl::UnixEpoch()),
                           absl::ToDoubleSeconds(taken.own.not_after - absl::UnixEpoch()));
  if (taken.clients.certificates.empty()) return;
  metrics_->SetCertificate("client_ca", absl::ToDoubleSeconds(taken.clients.not_before - absl::UnixEpoch()),
                           absl::ToDoubleSeconds(taken.clients.not_after - absl::UnixEpoch()));
}

void CertificateKeeper::WarnOfExpiry() {
  const std::shared_ptr<const Certificates> now = current();
  if (now->number == warned_number_ || !ExpiresSoon(now->own, absl::Now())) return;
  warned_number_ = now->number;
  Log(LogLevel::kWarn, "certificate_expiring", "tls.certificate expires soon: put a new pair in its place",
      {{"identity", now->own.subject}, {"not_after", DayOf(now->own.not_after)}});
}

ConfigError CheckTlsFiles(const Config& config) {
  const auto of = [](const absl::Status& wrong, std::string path) {
    return ConfigError{.path = std::move(path), .problem = std::string(wrong.message())};
  };
  if (config.tls.on()) {
    const absl::Status wrong = ReadCertificates(config.tls).status();
    const bool of_clients = absl::StartsWith(wrong.message(), absl::StrCat(config.tls.client_ca, ":"));
    const bool of_own = absl::StartsWith(wrong.message(), absl::StrCat(config.tls.certificate, ":"));
    if (!wrong.ok()) {
      return of(wrong, IsAboutKey(wrong) ? "tls.key" : of_clients && !of_own ? "tls.client_ca" : "tls.certificate");
    }
  }
  if (config.ops_http.token_file.empty()) return {};
  const absl::Status token = ReadToken(config.ops_http.token_file).status();
  return token.ok() ? ConfigError() : of(token, "ops_http.token_file");
}

}  // namespace ballast
