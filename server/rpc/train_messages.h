// What the transports of a Train stream share: they turn the rank's messages into checked values, and the run's answers
// into messages. Thread-safe.
#pragma once

#include <memory>
#include <vector>

#include "absl/status/statusor.h"

#include "ballast/v1/trainer.pb.h"
#include "server/rpc/rpc.h"
#include "server/run/rank_stream.h"

namespace ballast {

// What the first message of a stream, Open, names: the run, and the event that opens the stream there.
struct TrainBinding {
  std::shared_ptr<Run> run;
  event::StreamOpened opened;
};
// The status that ends a stream on which no Open came for environment.open_timeout_s.
absl::Status NoOpenCame(const RpcEnvironment& environment);
absl::StatusOr<TrainBinding> BindTrain(const RpcEnvironment& environment, const v1::TrainRequest& first);

// Turns a request into a checked value, and moves its long fields out. `payload`: a gradient's bytes, if the transport
// has them beside the message; otherwise request->gradient().data() is taken. A refused request becomes message::Bad,
// and is counted. The checksum is compared with the payload as it is now. If a trainer changes borrowed memory
// afterwards, the changed bytes are summed, which harms only the trainer's own run, as sending them would have.
//
// Of small gradients each is a message of its own, up to the first that is refused.
void AddRankMessages(Run* run, v1::TrainRequest* request, Payload payload, std::vector<RankMessage>* messages);

// Whether the weights may go as SmallWeights.
bool AreSmall(const v1::Weights& weights);
// Adds such weights to those that are there already. False: those are of another step, or there is no room.
bool AddSmallWeights(const v1::Weights& weights, v1::SmallWeights* small);

// Anything but weights.
v1::TrainResponse FromOutput(const StreamOutput& output, const RunSpec& spec);

}  // namespace ballast
