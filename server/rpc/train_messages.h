// What the lanes of a Train stream have in common: the rank's messages checked and as values, the run's answers as
// messages. Thread-safe.
#pragma once

#include <memory>

#include "absl/status/statusor.h"

#include "ballast/v1/trainer.pb.h"
#include "server/rpc/rpc.h"
#include "server/run/rank_stream.h"

namespace ballast {

// The run that the first message of a stream, Open, belongs to, and what is to be opened there.
struct TrainBinding {
  std::shared_ptr<Run> run;
  event::StreamOpened opened;
};
// The status that ends a stream on which no Open came for environment.open_timeout_s.
absl::Status NoOpenCame(const RpcEnvironment& environment);
absl::StatusOr<TrainBinding> BindTrain(const RpcEnvironment& environment, const v1::TrainRequest& first);

// Takes what is long out of the request. `payload`: of a gradient, where the lane has it beside the message; otherwise
// request->gradient().data() is taken. What is refused becomes message::Bad, and is counted. The checksum is compared
// with the payload as it is now: of borrowed memory that its trainer changes afterwards, the sum takes what is there
// then. That harms the numbers of the trainer's own run, as sending them would have.
RankMessage ToRankMessage(Run* run, v1::TrainRequest* request, Payload payload);

// Anything but weights.
v1::TrainResponse FromOutput(const StreamOutput& output, const RunSpec& spec);

}  // namespace ballast
