#include "server/access/quotas.h"

#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include <vector>

#include "absl/strings/str_cat.h"
#include "proto/retry_after.h"

#include "server/access/access_list.h"
#include "tests/server/captured_log.h"

namespace ballast {
namespace {

using ::testing::AllOf;
using ::testing::HasSubstr;
using ::testing::Not;
using Failing = Quotas::Failing;

class QuotasTest : public ::testing::Test {
 protected:
  Quotas Make(uint32_t failures_a_minute = 0) {
    return Quotas(failures_a_minute, &metrics_, [this] { return now_s_; });
  }
  static Payer Of(const std::string& name, const Quota& quota) {
    return {.name = name, .quota = quota, .grant = std::make_shared<const Grant>()};
  }
  std::string Refused(const char* reason) const {
    const std::string all = metrics_.Serialize();
    const size_t at = all.find(absl::StrCat("ballast_quota_refused_total{reason=\"", reason, "\"} "));
    return all.substr(all.find("} ", at) + 2, all.find('\n', at) - all.find("} ", at) - 2);
  }

  double now_s_ = 100;
  Metrics metrics_{BuildInfo{}};
};

TEST_F(QuotasTest, CallsAreLetInAtTheirRateAndTenSecondsAtOnce) {
  Quotas quotas = Make();
  const Payer payer = Of("grant a", {.requests = 2});
  for (int i = 0; i < 20; ++i) EXPECT_TRUE(quotas.Begin(payer).ok()) << i;
  const absl::Status refused = quotas.Begin(payer);
  EXPECT_TRUE(absl::IsResourceExhausted(refused));
  EXPECT_THAT(std::string(refused.message()),
              AllOf(HasSubstr("2 calls a second"), HasSubstr("most_requests of grant a")));
  EXPECT_EQ(RetryAfterMsOf(refused), 500);
  EXPECT_TRUE(IsQuotaRefusal(refused));
  EXPECT_EQ(Refused("requests"), "1");
  EXPECT_TRUE(quotas.Begin(Of("grant b", {.requests = 2})).ok()) << "another's calls are its own";
  now_s_ += 0.5;
  EXPECT_TRUE(quotas.Begin(payer).ok());
  EXPECT_FALSE(quotas.Begin(payer).ok());
}

TEST_F(QuotasTest, StreamsAreCountedWhileTheyAreOpen) {
  Quotas quotas = Make();
  const Payer payer = Of("grant a", {.streams = 2});
  StreamPlace first = quotas.OpenStream(payer).value();
  const StreamPlace second = quotas.OpenStream(payer).value();
  const absl::Status refused = quotas.OpenStream(payer).status();
  EXPECT_THAT(std::string(refused.message()),
              HasSubstr("may have 2 streams open (most_streams of grant a), and has 2"));
  EXPECT_TRUE(RetryAfterMsOf(refused).has_value());
  first.reset();
  EXPECT_TRUE(quotas.OpenStream(payer).ok());
}

TEST_F(QuotasTest, WithoutAQuotaNothingIsCounted) {
  Quotas quotas = Make();
  for (int i = 0; i < 1000; ++i) {
    EXPECT_TRUE(quotas.Begin(Of("grant a", {})).ok());
    EXPECT_EQ(quotas.OpenStream(Of("grant a", {})).value(), nullptr);
    EXPECT_TRUE(quotas.Begin(Of("", {.requests = 1})).ok()) << "nobody that could be told from others";
    quotas.OnFailure("address 10.0.0.1", Failing::kRight, absl::UnauthenticatedError(""));
  }
  EXPECT_TRUE(quotas.CheckFailures("address 10.0.0.1", Failing::kRight).ok());
}

TEST_F(QuotasTest, WhoseCallsFailTooOftenIsRefusedUntilTimeHasPassed) {
  Quotas quotas = Make(60);
  const std::string who = "address 10.0.0.1";
  for (int i = 0; i < 60; ++i) {
    EXPECT_TRUE(quotas.CheckFailures(who, Failing::kRight).ok()) << i;
    quotas.OnFailure(who, Failing::kRight, absl::UnauthenticatedError("no"));
  }
  const absl::Status refused = quotas.CheckFailures(who, Failing::kRight);
  EXPECT_THAT(std::string(refused.message()), AllOf(HasSubstr("60 times in a minute (limits.caller_failures)"),
                                                    HasSubstr("the last with UNAUTHENTICATED")));
  EXPECT_EQ(RetryAfterMsOf(refused), 1000);
  EXPECT_EQ(Refused("failures"), "1");
  EXPECT_TRUE(quotas.CheckFailures(who, Failing::kCreate).ok()) << "its runs' failures are another count";
  EXPECT_TRUE(quotas.CheckFailures("address 10.0.0.2", Failing::kRight).ok());
  EXPECT_TRUE(quotas.CheckFailures("", Failing::kRight).ok());
  now_s_ += 1;
  EXPECT_TRUE(quotas.CheckFailures(who, Failing::kRight).ok());
}

TEST_F(QuotasTest, TheLogHasOneLineOfACallerAndAQuotaInTenSeconds) {
  const testing::CapturedLog log;
  Quotas quotas = Make();
  for (int i = 0; i < 500; ++i) quotas.Refuse("grant loud", QuotaKind::kRuns, "first").IgnoreError();
  quotas.Refuse("grant loud", QuotaKind::kBytes, "bytes").IgnoreError();
  quotas.Refuse("grant quiet", QuotaKind::kRuns, "quiet").IgnoreError();
  EXPECT_THAT(log.Await({"quota", "grant quiet", "reason=runs"}), HasSubstr("times=1")) << "others' are not kept out";
  EXPECT_NE(log.Find({"grant loud", "reason=bytes"}), "");
  now_s_ += Quotas::kTellEveryS;
  quotas.Refuse("grant loud", QuotaKind::kRuns, "second").IgnoreError();
  EXPECT_THAT(log.Await({"grant loud", "second"}), HasSubstr("times=500")) << "499 and this one";
}

TEST_F(QuotasTest, AccountsAreBoundedAndThoseInUseStay) {
  Quotas quotas = Make(60);
  const Payer held = Of("grant held", {.streams = 1});
  const StreamPlace place = quotas.OpenStream(held).value();
  const auto fail = [&](size_t i) {
    quotas.OnFailure(absl::StrCat("address ", i), Failing::kRight, absl::UnauthenticatedError(""));
  };
  for (size_t i = 0; i < Quotas::kMostCallers + 100; ++i) fail(i);
  // More callers fail than have accounts: the others share one, and come over its limit together.
  EXPECT_FALSE(quotas.CheckFailures(absl::StrCat("address ", Quotas::kMostCallers + 1), Failing::kRight).ok());
  EXPECT_TRUE(quotas.CheckFailures("address 7", Failing::kRight).ok()) << "it has its own, with one failure";
  EXPECT_FALSE(quotas.OpenStream(held).ok());
  now_s_ += 61;  // what failed is forgiven, and the accounts are free
  fail(1'000'000);
  EXPECT_TRUE(quotas.CheckFailures("address 1000000", Failing::kRight).ok());
  EXPECT_FALSE(quotas.OpenStream(held).ok()) << "a stream that is open is not forgotten";
}

TEST(PayerTest, NamesTheKeyThatAnOperatorChanges) {
  EXPECT_EQ((Payer{.name = "address 10.0.0.1"}.KeyOf(QuotaKind::kStreams)), "limits.caller_streams");
  EXPECT_EQ((Payer{.name = "grant a", .grant = std::make_shared<const Grant>()}.KeyOf(QuotaKind::kRuns)),
            "most_runs of grant a");
}

}  // namespace
}  // namespace ballast
