#include "client/cpp/follow/run_lookup.h"

#include <algorithm>

#include "absl/strings/str_cat.h"
#include "absl/strings/str_format.h"

#include "client/cpp/transport/retry.h"

namespace ballast {
namespace {

constexpr absl::Duration kPause = absl::Seconds(1);  // between two looks

absl::StatusOr<v1::GetRunResponse> AskForRun(Connection& connection, const std::string& run_id) {
  v1::GetRunRequest request;
  request.set_run_id(run_id);
  return CallAgain(connection, absl::StrCat("asking for run '", run_id, "'"), connection.admin(),
                   &v1::AdminService::Stub::GetRun, request);
}

absl::StatusOr<v1::GetRunResponse> AskForWeights(Connection& connection, const std::string& run_id) {
  auto run = AskForRun(connection, run_id);
  if (!run.ok() || run->status().weights_loaded()) return run;
  return absl::FailedPreconditionError(
      absl::StrCat("run '", run_id, "' has no weights yet; its trainer sends them when it begins"));
}

// Whether a later look may find it.
bool MayCome(const absl::Status& status) {
  return absl::IsNotFound(status) || absl::IsFailedPrecondition(status) || absl::IsUnavailable(status);
}

}  // namespace

absl::StatusOr<v1::GetRunResponse> LookUpRun(Connection& connection, const std::string& run_id, absl::Duration wait) {
  if (wait <= absl::ZeroDuration()) return AskForRun(connection, run_id);
  const absl::Time until = SteadyNow() + wait;
  for (bool told = false;; told = true) {
    const auto run = AskForWeights(connection, run_id);
    if (run.ok() || !MayCome(run.status())) return run;
    const absl::Duration left = until - SteadyNow();
    if (left <= absl::ZeroDuration()) {
      return absl::Status(run.status().code(), absl::StrFormat("%s; nor did that change within %.4g s",
                                                               run.status().message(), absl::ToDoubleSeconds(wait)));
    }
    if (!told) {
      connection.Log(absl::StrFormat("waiting up to %.4g s for run '%s': %s", absl::ToDoubleSeconds(wait), run_id,
                                     run.status().message()));
    }
    if (!connection.Sleep(std::min(left, kPause))) return absl::CancelledError("interrupted while waiting for the run");
  }
}

}  // namespace ballast
