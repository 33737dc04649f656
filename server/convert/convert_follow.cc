// Following a run: what its spec says of it, what a reader asks for, and what is shown.
#include "absl/strings/str_cat.h"

#include "server/base/status_macros.h"
#include "server/convert/convert.h"

namespace ballast {
namespace {

constexpr uint32_t kMostFollowers = 1024;

}  // namespace

absl::Status TakeFollow(const v1::RunSpec& spec, RunSpec* made) {
  if (!spec.has_follow()) return absl::OkStatus();
  if (spec.has_part()) {
    return absl::InvalidArgumentError(
        "follow is set, and the run is on several daemons, whose versions nobody brings together yet: leave it unset, "
        "or "
        "give the run to one daemon");
  }
  if (spec.follow().readers() > kMostFollowers) {
    return absl::InvalidArgumentError(
        absl::StrCat("follow.readers is ", spec.follow().readers(), "; wanted: at most ", kMostFollowers));
  }
  FollowSettings settings;
  if (spec.follow().every() != 0) settings.every = spec.follow().every();
  if (spec.follow().readers() != 0) settings.readers = spec.follow().readers();
  made->follow = settings;
  return absl::OkStatus();
}

absl::StatusOr<FollowOrder> ToFollowOrder(const v1::SubscribeRequest& request, const RunSpec& spec) {
  FollowOrder order{.every = request.every()};
  if (request.has_have()) {
    order.have = {
        .epoch = request.have().epoch(), .generation = request.have().generation(), .step = request.have().step()};
  }
  order.digests.assign(request.digests().begin(), request.digests().end());
  if (order.digests.empty() || order.digests.size() == spec.tensors.size()) return order;
  return absl::InvalidArgumentError(absl::StrCat(order.digests.size(), " digests, and run '", spec.run_id, "' has ",
                                                 spec.tensors.size(), " tensors; wanted: one for each, or none"));
}

v1::FollowStatus FromFollow(const FollowFigures& figures) {
  v1::FollowStatus out;
  out.set_readers(figures.readers.count);
  out.set_behind_seconds(figures.readers.behind_seconds);
  if (!figures.newest) return out;
  out.mutable_newest()->set_step(figures.newest->step);
  out.mutable_newest()->set_generation(figures.newest->generation);
  out.set_version_bytes(figures.newest->bytes);
  out.set_change_bytes(figures.newest->change_bytes);
  out.set_changed_ratio(figures.newest->changed_ratio);
  return out;
}

}  // namespace ballast
