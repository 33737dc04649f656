// Who may do what: the grants of the file that the configuration's key `access` names.
//
//   grants:
//   - name: team-a                            # what the log calls whoever uses it
//     token_sha256: 5e88...                   # of the token that the caller brings: ballastctl token new
//     runs: [team-a-*]                        # names; a * at the end stands for any rest
//     scope: push                             # observe | pull | push | admin
//     expires: 2027-01-31T00:00:00Z           # or a day; default never
//   - name: operators
//     identity: spiffe://ballast/operator     # of the caller's certificate, where TLS asks for one; a * as above
//     runs: ["*"]
//     scope: admin
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

namespace ballast {

// Each includes those before it. kObserve: to see a run and its history; kPull: to read its weights; kPush: to create
// it and to train it; kAdmin: to delete it and to take it back.
enum class Scope { kObserve, kPull, kPush, kAdmin };
absl::string_view ScopeName(Scope scope);

// Who calls, by what it brings.
struct Caller {
  std::string token_sha256;  // in lower-case hex; empty: no token
  std::string identity;      // of its certificate; empty: none was asked for
};

struct Grant {
  std::string name;
  std::string token_sha256;  // empty: any caller of that identity
  std::string identity;      // empty: any caller with that token
  std::vector<std::string> runs;
  Scope scope = Scope::kObserve;
  absl::Time expires = absl::InfiniteFuture();
};

class AccessList {
 public:
  static constexpr size_t kMostGrants = 1000, kMostRuns = 10'000;  // the runs of all grants together

  // FAILED_PRECONDITION names the file, the line and the fix. `file`: its name in errors.
  static absl::StatusOr<AccessList> Parse(const std::string& text, const std::string& file);
  // The same of a file of at most 1 MiB, which is root's or this user's, and nobody else may write.
  static absl::StatusOr<AccessList> Read(const std::string& file);

  // The name of a grant by which the caller may do that with a run; without a run: with the daemon, for which any grant
  // will do. UNAUTHENTICATED: the caller brings nothing that is known, or its grants have expired. PERMISSION_DENIED:
  // they give less. Neither depends on what runs there are.
  absl::StatusOr<std::string> Find(const Caller& caller, Scope scope, std::optional<absl::string_view> run,
                                   absl::Time now) const;

  size_t size() const { return grants_.size(); }

 private:
  std::vector<Grant> grants_;
};

}  // namespace ballast
