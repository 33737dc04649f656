#include "server/access/access_control.h"

#include <utility>
#include <vector>

#include "absl/time/clock.h"

#include "server/base/log.h"
#include "server/base/status_macros.h"
#include "server/metrics/metric_table.h"

namespace ballast {

namespace {

constexpr absl::Duration kWarnBefore = absl::Hours(24 * 7);  // as the alert BallastGrantExpiring has it

}  // namespace

absl::StatusOr<std::unique_ptr<AccessControl>> AccessControl::Open(const std::string& file, const Quota& usual,
                                                                   Metrics* metrics, absl::Duration look_every) {
  std::unique_ptr<AccessControl> control(new AccessControl(file, usual, metrics));
  // Before it is read: what changes meanwhile is read again.
  auto watcher = std::make_unique<FileWatcher>(std::vector{file}, look_every);
  ASSIGN_OR_RETURN(AccessList read, AccessList::Read(file, usual));
  control->Use(std::move(read));
  control->watcher_ = std::move(watcher);
  control->watcher_->Start([self = control.get()] { self->ReadAgain(); },
                           [self = control.get()] { self->WarnOfExpiry(); });
  return control;
}

absl::StatusOr<std::shared_ptr<const Grant>> AccessControl::Find(const Caller& caller, Scope scope,
                                                                 std::optional<absl::string_view> run) const {
  const std::shared_ptr<const AccessList> list = current();
  ASSIGN_OR_RETURN(const Grant* grant, list->Find(caller, scope, run, absl::Now()));
  return std::shared_ptr<const Grant>(list, grant);  // which keeps the list
}

std::shared_ptr<const AccessList> AccessControl::current() const {
  absl::MutexLock lock(&mu_);
  return list_;
}

void AccessControl::ReadAgain() {
  absl::StatusOr<AccessList> read = AccessList::Read(file_, usual_);
  if (!watcher_->Steady()) return;
  const uint64_t grants = read.ok() ? read->size() : 0;
  if (read.ok()) Use(*std::move(read));
  // Who is told so may rely on it.
  metrics_->Count("ballast_access_reloads_total", read.ok() ? "success" : "failed");
  metrics_->SetLastReload("access", read.ok());
  if (!read.ok()) {
    return Log(LogLevel::kError, "access_reload", "the new access file is not right; the grants before stay in use",
               {{"err", std::string(read.status().message())}});
  }
  Log(LogLevel::kInfo, "access_reload", "the new access file is in use", {{"grants", grants}});
}

void AccessControl::Use(AccessList read) {
  const std::vector<const Grant*> expiring = read.ExpiringBy(absl::InfiniteFuture());
  metrics_->SetGrantExpiry(expiring.empty() ? 0 : absl::ToDoubleSeconds(expiring[0]->expires - absl::UnixEpoch()));
  absl::MutexLock lock(&mu_);
  list_ = std::make_shared<const AccessList>(std::move(read));
}

void AccessControl::WarnOfExpiry() {
  const std::shared_ptr<const AccessList> list = current();
  if (std::exchange(warned_of_, list) != list) warned_ = 0;
  const std::vector<const Grant*> expiring = list->ExpiringBy(absl::Now() + kWarnBefore);
  for (; warned_ < expiring.size(); ++warned_) {
    const Grant& grant = *expiring[warned_];
    Log(LogLevel::kWarn, "grant_expiring", "a grant expires within a week, or has: give out another, or take it away",
        {{"grant", grant.name},
         {"not_after", absl::FormatTime(absl::RFC3339_sec, grant.expires, absl::UTCTimeZone())}});
  }
}

}  // namespace ballast
