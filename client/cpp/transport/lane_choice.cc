#include "client/cpp/transport/lane_choice.h"

#include <utility>

#include "absl/strings/str_cat.h"

#include "client/cpp/transport/grpc_lane.h"
#include "client/cpp/transport/shm_lane.h"

namespace ballast {
namespace {

// How long to wait for the socket's answer. At the beginning all ranks ask at once, and the daemon makes one rank's
// memory after another's, so the first wait is longer; when a rank resumes, others wait for it.
constexpr double kFirstPatienceS = 10, kPatienceS = 0.5;

}  // namespace

absl::StatusOr<std::unique_ptr<Lane>> LaneChoice::Open(const v1::AttachResponse& grant) {
  const bool offered = !grant.shm_socket().empty();
  if (wish_ != LaneWish::kGrpc && offered) {
    const double patience_s = std::exchange(asked_, true) ? kPatienceS : kFirstPatienceS;
    auto lane = ShmLane::Open(grant.shm_socket(), grant.session_token(), patience_s);
    if (lane.ok()) return std::unique_ptr<Lane>(*std::move(lane));
    const std::string why(lane.status().message());
    if (wish_ == LaneWish::kShm) {
      return absl::UnavailableError(absl::StrCat("no shared memory with the daemon at ", connection_.server(), ": ",
                                                 why, "; run both on one host as one user, or choose the lane auto"));
    }
    if (std::exchange(told_, why) != why) {
      connection_.Log(
          absl::StrCat("no shared memory with the daemon at ", connection_.server(), " (", why, "); using gRPC"));
    }
  }
  if (wish_ == LaneWish::kShm) {
    return absl::FailedPreconditionError(absl::StrCat("the daemon at ", connection_.server(),
                                                      " offers no shared memory; set its shm_socket, or choose the "
                                                      "lane auto"));
  }
  return std::unique_ptr<Lane>(std::make_unique<GrpcLane>(connection_));
}

}  // namespace ballast
