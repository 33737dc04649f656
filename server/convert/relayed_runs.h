// What a daemon that is a relay shows of the runs that it relays. Thread-safe; waits for nobody.
#pragma once

#include <string>
#include <vector>

#include "absl/status/statusor.h"

#include "ballast/v1/admin.pb.h"
#include "ballast/v1/run.pb.h"

namespace ballast {

class RelayedRuns {
 public:
  virtual ~RelayedRuns() = default;
  virtual v1::RelayInfo info() const = 0;
  // NOT_FOUND names the runs that are relayed. UNAVAILABLE: the upstream has not answered yet; else why the run cannot be
  // served here.
  virtual absl::StatusOr<v1::GetRunResponse> GetRun(const std::string& run_id) const = 0;
  // Also those that GetRun has no answer for yet, which say why.
  virtual std::vector<v1::RunStatus> ListRuns() const = 0;
};

}  // namespace ballast
