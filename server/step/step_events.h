// What the step machine hears and what it answers: events go in with the time, effects come out. Plain values.
#pragma once

#include <cstdint>
#include <optional>
#include <string>
#include <variant>
#include <vector>

#include "absl/container/inlined_vector.h"
#include "absl/status/status.h"

#include "server/step/reduction_tracker.h"

namespace ballast {

enum class SessionId : uint64_t {};
enum class Outcome { kApplied, kSkipped, kAborted, kPartial };
const char* OutcomeName(Outcome outcome);
inline constexpr const char* kDiscarded = "discarded";  // why a step is skipped that a rank discards

namespace event {
// A process asks for a rank of so many. `resumes`: the session whose token it showed.
struct Attach {
  SessionId session;  // the id it shall have if it is a new one
  std::optional<SessionId> resumes;
  bool takeover = false;
  uint32_t rank = 0;
  uint32_t world = 1;
  Coverage coverage;  // of a new session
  // In a part of a run, as its other parts say; 0: they say nothing.
  uint64_t from_step = 0;   // that the rank makes next
  uint64_t again_step = 0;  // that it had begun, and begins again
};
// The process of a session that a rewind has ended lives: its rank is not lost, though it has not attached anew yet.
struct KeepAlive {
  SessionId session;
};
// The session's stream is up, in place of any it had. weights_received: by tensor, of step weights_step; empty or 0:
// none.
struct StreamOpened {
  SessionId session;
  uint64_t weights_step = 0;
  std::vector<bool> weights_received;
};
// The session's current stream is gone (one that was replaced is not reported). `clean`: the client ended it itself;
// outside a step of its own that gives the rank back at once.
struct StreamClosed {
  SessionId session;
  bool clean = false;
};
// content: its values, one `name = value` a line; must be equal when sent again, and between ranks.
struct StepBegin {
  SessionId session;
  uint64_t step = 0;
  std::string content;
};
// A step of one micro-batch may leave it out.
struct MicroBegin {
  SessionId session;
  uint32_t micro = 0;
  bool last = false;
};
struct Chunk {
  SessionId session;
  uint32_t micro = 0;
  uint32_t tensor = 0;
  uint64_t chunk = 0;
  uint32_t crc = 0;  // not known
};
// All gradients of the micro-batch are made. Those that wait for credit may still follow, until the next MicroBegin or
// StepEnd: the list of absent tensors comes ahead of them, since the other ranks' credit may wait for it.
struct MicroEnd {
  SessionId session;
  uint32_t micro = 0;
  std::vector<bool> absent;  // by tensor
};
// The rank has sent all of the step and asks for its norm; staged only. Its present micro-batch is its last.
struct StepMeasure {
  SessionId session;
};
// Its present micro-batch is its last; in release it must have begun as such. content: as in StepBegin, for the values
// that StepEnd brings; staged only.
struct StepEnd {
  SessionId session;
  std::string content = {};
  bool discard = false;  // the step comes to nothing; staged only, and in the middle of the step as well
};
// Answers Update.
struct TensorApplied {
  uint64_t step = 0;
  uint32_t tensor = 0;
  Slab slab = {};
};
// Answers Measure, also when the step has closed meanwhile: the device reads its slabs no more.
struct Measured {
  uint64_t step = 0;
};
// Answers Judge. Applied, skipped or aborted; the latter two have a reason, as in effect::Close.
struct Verdict {
  uint64_t step = 0;
  Outcome outcome = Outcome::kApplied;
  std::string reason = {};
  std::string detail = {};
};
// Takes weights and state back to what they were after this closed step: tasks given to the device from now on find
// them so. Refused with UNAVAILABLE while a step is being measured or judged.
struct Rewind {
  uint64_t to_step = 0;
};
// The run ends here and is to be written: a step that has updated some tensor closes with what it has.
struct Stop {
  std::string why;  // for people
};
// Time passed; due deadlines are acted on.
struct Tick {};
}  // namespace event

using StepEvent =
    std::variant<event::Attach, event::KeepAlive, event::StreamOpened, event::StreamClosed, event::StepBegin,
                 event::MicroBegin, event::Chunk, event::MicroEnd, event::StepMeasure, event::StepEnd,
                 event::TensorApplied, event::Measured, event::Verdict, event::Rewind, event::Stop, event::Tick>;

namespace effect {
// The event is refused; the request or stream that it came on ends with this status. It is always the first effect, and
// the only one, unless a session is fenced as well.
struct Reject {
  absl::Status status;
  double retry_after_s = 0;  // ALREADY_EXISTS, UNAVAILABLE: when to ask again; 0: waiting does not help
};
// Answer to Attach.
struct Attached {
  uint32_t rank = 0;
  SessionId session;
  bool resumed = false;
};
// The session is over: end its stream with this status. Its token is void from now on.
struct Fence {
  uint32_t rank = 0;
  SessionId session;
  absl::Status status;
};
// The step is open: its first StepBegin.
struct Opened {
  uint64_t step = 0;
  std::vector<uint32_t> left_out = {};  // it is made without these, ascending
};
// The open step goes on without the rank.
struct LeftOut {
  uint32_t rank = 0;
};
// The rank has begun the open step: weights of earlier steps not yet sent to it need not be.
struct Begun {
  uint32_t rank = 0;
};
// The payload of the Chunk event is new: hold it until a Sum, Forget, Discard or Close.
struct Hold {
  uint32_t rank = 0;
  ChunkId id;
};
// The payload of the Chunk event is not needed: drop it and return its credit. `again`: it is held or summed already.
struct Drop {
  uint32_t rank = 0;
  bool again = false;
};
// Sum these payloads, which are held; then drop them and return their credit.
using Sum = ReductionTracker::Sum;
// Drop all payloads of the rank that are held, and return their credit.
struct Forget {
  uint32_t rank = 0;
};
// The tensor's gradient is complete, and due: update it. Answered by TensorApplied.
struct Update {
  uint64_t step = 0;
  uint32_t tensor = 0;
  Slab slab;
};
// All gradients of the step are complete, and ranks have asked for its norm: measure it. Once a step; answered by
// Measured, before anything else is asked of the device about this step or a later one.
struct Measure {
  uint64_t step = 0;
  std::vector<std::optional<Slab>> slabs;  // by tensor; none: absent everywhere. Some tensor has one
};
// Tell the rank what the open step measures; `discarded`: that it comes to nothing, and was not measured.
struct Measured {
  uint64_t step = 0;
  uint32_t rank = 0;
  bool discarded = false;
};
// A rank discards the open step, which waits for the others' StepEnd: drop all payloads that are held and return their
// credit.
struct Abandon {
  uint64_t step = 0;
};
// All gradients of the step are complete, and no tensor is updated yet: judge it. Answered by Verdict.
struct Judge {
  uint64_t step = 0;
  std::vector<std::optional<Slab>> slabs;  // by tensor; none: absent everywhere
};
// Send the tensor's weights of this step to the rank, or to all. The step may be closed.
struct Publish {
  uint64_t step = 0;
  uint32_t tensor = 0;
  std::optional<uint32_t> rank = std::nullopt;
};
// The step is closed. Drop all payloads that are held and return their credit; updates already begun go on.
struct Close {
  uint64_t step = 0;
  Outcome outcome = Outcome::kApplied;
  std::string reason;                 // a word
  std::string detail;                 // for people, where there is more to say
  std::vector<uint32_t> not_applied;  // tensors whose update was awaited
};
// Send the result of the closed step to the rank, after all weights published; after a resume, send it again. Each rank
// gets results in order.
struct Result {
  uint64_t step = 0;
  uint32_t rank = 0;
};
// The step is no longer open; it will be sent again, or other steps in its place after a Rewind. Drop all payloads that
// are held.
struct Discard {
  uint64_t step = 0;
};
}  // namespace effect

using StepEffect = std::variant<effect::Reject, effect::Attached, effect::Fence, effect::Opened, effect::LeftOut,
                                effect::Begun, effect::Hold, effect::Drop, effect::Sum, effect::Forget, effect::Update,
                                effect::Measure, effect::Measured, effect::Abandon, effect::Judge, effect::Publish,
                                effect::Close, effect::Result, effect::Discard>;
using StepEffects = absl::InlinedVector<StepEffect, 4>;

}  // namespace ballast
