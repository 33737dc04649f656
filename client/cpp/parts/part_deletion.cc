#include "client/cpp/parts/part_deletion.h"

namespace ballast {

absl::StatusOr<v1::DeleteRunResponse> DeletePart(Connection& connection, const std::string& run_id, bool force,
                                                 bool keep_checkpoints, uint32_t daemons) {
  v1::DeleteRunRequest request;
  request.set_run_id(run_id);
  request.set_force(force);
  request.set_keep_checkpoints(keep_checkpoints);
  if (!force) request.set_daemons(daemons);
  v1::DeleteRunResponse response;
  const auto ask = [&] {
    return connection.Call(connection.admin(), &v1::AdminService::Stub::DeleteRun, request, &response,
                           Connection::kCallTimeout);
  };
  absl::Status status = ask();
  if (absl::IsInvalidArgument(status) && request.daemons() > 0) {  // an older daemon refuses what it does not know
    request.clear_daemons();
    status = ask();
  }
  if (!status.ok()) return connection.Explain(status);
  return response;
}

}  // namespace ballast
