#include "server/access/access_list.h"

#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include "absl/strings/str_cat.h"
#include "absl/time/clock.h"

#include "tests/certificates.h"

namespace ballast {
namespace {

using ::testing::AllOf;
using ::testing::HasSubstr;
using ::testing::Not;

const std::string kHash(64, 'a'), kOtherHash(64, 'b');  // NOLINT: tests' own

std::string GrantText(const std::string& rest) { return absl::StrCat("grants:\n- ", rest); }

AccessList List(const std::string& text) {
  auto list = AccessList::Parse(text, "access.yaml");
  EXPECT_TRUE(list.ok()) << list.status();
  return list.ok() ? *std::move(list) : AccessList();
}
std::string Error(const std::string& text) {
  const absl::Status status = AccessList::Parse(text, "access.yaml").status();
  EXPECT_TRUE(absl::IsFailedPrecondition(status)) << status;
  return std::string(status.message());
}

TEST(AccessListTest, AScopeIncludesThoseBeforeIt) {
  for (const Scope given : {Scope::kObserve, Scope::kPull, Scope::kPush, Scope::kAdmin}) {
    const AccessList list = List(
        GrantText(absl::StrCat("{name: a, token_sha256: ", kHash, ", runs: [r], scope: ", ScopeName(given), "}\n")));
    for (const Scope wanted : {Scope::kObserve, Scope::kPull, Scope::kPush, Scope::kAdmin}) {
      EXPECT_EQ(list.Find({.token_sha256 = kHash}, wanted, "r", absl::Now()).ok(), wanted <= given);
    }
  }
}

TEST(AccessListTest, AStarAtTheEndStandsForAnyRest) {
  const AccessList list =
      List(GrantText(absl::StrCat("{name: a, token_sha256: ", kHash, ", runs: [team-a-*, r], scope: push}\n")));
  const auto may = [&](const char* run) {
    return list.Find({.token_sha256 = kHash}, Scope::kPush, run, absl::Now()).ok();
  };
  EXPECT_TRUE(may("team-a-1"));
  EXPECT_TRUE(may("team-a-"));
  EXPECT_TRUE(may("r"));
  for (const char* run : {"team-a", "team-b-1", "r1", "", "*"}) EXPECT_FALSE(may(run)) << run;
}

TEST(AccessListTest, WithoutARunAnyGrantWillDo) {
  const AccessList list =
      List(GrantText(absl::StrCat("{name: a, token_sha256: ", kHash, ", runs: [r], scope: observe}\n")));
  EXPECT_EQ(list.Find({.token_sha256 = kHash}, Scope::kObserve, std::nullopt, absl::Now()).value()->name, "a");
}

TEST(AccessListTest, AGrantWithATokenAndAnIdentityWantsBoth) {
  const AccessList list = List(GrantText(absl::StrCat(
      "{name: a, token_sha256: ", kHash, ", identity: 'spiffe://ballast/team-a/*', runs: ['*'], scope: push}\n")));
  const auto may = [&](const Caller& caller) { return list.Find(caller, Scope::kPush, "r", absl::Now()).ok(); };
  EXPECT_TRUE(may({.token_sha256 = kHash, .identity = "spiffe://ballast/team-a/7"}));
  EXPECT_FALSE(may({.token_sha256 = kHash}));
  EXPECT_FALSE(may({.token_sha256 = kOtherHash, .identity = "spiffe://ballast/team-a/7"}));
  EXPECT_FALSE(may({.token_sha256 = kHash, .identity = "spiffe://ballast/team-b/7"}));
  EXPECT_FALSE(may({.identity = "spiffe://ballast/team-a/7"}));
}

TEST(AccessListTest, AnIdentityOfAnyRestWantsACertificate) {
  const AccessList list = List(GrantText("{name: a, identity: '*', runs: ['*'], scope: push}\n"));
  EXPECT_TRUE(list.Find({.identity = "x"}, Scope::kPush, "r", absl::Now()).ok());
  EXPECT_TRUE(absl::IsUnauthenticated(list.Find({}, Scope::kPush, "r", absl::Now()).status()));
}

TEST(AccessListTest, AnswersSayWhatIsMissingAndNotWhatThereIs) {
  const AccessList list = List(absl::StrCat("grants:\n- {name: a, token_sha256: ", kHash,
                                            ", runs: [r*], scope: pull}\n- {name: old, token_sha256: ", kOtherHash,
                                            ", runs: ['*'], scope: admin, expires: 2026-01-31}\n"));
  const auto refusal = [&](const Caller& caller) {
    return list.Find(caller, Scope::kAdmin, "r1", absl::Now()).status();
  };
  const absl::Status less = refusal({.token_sha256 = kHash});
  EXPECT_TRUE(absl::IsPermissionDenied(less));
  EXPECT_THAT(std::string(less.message()),
              AllOf(HasSubstr("grant 'a' gives pull on r*; this call wants admin on run 'r1'"), Not(HasSubstr("old"))));
  const absl::Status expired = refusal({.token_sha256 = kOtherHash});
  EXPECT_TRUE(absl::IsUnauthenticated(expired));
  EXPECT_THAT(std::string(expired.message()), HasSubstr("grant 'old' expired at 2026-01-31T00:00:00+00:00"));
  const absl::Status unknown = refusal({.token_sha256 = std::string(64, 'c')});
  EXPECT_TRUE(absl::IsUnauthenticated(unknown));
  EXPECT_THAT(std::string(unknown.message()), AllOf(HasSubstr("does not know this token"), Not(HasSubstr("ccc"))));
  EXPECT_THAT(std::string(refusal({}).message()), HasSubstr("BALLAST_TOKEN_FILE"));
  EXPECT_THAT(std::string(refusal({.identity = "spiffe://x"}).message()), HasSubstr("the certificate of spiffe://x"));
}

TEST(AccessListTest, OfTwoGrantsOfATokenTheOneThatDoesCounts) {
  const AccessList list = List(absl::StrCat("grants:\n- {name: all, token_sha256: ", kHash,
                                            ", runs: ['*'], scope: observe}\n- {name: own, token_sha256: ", kHash,
                                            ", runs: [r], scope: push}\n"));
  EXPECT_EQ(list.Find({.token_sha256 = kHash}, Scope::kPush, "r", absl::Now()).value()->name, "own");
  EXPECT_EQ(list.Find({.token_sha256 = kHash}, Scope::kObserve, "s", absl::Now()).value()->name, "all");
}

TEST(AccessListTest, AGrantHasItsOwnQuotaAndTheUsualOneElse) {
  const auto list =
      AccessList::Parse(absl::StrCat("grants:\n- {name: a, token_sha256: ", kHash,
                                     ", runs: [a-*], scope: push, most_runs: 4, most_bytes: 64GiB, most_streams: 0}\n"),
                        "access.yaml", {.runs = 1, .bytes = 2, .streams = 3, .requests = 5});
  ASSERT_TRUE(list.ok()) << list.status();
  const Grant& grant = **list->Find({.token_sha256 = kHash}, Scope::kPush, "a-1", absl::Now());
  EXPECT_EQ(grant.quota.runs, 4u);
  EXPECT_EQ(grant.quota.bytes, uint64_t{64} << 30);
  EXPECT_EQ(grant.quota.streams, 0u) << "any number, whatever is usual";
  EXPECT_EQ(grant.quota.requests, 5u);
  EXPECT_TRUE(grant.Covers("a-2"));
  EXPECT_FALSE(grant.Covers("b"));
}

TEST(AccessListTest, WhatExpiresIsTheFirstFirst) {
  const auto grant = [](const char* name, const char* rest) {
    return absl::StrCat("- {name: ", name, ", identity: x, runs: [r], scope: push", rest, "}\n");
  };
  const AccessList list = List(absl::StrCat("grants:\n", grant("never", ""), grant("late", ", expires: 2027-01-02"),
                                            grant("soon", ", expires: 2027-01-01")));
  const auto names = [&](absl::Time by) {
    std::string all;
    for (const Grant* each : list.ExpiringBy(by)) absl::StrAppend(&all, each->name, " ");
    return all;
  };
  EXPECT_EQ(names(absl::InfiniteFuture()), "soon late ");
  EXPECT_EQ(names(absl::FromUnixSeconds(1798761600)), "soon ") << "2027-01-01";
  EXPECT_EQ(names(absl::FromUnixSeconds(0)), "");
}

TEST(AccessListTest, ErrorsNameTheLineAndTheFix) {
  const std::string good = absl::StrCat("token_sha256: ", kHash, ", runs: [r], scope: push");
  EXPECT_THAT(Error(""), HasSubstr("wanted the one key 'grants'"));
  EXPECT_THAT(Error("grants: [}"), HasSubstr("access.yaml:1: not YAML"));
  EXPECT_THAT(Error("grants: []\nmore: 1\n"), HasSubstr("wanted the one key"));
  EXPECT_THAT(Error(GrantText("x\n")), HasSubstr("access.yaml:2: a grant is a section"));
  EXPECT_THAT(Error(GrantText(absl::StrCat("{", good, "}\n"))), HasSubstr("no 'name'"));
  EXPECT_THAT(Error(GrantText("{name: a, runs: [r], scope: push}\n")), HasSubstr("grant 'a' is anybody's"));
  EXPECT_THAT(Error(GrantText(absl::StrCat("{name: a b, ", good, "}\n"))), HasSubstr("letters, digits"));
  EXPECT_THAT(Error(GrantText(absl::StrCat("{name: a, scopes: x, ", good, "}\n"))), HasSubstr("unknown key 'scopes'"));
  EXPECT_THAT(Error(GrantText("{name: a, identity: x, runs: [r], scope: all}\n")),
              HasSubstr("scope 'all' is none of observe, pull, push, admin"));
  EXPECT_THAT(Error(GrantText("{name: a, identity: x, runs: r, scope: push}\n")), HasSubstr("wants a list"));
  EXPECT_THAT(Error(GrantText(absl::StrCat("{name: a, most_runs: -1, ", good, "}\n"))),
              HasSubstr("most_runs '-1' is no whole number from 0, any number, to 1000000"));
  EXPECT_THAT(Error(GrantText(absl::StrCat("{name: a, most_bytes: much, ", good, "}\n"))),
              HasSubstr("most_bytes: 'much' is not a size"));
  EXPECT_THAT(Error(GrantText(absl::StrCat("{name: a, most_calls: 1, ", good, "}\n"))),
              HasSubstr("unknown key 'most_calls'"));
  EXPECT_THAT(Error(GrantText("{name: a, identity: x, runs: [a*b], scope: push}\n")), HasSubstr("at its end alone"));
  EXPECT_THAT(Error(GrantText("{name: a, identity: x, runs: [r, team_a*], scope: push}\n")),
              HasSubstr("no run is called 'team_a*': a name is 1 to 63 of a-z, 0-9 and -"));
  EXPECT_THAT(Error(GrantText(absl::StrCat("{name: a, expires: soon, ", good, "}\n"))), HasSubstr("2027-01-31"));
  EXPECT_THAT(Error(absl::StrCat("grants:\n- {name: a, ", good, "}\n- {name: a, ", good, "}\n")),
              AllOf(HasSubstr("access.yaml:3"), HasSubstr("comes twice")));
}

TEST(AccessListTest, TheHashOfNothingIsNoTokens) {
  EXPECT_THAT(
      Error(GrantText("{name: a, token_sha256: "
                      "e3b0c44298fc1c149afbf4c8996fb92427ae41e4649b934ca495991b7852b855, runs: [r], scope: push}\n")),
      HasSubstr("64 hex digits"));
}

TEST(AccessListTest, WhatWouldBeLeftOutOrBeTooMuchIsRefused) {
  const std::string grant = "- {name: a, identity: x, runs: [r], scope: push}\n";
  EXPECT_THAT(Error(absl::StrCat("grants:\n", grant, "---\ngrants: []\n")), HasSubstr("access.yaml:4: a second YAML"));
  std::string many = "grants:\n- {name: a, identity: x, scope: push, runs: &r [";
  for (int i = 0; i < 6000; ++i) absl::StrAppend(&many, "r", i, ",");
  absl::StrAppend(&many, "]}\n- {name: b, identity: x, scope: push, runs: *r}\n");
  EXPECT_THAT(Error(many), AllOf(HasSubstr("access.yaml:3"), HasSubstr("more than 10000 runs")));
}

TEST(AccessListTest, ATokenInPlaceOfItsHashIsNotShown) {
  EXPECT_THAT(Error(GrantText("{name: a, token_sha256: ballast_secret, runs: [r], scope: push}\n")),
              AllOf(HasSubstr("64 hex digits"), Not(HasSubstr("ballast_secret"))));
}

TEST(AccessListTest, AFileThatOthersMayWriteIsRefused) {
  const TestCertificates files;
  const std::string text = GrantText("{name: a, identity: x, runs: [r], scope: push}\n");
  EXPECT_EQ(AccessList::Read(files.Write("access.yaml", text, 0644)).value().size(), 1u);
  EXPECT_THAT(std::string(AccessList::Read(files.Write("access.yaml", text, 0664)).status().message()),
              HasSubstr("chmod go-w"));
  EXPECT_THAT(std::string(AccessList::Read(files.Path("none")).status().message()), HasSubstr("none: cannot be read"));
}

}  // namespace
}  // namespace ballast
