// Who may do what: the grants of the file that the configuration's key `access` names.
//
//   grants:
//   - name: team-a                            # what the log calls whoever uses it
//     token_sha256: 5e88...                   # of the token that the caller brings: ballastctl token new
//     runs: [team-a-*]                        # names; a * at the end stands for any rest
//     scope: push                             # observe | pull | push | admin
//     expires: 2027-01-31T00:00:00Z           # or a day; default never
//     most_runs: 4                            # of the runs above, whoever made them, in memory; default limits.caller_runs
//     most_bytes: 64GiB                       # that they reserve together; limits.caller_bytes
//     most_streams: 16                        # open at a time; limits.caller_streams
//     most_requests: 50                       # calls a second; limits.caller_requests
//   - name: operators
//     identity: spiffe://ballast/operator     # of the caller's certificate, where TLS asks for one; a * as above
//     runs: ["*"]
//     scope: admin
//
// 0 is any number. Runs are counted by their names: so the count is right after a restart, and for two grants of the
// same names while a token is being replaced. Who is to have a quota of runs has names of its own.
//
// A grant with both wants both. Several grants may name one token: while it is being replaced, or for other runs.
// Tokens are kept as their hashes alone. Thread-safe: never changed after Parse.
#pragma once

#include <optional>
#include <string>
#include <vector>

#include "absl/status/status.h"
#include "absl/status/statusor.h"
#include "absl/strings/string_view.h"
#include "absl/time/time.h"

#include "server/access/quota.h"

namespace ballast {

// Each includes those before it. kObserve: to see a run and its history; kPull: to read its weights; kPush: to create
// it and to train it; kAdmin: to delete it and to take it back.
enum class Scope { kObserve, kPull, kPush, kAdmin };
absl::string_view ScopeName(Scope scope);

// Who calls, by what it brings.
struct Caller {
  std::string token_sha256;  // in lower-case hex; empty: no token
  std::string identity;      // of its certificate; empty: none was asked for
  std::string address = {};  // that it comes from, of IPv6 the network; empty: a Unix socket's, or not known
};

struct Grant {
  std::string name;
  std::string token_sha256;  // empty: any caller of that identity
  std::string identity;      // empty: any caller with that token
  std::vector<std::string> runs;
  Scope scope = Scope::kObserve;
  absl::Time expires = absl::InfiniteFuture();
  Quota quota = {};

  bool Covers(absl::string_view run) const;
};

class AccessList {
 public:
  static constexpr size_t kMostGrants = 1000, kMostRuns = 10'000;  // the runs of all grants together

  // FAILED_PRECONDITION names the file, the line and the fix. `file`: its name in errors. usual: the quota of grants
  // that say nothing else.
  static absl::StatusOr<AccessList> Parse(const std::string& text, const std::string& file, const Quota& usual = {});
  // The same of a file of at most 1 MiB, which is root's or this user's, and nobody else may write.
  static absl::StatusOr<AccessList> Read(const std::string& file, const Quota& usual = {});

  // The first grant by which the caller may do that with a run; without a run: with the daemon, for which any grant
  // will do. UNAUTHENTICATED: the caller brings nothing that is known, or its grants have expired. PERMISSION_DENIED:
  // they give less. Neither depends on what runs there are.
  absl::StatusOr<const Grant*> Find(const Caller& caller, Scope scope, std::optional<absl::string_view> run,
                                    absl::Time now) const;

  // The grants that expire by then, the first one first.
  std::vector<const Grant*> ExpiringBy(absl::Time time) const;

  size_t size() const { return grants_.size(); }

 private:
  std::vector<Grant> grants_;
};

}  // namespace ballast
