// What a run and the stream of its rank say to each other, in plain values: the edge turns them from and into messages.
#pragma once

#include <cstdint>
#include <memory>
#include <optional>
#include <string>
#include <variant>
#include <vector>

#include "absl/status/status.h"

#include "server/step/payload.h"
#include "server/step/step_machine.h"
#include "server/step/step_record.h"
#include "server/step/step_verdict.h"
#include "server/store/weight_sink.h"

namespace ballast {

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
struct StepMeasure {};
struct StepEnd {
  std::string client_state = {};             // empty: none
  std::vector<GroupValue> values = {};       // that win over StepBegin's
  std::optional<double> max_grad_norm = {};  // that wins over the run's
  std::string content = {};                  // of event::StepEnd
  bool discard = false;
  std::optional<double> loss = {};  // of the last micro-batch, where its MicroEnd told none
  // Shares of the elements that the rank converted to narrower formats, if it has counted.
  std::optional<double> gradient_flushed = {}, gradient_overflowed = {};
  std::optional<GradientFindings> whole = {};  // of all parts of the run
  bool checkpoint = false;                     // is due after the step
  uint64_t kept_step = 0;                      // of a checkpoint that all parts have, and which stays
};
// What the edge refused; it ends the stream when its turn comes.
struct Bad {
  absl::Status status;
};
}  // namespace message
using RankMessage = std::variant<message::StepBegin, message::MicroBegin, message::Gradient, message::MicroEnd,
                                 message::StepMeasure, message::StepEnd, message::Bad>;

// To the rank.
namespace output {
struct Opened {};
struct Credit {
  uint64_t bytes = 0;
  std::optional<ChunkId> wanted = {};
  uint64_t acknowledged = 0;  // gradients of the stream, from its start
};
// What the open step measures; a step that is discarded was not measured.
struct Measured {
  uint64_t step = 0;
  double grad_norm = 0;
  uint64_t nonfinite_tensors = 0;
  bool discarded = false;
  // In a part of a run: StepStatistics::GradientSquares, and the first tensor that is not finite.
  std::vector<double> squares = {};
  std::optional<uint32_t> first_nonfinite = {};
};
struct Drain {
  std::string reason;
};
}  // namespace output
using StreamOutput =
    std::variant<output::Opened, output::Credit, output::Measured, output::Drain, WeightsChunk, StepRecord>;

// The stream of a rank, whichever transport carries it. Called on the strand.
class RankStream : public WeightSink {
 public:
  virtual Written Write(const StreamOutput& output) = 0;  // anything but WeightsChunk
  virtual void Consumed() = 0;                            // one message's memory is free: another may be read
  virtual const std::string& peer() const = 0;
  virtual const char* transport() const = 0;  // grpc | shm | gpu | nccl
  // The rank can send no more before some of what it sent is summed, whatever its credit.
  virtual bool full() const { return false; }
  // Gradients come in the memory of the run's device, and weights are wanted there, but for what is small or cut.
  virtual bool on_device() const { return false; }
};

}  // namespace ballast
