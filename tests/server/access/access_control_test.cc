#include "server/access/access_control.h"

#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include "absl/strings/str_cat.h"
#include "absl/time/clock.h"

#include "tests/certificates.h"
#include "tests/eventually.h"
#include "tests/server/captured_log.h"

namespace ballast {
namespace {

using ::testing::HasSubstr;
using ::testing::Not;

std::string GrantOf(const std::string& identity) {
  return absl::StrCat("grants: [{name: a, identity: ", identity, ", runs: [r], scope: push}]\n");
}

class AccessControlTest : public ::testing::Test {
 protected:
  std::unique_ptr<AccessControl> Open() {
    return AccessControl::Open(files_.Path("access.yaml"), {}, &metrics_, absl::Milliseconds(1)).value();
  }
  void Write(const std::string& text) { files_.Write("access.yaml", text, 0644); }

  const TestCertificates files_;
  Metrics metrics_{BuildInfo{}};
};

TEST_F(AccessControlTest, ANewFileIsTakenIntoUse) {
  Write(GrantOf("x"));
  const auto control = Open();
  EXPECT_TRUE(control->Find({.identity = "x"}, Scope::kPush, "r").ok());
  Write(GrantOf("y"));
  EXPECT_SOON(control->Find({.identity = "y"}, Scope::kPush, "r").ok(), true);
  EXPECT_FALSE(control->Find({.identity = "x"}, Scope::kPush, "r").ok());
  EXPECT_THAT(metrics_.Serialize(), HasSubstr("ballast_access_reloads_total{result=\"success\"} 1\n"));
}

TEST_F(AccessControlTest, AFileThatIsNotRightChangesNothing) {
  const testing::CapturedLog log;
  Write(GrantOf("x"));
  const auto control = Open();
  Write("grants: nobody\n");
  EXPECT_SOON(metrics_.Serialize(), HasSubstr("ballast_access_reloads_total{result=\"failed\"} 1\n"));
  EXPECT_TRUE(control->Find({.identity = "x"}, Scope::kPush, "r").ok());
  EXPECT_THAT(log.Await({"access_reload", "access.yaml"}), Not(""));
}

TEST_F(AccessControlTest, TheMetricsSayWhenTheFirstGrantExpiresAndWhetherTheLastFileIsInUse) {
  const auto with = [](const char* rest) {
    return absl::StrCat("grants: [{name: a, identity: x, runs: [r], scope: push", rest, "}]\n");
  };
  Write(with(", expires: 2037-01-01"));
  const auto control = Open();
  EXPECT_THAT(metrics_.Serialize(), HasSubstr("ballast_access_expiry_timestamp_seconds 2114380800\n"));
  EXPECT_THAT(metrics_.Serialize(), Not(HasSubstr("ballast_last_reload_successful{")));
  Write("grants: nobody\n");
  EXPECT_SOON(metrics_.Serialize(), HasSubstr("ballast_last_reload_successful{files=\"access\"} 0\n"));
  EXPECT_THAT(metrics_.Serialize(), HasSubstr("ballast_access_expiry_timestamp_seconds 2114380800\n"));
  Write(with(""));
  EXPECT_SOON(metrics_.Serialize(), HasSubstr("ballast_last_reload_successful{files=\"access\"} 1\n"));
  EXPECT_SOON(metrics_.Serialize(), HasSubstr("ballast_access_expiry_timestamp_seconds 0\n"));
}

TEST_F(AccessControlTest, AGrantThatExpiresIsToldOnceAndAgainWhenTheFileChanges) {
  const testing::CapturedLog log;
  const auto expiring = [](const char* name) {
    return absl::StrCat("grants:\n- {name: ", name, ", identity: x, runs: [r], scope: push, expires: ",
                        absl::FormatTime("%Y-%m-%d", absl::Now() + absl::Hours(48), absl::UTCTimeZone()),
                        "}\n- {name: later, identity: y, runs: [r], scope: push, expires: 2099-01-01}\n");
  };
  Write(expiring("a"));
  const auto control = Open();
  EXPECT_THAT(log.Await({"grant_expiring", "grant=a"}), HasSubstr("not_after="));
  Write(expiring("b"));
  EXPECT_NE(log.Await({"grant_expiring", "grant=b"}), "");
  EXPECT_EQ(log.Count({"grant_expiring", "grant=a"}), 1u) << "and not at each look";
  EXPECT_EQ(log.Count({"grant_expiring", "later"}), 0u);
}

TEST_F(AccessControlTest, WhatIsWrongAtTheStartIsRefused) {
  Write("grants: nobody\n");
  EXPECT_TRUE(absl::IsFailedPrecondition(AccessControl::Open(files_.Path("access.yaml"), {}, &metrics_).status()));
}

}  // namespace
}  // namespace ballast
