// What a run and the stream of its rank say to each other, in plain values: the edge turns them from and into messages.
#pragma once

#include <cstdint>
#include <memory>
#include <optional>
#include <string>
#include <variant>
#include <vector>

#include "absl/status/status.h"

#include "server/payload.h"
#include "server/spikes.h"
#include "server/step_machine.h"
#include "server/weight_piece.h"

namespace ballast {

// A step after it closed. Weights of `not_applied` tensors did not change.
struct ClosedStep {
  uint64_t step = 0;
  Outcome outcome = Outcome::kApplied;
  std::string reason;  // a word
  std::string detail;  // for people
  std::vector<uint32_t> not_applied;
  std::vector<uint32_t> left_out = {};  // ranks
  double grad_norm = 0;                 // before clipping
  double clip_coefficient = 1;
  uint64_t nonfinite_tensors = 0;
  uint64_t rejected_blocks = 0;
  std::vector<SpikeEvent> spikes = {};
};

// A trainer's own state, opaque here, and the step that it belongs to.
struct ClientState {
  uint64_t step = 0;
  std::string bytes;
};

// From the rank, in the order sent; checked by the edge against the run's spec.
namespace message {
struct StepBegin {
  uint64_t step = 0;
  double loss_scale = 1;
  std::vector<std::vector<double>> hyper = {};  // by group, complete, in the kernel's order
  std::string content = {};                     // of event::StepBegin
};
struct MicroBegin {
  uint32_t micro = 0;
  bool last = false;
};
struct Gradient {
  uint32_t micro = 0;
  uint32_t tensor = 0;
  uint64_t chunk = 0;
  uint32_t crc = 0;
  Payload data;
};
struct MicroEnd {
  uint32_t micro = 0;
  std::vector<bool> absent = {};
  std::optional<double> loss = {};
};
// One hyperparameter, by its place in the group's kernel.
struct GroupValue {
  uint32_t group = 0;
  uint32_t hyper = 0;
  double value = 0;
};
struct StepEnd {
  std::string client_state = {};        // empty: none
  std::vector<GroupValue> values = {};  // that win over StepBegin's
  std::string content = {};             // of event::StepEnd
};
// What the edge refused; it ends the stream when its turn comes.
struct Bad {
  absl::Status status;
};
}  // namespace message
using RankMessage = std::variant<message::StepBegin, message::MicroBegin, message::Gradient, message::MicroEnd,
                                 message::StepEnd, message::Bad>;

// To the rank.
struct WeightsChunk {
  uint64_t step = 0;
  uint32_t tensor = 0;
  uint64_t chunk = 0;
  bool last = false;  // of the tensor that the rank receives
};
namespace output {
struct Opened {};
struct Credit {
  uint64_t bytes = 0;
  std::optional<ChunkId> wanted = {};
  uint64_t acknowledged = 0;  // gradients of the stream, from its start
};
struct Drain {
  std::string reason;
};
}  // namespace output
using StreamOutput = std::variant<output::Opened, output::Credit, output::Drain, WeightsChunk, ClosedStep>;

// An outgoing stream as its run sees it. Shared by its lane (until the call is over) and the run (until it has let go).
// Called on the strand.
class WeightSink {
 public:
  virtual ~WeightSink() = default;
  // Swaps the piece's data into the message and writes it, unless it is in the stream's memory already. One write at a
  // time, each answered once by OnWritten of the run, after which TakeBack swaps the memory back. False: the stream is
  // over, `piece` stays, no answer comes.
  virtual bool WriteWeights(const WeightsChunk& chunk, WeightPiece* piece) = 0;
  virtual void TakeBack(WeightPiece* piece) = 0;
  // Before a piece is encoded: memory of the stream's for it, if it wants it there. False: not now; Run::OnRoom says
  // when to ask again. Unlend: the piece was not written after all.
  virtual bool Lend(WeightPiece*) { return true; }
  virtual void Unlend(WeightPiece*) {}
  // Ends the stream. Later writes return false. Idempotent: the first status stands.
  virtual void Finish(absl::Status status) = 0;
  // Ends it at once, whatever the peer does.
  virtual void Cancel() = 0;
};

class RankStream : public WeightSink {
 public:
  virtual bool Write(const StreamOutput& output) = 0;  // anything but WeightsChunk; answered like WriteWeights
  virtual void Consumed() = 0;                         // one message's memory is free: another may be read
  virtual const std::string& peer() const = 0;
  virtual const char* lane() const = 0;  // grpc | shm
  // The rank can send no more before some of what it sent is summed, whatever its credit.
  virtual bool full() const { return false; }
};

}  // namespace ballast
