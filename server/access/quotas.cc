#include "server/access/quotas.h"

#include <algorithm>
#include <iterator>
#include <utility>

#include "absl/strings/cord.h"
#include "absl/strings/str_cat.h"
#include "proto/retry_after.h"

#include "server/base/log.h"
#include "server/metrics/metric_table.h"

namespace ballast {
namespace {

constexpr char kByQuota[] = "ballast-quota";  // marks a refusal
constexpr double kBurstS = 10;
constexpr double kStreamWaitS = 1;  // a stream whose client is gone is noticed within seconds
constexpr double kSweepEveryS = 1;

struct KindWords {
  const char *reason, *in_grant, *in_config;
};
constexpr std::array<KindWords, 5> kKinds = {{{"runs", "most_runs", "limits.caller_runs"},
                                              {"bytes", "most_bytes", "limits.caller_bytes"},
                                              {"streams", "most_streams", "limits.caller_streams"},
                                              {"requests", "most_requests", "limits.caller_requests"},
                                              {"failures", "", "limits.caller_failures"}}};

const KindWords& WordsOf(QuotaKind kind) { return kKinds[static_cast<size_t>(kind)]; }

}  // namespace

std::string Payer::KeyOf(QuotaKind kind) const {
  return grant == nullptr ? std::string(WordsOf(kind).in_config) : absl::StrCat(WordsOf(kind).in_grant, " of ", name);
}

absl::Status Quotas::Begin(const Payer& payer) {
  if (payer.quota.requests == 0 || payer.name.empty()) return absl::OkStatus();
  const double a_second = payer.quota.requests;
  const TokenBucket::Rate rate{.per_second = a_second, .at_once = a_second * kBurstS};
  double wait_s = 0;
  {
    absl::MutexLock lock(&mu_);
    Account& account = AccountOf(payer.name);
    account.calls_rate = rate;
    if (account.calls.Take(rate, now_s_())) return absl::OkStatus();
    wait_s = account.calls.WaitS(rate, now_s_());
  }
  return Refuse(
      payer.name, QuotaKind::kRequests,
      absl::StrCat(payer.name, " has made more than the ", payer.quota.requests, " calls a second that it may (",
                   payer.KeyOf(QuotaKind::kRequests), "), for longer than ", kBurstS, " s"),
      wait_s);
}

absl::StatusOr<StreamPlace> Quotas::OpenStream(const Payer& payer) {
  if (payer.quota.streams == 0 || payer.name.empty()) return StreamPlace();
  uint32_t open = 0;
  {
    absl::MutexLock lock(&mu_);
    Account* const account = &AccountOf(payer.name);
    open = account->streams;
    if (open < payer.quota.streams) {
      ++account->streams;  // from here on the account stays where it is
      return StreamPlace(account, [this](Account* held) {
        absl::MutexLock closing(&mu_);
        --held->streams;
      });
    }
  }
  return Refuse(
      payer.name, QuotaKind::kStreams,
      absl::StrCat(payer.name, " may have ", payer.quota.streams, " streams open (", payer.KeyOf(QuotaKind::kStreams),
                   "), and has ", open,
                   ": each trainer and each reader has one, and a trainer one more while it reads or loads weights"),
      kStreamWaitS);
}

absl::Status Quotas::CheckFailures(const std::string& who, Failing failing) {
  if (failures_a_minute_ == 0 || who.empty()) return absl::OkStatus();
  const auto which = static_cast<size_t>(failing);
  double wait_s = 0;
  absl::StatusCode last{};
  {
    absl::MutexLock lock(&mu_);
    const auto found = accounts_.find(who);  // who has none is not given one for asking
    if (found == accounts_.end() && accounts_.size() < kMostCallers) return absl::OkStatus();
    Account& account = found == accounts_.end() ? others_ : found->second;
    wait_s = account.failures[which].WaitS(FailureRate(), now_s_());
    last = account.last_failure[which];
  }
  if (wait_s <= 0) return absl::OkStatus();
  return Refuse(who, QuotaKind::kFailures,
                absl::StrCat(failing == Failing::kCreate ? "CreateRun" : "calls", " of ", who, " failed more than ",
                             failures_a_minute_, " times in a minute (", WordsOf(QuotaKind::kFailures).in_config,
                             "), the last with ", absl::StatusCodeToString(last)),
                wait_s);
}

void Quotas::OnFailure(const std::string& who, Failing failing, const absl::Status& why) {
  if (failures_a_minute_ == 0 || who.empty()) return;
  absl::MutexLock lock(&mu_);
  Account& account = AccountOf(who);
  account.failures[static_cast<size_t>(failing)].Charge(FailureRate(), now_s_());
  account.last_failure[static_cast<size_t>(failing)] = why.code();
}

absl::Status Quotas::Refuse(const std::string& who, QuotaKind kind, absl::string_view why,
                            std::optional<double> wait_s) {
  metrics_->Count("ballast_quota_refused_total", WordsOf(kind).reason);
  uint64_t times = 0;
  {
    absl::MutexLock lock(&mu_);
    Told& told = AccountOf(who).told[static_cast<size_t>(kind)];
    ++told.since;
    if (!told.at_s || now_s_() >= *told.at_s + kTellEveryS) {
      times = std::exchange(told.since, 0);
      told.at_s = now_s_();
    }
  }
  if (times > 0) {
    Log(LogLevel::kWarn, "quota", "a caller was refused what is beyond its quota",
        {{"reason", WordsOf(kind).reason}, {"caller", who}, {"times", times}, {"err", std::string(why)}});
  }
  absl::Status refused = absl::ResourceExhaustedError(why);
  refused.SetPayload(kByQuota, absl::Cord());
  return wait_s ? WithRetryAfter(std::move(refused), *wait_s) : refused;
}

Quotas::Account& Quotas::AccountOf(const std::string& who) {
  if (const auto found = accounts_.find(who); found != accounts_.end()) return found->second;
  if (accounts_.size() >= kMostCallers) Sweep(now_s_());
  if (accounts_.size() >= kMostCallers) return others_;
  return accounts_[who];
}

bool Quotas::AtRest(Account* account, double now_s) const {
  const TokenBucket::Rate failures = FailureRate();
  const bool fails = failures_a_minute_ > 0 && !std::all_of(account->failures.begin(), account->failures.end(),
                                                            [&](TokenBucket& of) { return of.Full(failures, now_s); });
  const bool told = std::any_of(account->told.begin(), account->told.end(),
                                [&](const Told& of) { return of.at_s && now_s < *of.at_s + kTellEveryS; });
  return account->streams == 0 && !fails && !told && account->calls.Full(account->calls_rate, now_s);
}

void Quotas::Sweep(double now_s) {
  if (swept_at_s_ && now_s < *swept_at_s_ + kSweepEveryS) return;
  swept_at_s_ = now_s;
  for (auto it = accounts_.begin(); it != accounts_.end();)
    it = AtRest(&it->second, now_s) ? accounts_.erase(it) : std::next(it);
}

bool IsQuotaRefusal(const absl::Status& status) { return status.GetPayload(kByQuota).has_value(); }

}  // namespace ballast
