// How much of the daemon one caller may have, and who a caller is. Values; thread-safe.
#pragma once

#include <cstdint>
#include <memory>
#include <string>

namespace ballast {

struct Grant;

// 0: any number.
struct Quota {
  uint32_t runs = 0;      // in memory at a time
  uint64_t bytes = 0;     // that these runs reserve together
  uint32_t streams = 0;   // Train, Subscribe, Pull and LoadState, open at a time
  uint32_t requests = 0;  // calls a second; a stream counts as one
};

enum class QuotaKind { kRuns, kBytes, kStreams, kRequests, kFailures };

// Whom a call counts for: a grant of the access file, whoever uses it; without a file the certificate's identity, or
// else the address.
struct Payer {
  std::string name;  // "grant team-a", "certificate spiffe://ballast/a", "address 10.0.0.7"; empty: nobody, who may all
  Quota quota;
  std::shared_ptr<const Grant> grant = nullptr;  // none: there is no access file

  // The key by which an operator changes it: "most_runs of grant team-a", or "limits.caller_runs".
  std::string KeyOf(QuotaKind kind) const;
};

}  // namespace ballast
