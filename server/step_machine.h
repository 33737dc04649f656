// The step machine: what happens to a run's open step, and nothing else. Events go in with the time, effects come out
// in the order they must be carried out. Sockets, threads, payloads, clocks and devices are outside (etcd raft's
// shape), so that scenarios and a simulator can drive it. The rules are those of the wire protocol:
//
//   - exactly one step is open; it closes exactly once, APPLIED, ABORTED or PARTIAL, and every outcome uses its number
//   up;
//   - a tensor is complete when all its chunks are in; completing it is the effect Update, at most once a step;
//   - at the end of the micro-batch every tensor is complete or listed absent;
//   - a chunk that comes again with the same checksum is acknowledged and ignored, with another one it ends the
//   session;
//   - a session is live while its stream is open and for lease_s after; a token resumes it, takeover fences it;
//   - a session that is replaced by a new process closes the step if any of its chunks was accepted: ABORTED when no
//     tensor was updated, PARTIAL otherwise. A tensor whose Update was emitted counts as updated.
//
// This version: commit mode release, one rank, one micro-batch. Strand-confined: no locks.
#pragma once

#include <cstdint>
#include <optional>
#include <string>
#include <variant>
#include <vector>

#include "absl/status/status.h"

namespace ballast {

enum class SessionId : uint64_t {};
enum class Outcome { kApplied, kSkipped, kAborted, kPartial };
const char* OutcomeName(Outcome outcome);

struct StepMachineOptions {
  std::vector<std::string> tensor_names;
  std::vector<uint64_t> chunks;  // chunk count by tensor; at least 1
  double lease_s = 10;
  double rank_timeout_s = 60;
  uint64_t first_step = 1;
};

namespace event {
// A process asks for the rank. `resumes`: the session whose token it showed.
struct Attach {
  SessionId session;  // the id it shall have if it is a new one
  std::optional<SessionId> resumes;
  bool takeover = false;
};
// The session's stream is up, in place of any it had. weights_received: by tensor, of step weights_step; empty or 0:
// none.
struct StreamOpened {
  SessionId session;
  uint64_t weights_step = 0;
  std::vector<bool> weights_received;
};
// The session's current stream is gone (one that was replaced is not reported). `clean`: the client ended it itself;
// between steps that gives the rank back at once.
struct StreamClosed {
  SessionId session;
  bool clean = false;
};
struct StepBegin {
  SessionId session;
  uint64_t step = 0;
  std::string content;  // canonical bytes; must be equal when sent again
};
struct Chunk {
  SessionId session;
  uint32_t micro = 0;
  uint32_t tensor = 0;
  uint64_t chunk = 0;
  uint32_t crc = 0;
};
struct MicroEnd {
  SessionId session;
  uint32_t micro = 0;
  std::vector<bool> absent;  // by tensor
};
struct StepEnd {
  SessionId session;
};
struct TensorApplied {
  uint64_t step = 0;
  uint32_t tensor = 0;
};
// Time passed; due deadlines are acted on.
struct Tick {};
}  // namespace event

using StepEvent = std::variant<event::Attach, event::StreamOpened, event::StreamClosed, event::StepBegin, event::Chunk,
                               event::MicroEnd, event::StepEnd, event::TensorApplied, event::Tick>;

namespace effect {
// The event is refused; the request or stream it came on ends with this status. The first effect where there is one; it
// stands alone except for DATA_LOSS, after which the session is fenced and the step closed.
struct Reject {
  absl::Status status;
  double retry_after_s = 0;  // ALREADY_EXISTS: when the lease runs out; 0: not by waiting
};
// Answer to Attach.
struct Attached {
  SessionId session;
  bool resumed = false;
};
// The session is over: end its stream with this status. Its token is void from now on.
struct Fence {
  SessionId session;
  absl::Status status;
};
// The step is open (StepBegin). Weights of earlier steps not yet sent need not be.
struct Opened {
  uint64_t step = 0;
};
// The payload of the Chunk event is new: store it, return its credit.
struct Store {
  uint32_t tensor = 0;
  uint64_t chunk = 0;
};
// The payload of the Chunk event is held already: drop it, return its credit.
struct Duplicate {};
// The tensor's gradient is complete: update it. Answered by TensorApplied.
struct Update {
  uint64_t step = 0;
  uint32_t tensor = 0;
};
// Send the tensor's weights of this step to the rank.
struct Publish {
  uint64_t step = 0;
  uint32_t tensor = 0;
};
// The step is closed. Gradients stored and not updated are dropped; updates already begun go on. Send the result after
// all weights published.
struct Close {
  uint64_t step = 0;
  Outcome outcome = Outcome::kApplied;
  std::string reason;
  std::vector<uint32_t> not_applied;  // tensors awaited or incomplete
};
// Send the result of the closed step again (after a resume), after all weights published.
struct RepeatResult {
  uint64_t step = 0;
};
// The chunks stored of the open step are dropped and the step is no longer open; it will be sent again.
struct Discard {
  uint64_t step = 0;
};
}  // namespace effect

using StepEffect =
    std::variant<effect::Reject, effect::Attached, effect::Fence, effect::Opened, effect::Store, effect::Duplicate,
                 effect::Update, effect::Publish, effect::Close, effect::RepeatResult, effect::Discard>;
using StepEffects = std::vector<StepEffect>;

class StepMachine {
 public:
  explicit StepMachine(StepMachineOptions options);

  // now_s: any clock that never goes back.
  StepEffects Handle(const StepEvent& event, double now_s);

  // The open step, or the one to be sent next.
  uint64_t step() const { return step_; }
  bool step_open() const { return open_; }
  std::optional<SessionId> session() const { return session_; }
  bool connected() const { return session_ && connected_; }
  // When the rank's stream was lost; meaningful when !connected().
  double disconnected_at_s() const { return disconnected_at_s_; }
  // Chunks held and tensors updated of the open step, for a resuming client.
  std::vector<bool> ChunksHeld(uint32_t tensor) const;
  std::vector<bool> TensorsApplied() const;

 private:
  enum class TensorState : uint8_t { kAwaited, kUpdating, kApplied, kAbsent };
  struct Tensor {
    TensorState state = TensorState::kAwaited;
    uint64_t held = 0;                         // chunks
    std::vector<std::optional<uint32_t>> crc;  // by chunk; set when held
    bool updated() const { return state == TensorState::kUpdating || state == TensorState::kApplied; }
  };

  StepEffects On(const event::Attach& e, double now_s);
  StepEffects On(const event::StreamOpened& e, double now_s);
  StepEffects On(const event::StreamClosed& e, double now_s);
  StepEffects On(const event::StepBegin& e, double now_s);
  StepEffects On(const event::Chunk& e, double now_s);
  StepEffects On(const event::MicroEnd& e, double now_s);
  StepEffects On(const event::StepEnd& e, double now_s);
  StepEffects On(const event::TensorApplied& e, double now_s);
  std::string Name(uint32_t tensor) const;
  StepEffects On(const event::Tick& e, double now_s);

  absl::Status CheckCurrent(SessionId session) const;
  absl::Status CheckOpen(SessionId session) const;
  absl::Status CheckChunk(const event::Chunk& e) const;
  absl::Status CheckComplete(const std::vector<bool>& absent) const;
  StepEffects EndSession(absl::Status why, const char* reason);
  void CloseTorn(const char* reason, StepEffects* effects);
  void CloseIfDone(StepEffects* effects);
  void Close(Outcome outcome, std::string reason, StepEffects* effects);
  void Reset();

  const StepMachineOptions options_;
  uint64_t step_;
  bool open_ = false;
  std::string begin_content_;
  bool micro_ended_ = false;
  std::vector<bool> absent_;
  bool step_ended_ = false;
  std::vector<Tensor> tensors_;
  size_t unsettled_ = 0;  // tensors neither applied nor absent
  // Of the last closed step, until the next StepBegin acknowledges it.
  std::vector<bool> unacknowledged_;
  uint64_t closed_step_ = 0;

  std::optional<SessionId> session_;
  bool connected_ = false;
  double disconnected_at_s_ = 0;
};

}  // namespace ballast
