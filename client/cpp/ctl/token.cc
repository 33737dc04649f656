#include <openssl/rand.h>

#include <algorithm>
#include <array>
#include <filesystem>

#include "absl/strings/escaping.h"
#include "absl/strings/str_cat.h"
#include "absl/strings/str_join.h"
#include "absl/strings/str_replace.h"
#include "absl/strings/str_split.h"
#include "absl/time/clock.h"
#include "absl/time/time.h"
#include "proto/access_words.h"
#include "proto/amounts.h"
#include "proto/run_names.h"
#include "proto/tls/sha256.h"

#include "client/cpp/ctl/command.h"
#include "client/cpp/ctl/new_files.h"

namespace ballast::ctl {
namespace {

namespace fs = std::filesystem;

// 256 random bits. The beginning lets programs that look for secrets in the wrong places know one.
std::string MakeToken() {
  std::array<unsigned char, 32> bits;
  if (RAND_bytes(bits.data(), bits.size()) != 1) return "";
  return absl::StrCat("ballast_", absl::WebSafeBase64Escape({reinterpret_cast<const char*>(bits.data()), bits.size()}));
}

absl::StatusOr<std::string> QuotedRuns(const std::string& runs) {
  const std::vector<std::string> names = absl::StrSplit(runs, ',');
  for (const std::string& run : names) {
    if (IsRunPattern(run)) continue;
    return absl::InvalidArgumentError(absl::StrCat("--run '", absl::CHexEscape(run), "' has what is in no run's name: ",
                                                   kRunNameRule, "; a * at the end stands for any rest"));
  }
  return absl::StrCat("'", absl::StrJoin(names, "', '"), "'");
}

// The flag of a quota: --most-runs of most_runs.
std::string FlagOf(absl::string_view quota) { return absl::StrReplaceAll(quota, {{"_", "-"}}); }

// The grant's lines of the quotas that are given.
absl::StatusOr<std::string> QuotaLines(const Invocation& invocation) {
  std::string lines;
  for (const absl::string_view quota : kQuotaNames) {
    const std::string text = invocation.Get(FlagOf(quota), "");
    if (text.empty()) continue;
    const bool counts = quota != "most_bytes";
    const auto amount = counts ? ReadCount(text) : ReadBytes(text);
    if (!amount.ok() || (counts && *amount > kMostOfQuota)) {
      return absl::InvalidArgumentError(absl::StrCat(
          "--", FlagOf(quota), " is '", text, "'; wanted ",
          counts ? absl::StrCat("a whole number, at most ", kMostOfQuota) : "a size such as 64GiB", ", or 0 for any"));
    }
    absl::StrAppend(&lines, "  ", quota, ": ", text, "\n");
  }
  return lines;
}

absl::StatusOr<std::string> Grant(const Invocation& invocation, const std::string& token) {
  const auto valid_for = Days(invocation, "90");
  if (!valid_for.ok()) return valid_for.status();
  const std::string scope = invocation.Get("scope", "push");
  if (std::find(kScopeNames.begin(), kScopeNames.end(), scope) == kScopeNames.end()) {
    return absl::InvalidArgumentError(
        absl::StrCat("--scope is '", scope, "'; wanted one of ", absl::StrJoin(kScopeNames, ", ")));
  }
  const auto quotas = QuotaLines(invocation);
  if (!quotas.ok()) return quotas.status();
  const auto runs = QuotedRuns(invocation.Get("run", ""));
  if (!runs.ok()) return runs.status();
  const absl::Time expires = absl::Now() + *valid_for;
  return absl::StrCat("- name: ", invocation.Get("name", ""), "\n  token_sha256: ", Sha256Hex(token), "\n  runs: [",
                      *runs, "]\n  scope: ", scope,
                      "\n  expires: ", absl::FormatTime("%Y-%m-%dT%H:%M:%SZ", expires, absl::UTCTimeZone()), "\n",
                      *quotas);
}

int New(const Invocation& invocation) {
  const auto misused = [&](const std::string& why) {
    return Misused(invocation.err, absl::InvalidArgumentError(why), "token");
  };
  if (invocation.arguments[0] != "new") return misused("token knows new alone: ballastctl token new --out FILE ...");
  for (const char* flag : {"out", "name", "run"}) {
    if (invocation.Get(flag, "").empty()) return misused(absl::StrCat("token new wants --", flag));
  }
  if (!IsGrantName(invocation.Get("name", ""))) return misused("--name is of letters, digits and . _ -, at most 128");
  const std::string token = MakeToken();
  if (token.empty()) return Fail(invocation, absl::InternalError("the system has no random bits"));
  const auto grant = Grant(invocation, token);
  if (!grant.ok()) return misused(std::string(grant.status().message()));
  const fs::path file = fs::absolute(invocation.Get("out", "")).lexically_normal();
  const absl::Status written =
      WriteNewFiles(file.parent_path(), {{file.filename().string(), absl::StrCat(token, "\n"), 0600}});
  if (!written.ok()) return Fail(invocation, written);
  invocation.out << "wrote a token to " << file.string() << ": its holder sets BALLAST_TOKEN_FILE to that file\n\n"
                 << "the daemon's access file (key access), under grants:\n\n"
                 << *grant;
  return kOk;
}

}  // namespace

Command TokenCommand() {
  return {
      .name = "token",
      .arguments = {"new"},
      .summary = "make a token, and the grant of it for the daemon's access file",
      .details =
          "Writes the token to a new file that its owner alone may read, and prints the grant, which holds the\n"
          "token's hash. Scopes: observe, to see a run; pull, also to read its weights; push, also to create and\n"
          "train it; admin, also to delete it and to take it back.\n",
      .flags = {{"out", "FILE", "where the token goes"},
                {"name", "NAME", "what the daemon's log calls whoever uses it"},
                {"run", "RUN...", "a run's name, with a * at the end for any rest; may come again, or a,b"},
                {"scope", "SCOPE", "observe, pull, push or admin; default push"},
                {"days", "N", "how long it is valid; default 90"},
                {"most-runs", "N", "of the runs, in memory at a time; without these four as the daemon has it for all"},
                {"most-bytes", "SIZE", "that the runs may reserve together, such as 64GiB"},
                {"most-streams", "N", "open at a time"},
                {"most-requests", "N", "calls a second"}},
      .prints_json = false,
      .run = New};
}

}  // namespace ballast::ctl
