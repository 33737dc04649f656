// What callers use of their quotas, but for runs, which the registry counts itself: streams, calls a second, and calls
// that failed. And the one way in which a quota refuses: RESOURCE_EXHAUSTED that names the quota, its limit and what is
// used, counted, and told in the log (event quota) once in kTellEveryS for each caller and quota.
//
// Bounded: kMostCallers accounts. When there are more, those that use nothing go; where all use something, callers
// without an account share one, and so its limits. Thread-safe.
#pragma once

#include <array>
#include <cstdint>
#include <functional>
#include <map>
#include <memory>
#include <optional>
#include <string>

#include "absl/base/thread_annotations.h"
#include "absl/status/status.h"
#include "absl/status/statusor.h"
#include "absl/strings/string_view.h"
#include "absl/synchronization/mutex.h"

#include "server/access/quota.h"
#include "server/base/clock.h"
#include "server/base/token_bucket.h"
#include "server/metrics/metrics.h"

namespace ballast {

// A stream's place in its caller's quota, while it is held.
using StreamPlace = std::shared_ptr<void>;

class Quotas {
 public:
  static constexpr size_t kMostCallers = 4096;
  static constexpr double kTellEveryS = 10;
  // What calls fail of: for want of a right, whatever the call; or at creating a run, which is much work to refuse.
  enum class Failing { kRight, kCreate };

  // failures_a_minute: of each kind and caller; 0: any number. `metrics` outlives it.
  Quotas(uint32_t failures_a_minute, Metrics* metrics, std::function<double()> now_s = MonotonicSeconds)
      : failures_a_minute_(failures_a_minute), metrics_(metrics), now_s_(std::move(now_s)) {}

  // A call begins. A quota of N a second lets ten seconds' calls in at once.
  absl::Status Begin(const Payer& payer);
  // A stream is open until its place is let go, which this outlives. Null: streams are not counted.
  absl::StatusOr<StreamPlace> OpenStream(const Payer& payer);

  // Whether calls of `who` are looked at, or too many have failed. Empty: nobody that could be told from others.
  absl::Status CheckFailures(const std::string& who, Failing failing);
  void OnFailure(const std::string& who, Failing failing, const absl::Status& why);

  // The refusal, as of any quota. wait_s: after which it may be otherwise by itself.
  absl::Status Refuse(const std::string& who, QuotaKind kind, absl::string_view why,
                      std::optional<double> wait_s = std::nullopt);

 private:
  struct Told {
    std::optional<double> at_s = std::nullopt;
    uint64_t since = 0;  // refusals that no line tells of
  };
  struct Account {
    uint32_t streams = 0;
    TokenBucket calls;
    std::array<TokenBucket, 2> failures;  // by Failing
    std::array<absl::StatusCode, 2> last_failure{};
    TokenBucket::Rate calls_rate{.per_second = 1, .at_once = 1};
    std::array<Told, 5> told;  // by QuotaKind
  };

  TokenBucket::Rate FailureRate() const { return {failures_a_minute_ / 60.0, double(failures_a_minute_)}; }
  Account& AccountOf(const std::string& who) ABSL_EXCLUSIVE_LOCKS_REQUIRED(mu_);
  bool AtRest(Account* account, double now_s) const ABSL_EXCLUSIVE_LOCKS_REQUIRED(mu_);
  void Sweep(double now_s) ABSL_EXCLUSIVE_LOCKS_REQUIRED(mu_);

  const uint32_t failures_a_minute_;
  Metrics* const metrics_;
  const std::function<double()> now_s_;
  absl::Mutex mu_;
  std::map<std::string, Account> accounts_ ABSL_GUARDED_BY(mu_);
  Account others_ ABSL_GUARDED_BY(mu_);  // of callers for whom there is no account
  std::optional<double> swept_at_s_ ABSL_GUARDED_BY(mu_);
};

// Whether a quota has refused it, which Refuse has told in the log.
bool IsQuotaRefusal(const absl::Status& status);

}  // namespace ballast
