// One process of a simulated rank: a client that keeps to the protocol, but for what the simulator asks it to do wrong.
// It has its own hook order, its own absent tensors, and a window of credit.
#pragma once

#include <array>
#include <map>
#include <optional>
#include <random>
#include <string>
#include <vector>

#include "tests/server/step/step_simulator_checker.h"

namespace ballast::sim {

using Random = std::mt19937_64;
// Below n; 0 for n = 0.
inline uint64_t Below(Random* random, uint64_t n) { return n == 0 ? 0 : (*random)() % n; }
inline bool Chance(Random* random, uint64_t one_in) { return Below(random, one_in) == 0; }

enum class Kind {
  kAttach,
  kResume,
  kRestart,
  kTakeover,
  kLeave,
  kCut,
  kDeath,
  kTimeout,
  kDuplicate,
  kOtherCrc,
  kDisagreement,
  kEndDisagreement,
  kAbsentTensor,
  kAbsentEverywhere,
  kWantedSent,
  kClockJump,
  kWorldChange,
  kRewind,
  kAllCut,
  kVerdictSkip,
  kVerdictAbort,
  kVerdictApply,
  kMeasure,
  kMeasureTorn,
  kDiscard,
  kOpenEnd,
  kSlabWait,
  kSlowRank,
  kParked,
  kOverdue,
  kLeftOut,
  kWithout,
  kForgotten,
  kDiscarded,
  kApplied,
  kSkipped,
  kAborted,
  kPartial,
  kCount
};
const char* KindName(Kind kind);
using Counts = std::array<uint64_t, static_cast<size_t>(Kind::kCount)>;

class SimulatedRank {
 public:
  struct Identity {
    uint64_t process = 0;
    uint64_t run_seed = 0;  // what all ranks know
    uint32_t rank = 0, world = 1;
    bool slow = false;
    uint32_t part = 0;    // that the daemon has of the run
    bool reined = false;  // it begins and ends steps when it is told to, and measures those that are staged
  };
  SimulatedRank(const RunShape& shape, Identity identity, uint64_t step, Random* random, Counts* counts);

  // The next message of its stream; nothing: it waits.
  std::optional<StepEvent> Next();
  bool computing() const { return plan_.micros[producing_].produced < plan_.micros[producing_].order.size(); }
  void Hook();  // the next gradients are there
  bool slow() const { return identity_.slow; }

  // Of one that is reined. EndStep of a staged step brings the verdict of all parts, or discards it.
  void BeginStep(bool as_others_do);
  void EndStep(std::string content, bool discard);
  bool asked() const { return asked_; }
  bool in_step() const { return begins_ && !has_result_; }
  uint64_t next_step() const { return std::max(step_ + (has_result_ ? 1 : 0), closed_elsewhere_ + 1); }

  // The daemon's answer to an Attach that resumed: what is in, of which it takes note.
  void Resume(const StepMachine& machine, uint32_t rank, const std::map<ChunkId, uint64_t>& held);
  event::StreamOpened Open() const { return {*session, weights_step_, received_}; }
  void OnReturned(ChunkId id);
  void OnWanted(ChunkId id) { wanted_ = id; }
  void OnWeights(uint64_t step, uint32_t tensor);
  void OnMeasured(uint64_t step) { measured_ = measured_ || step == step_; }
  void OnResult(uint64_t step);

  uint64_t step() const { return step_; }
  const std::vector<uint64_t>& weights() const { return weights_; }  // by tensor: of which step
  void Pull(std::vector<uint64_t> weights) { weights_ = std::move(weights); }
  void DisagreeNext() { disagree_next_ = true; }  // with the other ranks, on its next step
  void CorruptNext() { corrupt_next_ = true; }

  std::optional<SessionId> session;  // its token

 private:
  enum class Sent : uint8_t { kNo, kYes, kAgain };
  struct Micro {
    std::vector<ChunkId> order;  // of its hooks
    std::vector<Sent> sent;      // along order
    size_t produced = 0;
    size_t first_unsent = 0;
    std::vector<bool> absent;
  };
  struct Plan {
    std::string content = {}, end_content = {};
    std::vector<Micro> micros = {};
    bool open_ended = false;                      // no micro-batch is announced as the last
    bool measures = false, waits = false;         // for the norm, before it ends the step
    std::optional<uint64_t> discards_after = {};  // so many messages
  };

  void MakePlan();
  void PlanEnd();
  std::optional<StepEvent> NextMessage();
  void Disagree();
  Micro MakeMicro(uint32_t micro);
  std::optional<StepEvent> NextChunk(Micro* micro);
  std::optional<StepEvent> NextWanted(Micro* micro);
  void Spend(ChunkId id);
  event::Chunk Send(Micro* micro, size_t at);
  std::optional<StepEvent> Repeat(const Micro& micro);

  const RunShape& shape_;
  const Identity identity_;
  Random* const random_;
  Counts* const counts_;
  uint64_t step_;
  Plan plan_;
  size_t producing_ = 0;  // micro-batch
  std::vector<uint64_t> weights_;
  uint64_t weights_step_ = 0;
  std::vector<bool> received_;

  // What was said on this stream.
  bool begin_said_ = false, micro_begin_said_ = false, micro_end_said_ = false, step_end_said_ = false;
  bool measure_said_ = false, measured_ = false;
  uint64_t said_ = 0;        // messages of the step, on all streams
  bool discarding_ = false;  // it has begun to say so
  size_t micro_ = 0;
  bool begins_ = true, ends_ = true;  // it was told to
  bool asked_ = false;                // for what the step measures
  bool has_result_ = false;           // reined: of this step
  uint64_t closed_elsewhere_ = 0;     // likewise: the last step that closed before it began it
  bool waiting_ = false;              // for the result of a step that closed without it
  bool repeat_next_ = false, corrupt_next_ = false, disagree_next_ = false;
  std::multimap<ChunkId, uint64_t> spent_;  // bytes of the window, and of what was sent beyond it
  uint64_t spent_bytes_ = 0;
  std::optional<ChunkId> wanted_;  // it was told so last, and has not sent it since
};

}  // namespace ballast::sim
