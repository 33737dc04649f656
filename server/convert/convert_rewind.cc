// Which past steps a run keeps, and the request to go back to one.
#include "absl/strings/str_cat.h"

#include "server/convert/convert.h"

namespace ballast {
namespace {

// Each is as large as the run's weights and state.
constexpr uint32_t kMostSnapshots = 16;

}  // namespace

absl::Status TakeRewind(const v1::RunSpec& spec, RunSpec* made) {
  const v1::RewindSpec& rewind = spec.rewind();
  if (rewind.snapshots() > kMostSnapshots) {
    return absl::InvalidArgumentError(
        absl::StrCat("rewind.snapshots is ", rewind.snapshots(), "; wanted: at most ", kMostSnapshots,
                     ", each as large as weights and state: take them farther apart, with rewind.every"));
  }
  if (rewind.snapshots() == 0 && rewind.every() != 0) {
    return absl::InvalidArgumentError(
        absl::StrCat("rewind.every is ", rewind.every(),
                     ", but rewind.snapshots is 0, and none is kept: set it to 1 or more, or leave both unset"));
  }
  made->rewinds_torn = spec.on_torn() == v1::TORN_POLICY_REWIND;
  if (made->rewinds_torn && rewind.snapshots() == 0) {
    return absl::InvalidArgumentError(
        "on_torn = TORN_POLICY_REWIND goes back to a snapshot, but rewind.snapshots is 0, and none is kept: set it "
        "to 1 or more, or on_torn to TORN_POLICY_CLOSE");
  }
  made->snapshots = rewind.snapshots();
  if (rewind.every() != 0) made->snapshot_every = rewind.every();
  return absl::OkStatus();
}

RewindOrder ToRewindOrder(const v1::RewindRequest& request) {
  RewindOrder order;
  if (request.has_to_step()) order.to_step = request.to_step();
  if (request.has_steps_back()) order.steps_back = request.steps_back();
  if (!request.reason().empty()) order.reason = request.reason();
  return order;
}

}  // namespace ballast
