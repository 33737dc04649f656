// What AdminService's reading calls answer, as Protobuf's JSON over the ops port: the page polls it, and so may
// scripts. Fields have the proto's names and are there when zero; 64-bit numbers and numbers that are not finite are
// strings.
//
//   status                               GetServerResponse
//   runs                                 ListRunsResponse
//   runs/ID                              RunStatus
//   runs/ID/spec                         RunSpec, without its tensors
//   runs/ID/history?after=STEP&most=N    GetHistoryResponse: the newest N steps after STEP; all, and kMostSteps
//
// Thread-safe; waits for no step. An answer is kept for kFreshS, so that many viewers cost what one does.
#pragma once

#include <cstdint>
#include <map>
#include <string>

#include "absl/base/thread_annotations.h"
#include "absl/status/statusor.h"
#include "absl/synchronization/mutex.h"

#include "server/convert/daemon_status.h"
#include "server/ops/ops_http.h"

namespace ballast {

class OpsApi {
 public:
  static constexpr double kFreshS = 0.5;
  static constexpr uint32_t kMostSteps = 500;

  explicit OpsApi(const DaemonStatus* status) : status_(status) {}

  // `path`: what follows /api/v1/. 400 says what is wanted, 404 what there is.
  OpsResponse Answer(const std::string& path, const std::string& query);

 private:
  struct Kept {
    double made_at_s = 0;  // MonotonicSeconds
    std::string json;
  };
  absl::StatusOr<std::string> Make(const std::string& path, const std::string& query) const;

  const DaemonStatus* const status_;
  absl::Mutex mu_;
  std::map<std::string, Kept> kept_ ABSL_GUARDED_BY(mu_);  // by path?query
};

}  // namespace ballast
