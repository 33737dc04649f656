#include "client/cpp/transport/retry.h"

#include <algorithm>
#include <random>
#include <utility>

#include "absl/strings/str_cat.h"
#include "absl/strings/str_format.h"

namespace ballast {

absl::Duration Backoff(int attempt) {
  if (attempt == 0) return absl::ZeroDuration();
  thread_local std::minstd_rand random{std::random_device{}()};
  const double jitter = std::uniform_real_distribution<double>(0.5, 1.0)(random);
  return std::min(absl::Seconds(1), absl::Milliseconds(50) * (1 << std::min(attempt - 1, 10))) * jitter;
}

Retry::Retry(const Connection& connection, std::string what, Waits waits)
    : connection_(connection),
      what_(std::move(what)),
      allowed_(absl::Seconds(connection.options().reconnect_timeout_s)),
      waits_(waits) {}

bool Retry::Again(const absl::Status& failure) {
  if (const auto stated = RetryAfter(failure)) return WaitAsTold(failure, *stated);
  // The deadline was the call's own, which is long enough.
  return IsLost(failure) && !absl::IsDeadlineExceeded(failure) && WaitForConnection(failure);
}

void Retry::Progress() {
  attempts_ = 0;
  lost_at_.reset();
  busy_at_.reset();
}

bool Retry::WaitForConnection(const absl::Status& failure) {
  const absl::Time now = SteadyNow();
  const bool first = !lost_at_;
  if (first) lost_at_ = now;
  const absl::Duration left = *lost_at_ + allowed_ - now;
  if (left <= absl::ZeroDuration()) return false;
  if (first) {
    connection_.Log(absl::StrFormat("%s: lost the daemon at %s (%s); trying again for %.4g s", what_,
                                    connection_.server(), ConnectionReason(std::string(failure.message())),
                                    absl::ToDoubleSeconds(allowed_)));
  }
  ever_lost_ = true;
  busy_at_.reset();
  return Sleep(std::min(Backoff(attempts_++), left));
}

bool Retry::WaitAsTold(const absl::Status& failure, absl::Duration stated) {
  const absl::Time now = SteadyNow();
  if (!busy_at_) busy_at_ = now;
  if (now + stated > PatienceEnds(failure)) return false;
  if (!std::exchange(told_, true)) {
    connection_.Log(
        absl::StrFormat("%s: waiting %.3g s (%s)", what_, absl::ToDoubleSeconds(stated), failure.message()));
  }
  return Sleep(Spread(stated));
}

absl::Time Retry::PatienceEnds(const absl::Status& failure) const {
  if (absl::IsAlreadyExists(failure)) return began_ + waits_.lease + (ever_lost_ ? allowed_ : absl::ZeroDuration());
  return *busy_at_ + (absl::IsUnavailable(failure) && waits_.step ? *waits_.step : std::max(kBusyPatience, allowed_));
}

bool Retry::Sleep(absl::Duration duration) {
  interrupted_ = !connection_.Sleep(duration);
  return !interrupted_;
}

absl::Status Retry::Explain(const absl::Status& failure) const {
  absl::Status plain = connection_.Explain(failure);
  if (!absl::IsUnavailable(plain) || !lost_at_ || interrupted_) return plain;
  return absl::UnavailableError(absl::StrCat(what_, ": ", plain.message(), ", nor did it within ",
                                             absl::ToDoubleSeconds(allowed_),
                                             " s: see its log, or raise reconnect_timeout_s"));
}

}  // namespace ballast
