// What must hold for the step machine whatever happens around it. The checker sees each event with its effects, keeps
// its own account of who has contributed what, and names the first effect that does not follow from the protocol.
//
// It shares nothing with the machine: the sums are kept as lists of their terms, so that two sums are equal to the bit
// exactly when their lists are equal.
#pragma once

#include <compare>
#include <functional>
#include <map>
#include <optional>
#include <set>
#include <string>
#include <vector>

#include "server/step/step_machine.h"

namespace ballast::sim {

inline constexpr uint64_t kChunkBytes = 100;

// A run as the simulator draws it.
struct RunShape {
  StepMachineOptions machine;
  std::vector<uint64_t> last_chunk_bytes;  // by tensor
  uint64_t window_bytes = 0;
  uint64_t coverage_seed = 0;  // 0: every rank covers everything
  // What the rank, in a world of so many, contributes to of the chunk, which has so many pieces. Together they do to
  // all.
  static constexpr uint32_t kPieces = 8;
  ChunkPart PartOf(uint32_t rank, uint32_t world, uint32_t tensor, uint64_t chunk) const;
  bool Covers(uint32_t rank, uint32_t world, uint32_t tensor, uint64_t chunk) const {
    const ChunkPart part = PartOf(rank, world, tensor, chunk);
    return part.begin < part.end;
  }
  ChunkSet CoverageOf(uint32_t rank, uint32_t world) const;
  uint64_t ChunkBytes(ChunkId id) const {
    return id.chunk + 1 < machine.reduction.chunks[id.tensor] ? kChunkBytes : last_chunk_bytes[id.tensor];
  }
};

// splitmix64's finalizer: what several ranks must draw alike comes from it.
inline uint64_t Mix(uint64_t a, uint64_t b) {
  uint64_t x = a * 0x9e3779b97f4a7c15u + b + 0x632be59bd9b4e019u;
  x = (x ^ (x >> 30)) * 0xbf58476d1ce4e5b9u;
  x = (x ^ (x >> 27)) * 0x94d049bb133111ebu;
  return x ^ (x >> 31);
}

// Whether ranks keep to the protocol. If they do, none of their messages may be refused as wrong or out of place.
enum class Peers { kLawful, kAny };

class StepChecker {
 public:
  explicit StepChecker(const RunShape& shape, Peers peers = Peers::kLawful);

  // What the effects violate; empty: nothing.
  std::string Observe(const StepEvent& event, const StepEffects& effects, const StepMachine& machine);

  // The step of the tensor's last Update; 0: none.
  uint64_t version(uint32_t tensor) const { return version_[tensor]; }
  // Updates of the step that the device has not answered.
  bool updating(uint64_t step) const;
  // Whether the device works at an update or a measure, or a verdict is awaited.
  bool device_busy() const;
  // What the open step measures of a tensor, were it measured now: a number that its sum's terms make; none: it has no
  // gradient.
  std::optional<double> MeasureOf(uint32_t tensor) const;
  // How the first rank that has ended the open step has ended it.
  std::string end_content() const;
  // Whether the step that closed last has updated a tensor.
  bool updated_any() const { return updated_any_; }
  // Goes on from this closed step, as a daemon does that was started anew. `of`: what was observed until it went.
  void StartFrom(uint64_t closed_step, uint64_t generation, const StepChecker& of);
  // Whether the last event's chunk had come from every rank, and found no slab.
  bool waited_for_slab() const { return waited_for_slab_; }

 private:
  struct Micro {
    std::map<std::pair<uint32_t, uint64_t>, uint32_t> delivered;  // (tensor, chunk) to payload
    bool ended = false;
    std::vector<bool> absent;
  };
  struct Rank {
    std::optional<SessionId> session;
    bool connected = false;
    bool in_step = false;
    bool came = false;      // a process has attached to it, in this world
    bool left_out = false;  // of the open step
    bool late = false;      // the open step has waited for it for too long
    bool asks = false;      // a process was told to attach again when the open step is closed
    bool ended = false;
    bool discards = false;
    bool asked = false;                            // for the norm
    bool said_measure = false, told_norm = false;  // on its stream
    std::string end_content;
    std::vector<Micro> micros;
    std::optional<uint32_t> last;
    std::map<ChunkId, uint32_t> held;  // to payload
    uint64_t held_bytes = 0;
    std::set<uint64_t> lacking;  // results it may not have
    std::set<uint64_t> told;     // results sent on its stream
  };
  struct Term {
    uint32_t micro, rank, payload;
    auto operator<=>(const Term&) const = default;
  };
  struct Tensor {
    bool updated = false;
    std::vector<std::vector<Term>> sums;  // by chunk
    std::set<uint64_t> zeroed;            // chunks
  };
  struct LiveSlab {
    uint64_t step;
    uint32_t tensor;
    Slab slab;
    bool updating;
    bool abandoned = false;  // by a rewind: its update is of no step any more
    bool reading = false;    // the device measures it
    bool over = false;       // and its step is over, or discarded
  };

  void Note(const event::Attach&) {}
  void Note(const event::KeepAlive&) {}
  void Note(const event::StreamOpened& e);
  void Note(const event::StreamClosed& e);
  void Note(const event::StepBegin& e);
  void Note(const event::MicroBegin& e);
  void Note(const event::Chunk& e);
  void Note(const event::MicroEnd& e);
  void Note(const event::StepMeasure& e);
  void Note(const event::StepEnd& e);
  void Note(const event::Measured& e);
  void Note(const event::TensorApplied& e);
  void Note(const event::Verdict& e);
  void Note(const event::Rewind& e);
  void Note(const event::Stop&) {}
  void Note(const event::Tick&) {}

  void On(const effect::Reject& e);
  void On(const effect::Attached& e);
  void On(const effect::Fence& e);
  void On(const effect::Opened& e);
  void On(const effect::LeftOut& e);
  void On(const effect::Begun& e);
  void On(const effect::Hold& e);
  void On(const effect::Drop& e);
  void On(const effect::Sum& e);
  void On(const effect::Forget& e);
  void On(const effect::Update& e);
  void On(const effect::Measure& e);
  void On(const effect::Measured& e);
  void On(const effect::Abandon& e);
  void On(const effect::Judge& e);
  void On(const effect::Publish& e);
  void On(const effect::Close& e);
  void On(const effect::Result& e);
  void On(const effect::Discard& e);

  bool MayRefuse(absl::StatusCode code) const;
  bool SaysOver(SessionId session, absl::StatusCode code) const;
  void CheckOutcome(const effect::Close& e);
  void CheckResults();
  void CheckEnds();
  void NoteLate(const StepMachine& machine);
  void NameLast(Rank* rank);
  bool AllEnded() const;
  bool AllSentAll() const;
  bool AnyAsked() const;
  void NoteIfNothingToMeasure();
  bool BeingRead() const { return measuring_ || (judged_ && !verdict_); }
  void CheckRewind(const StepMachine& machine);
  void CheckSlab(const effect::Sum& e);
  // Every piece of every chunk has a rank that takes part and contributes to it.
  void CheckPieces();
  void Fail(std::string what);
  Rank* Speaker(SessionId session);  // in the step; null: nobody
  void BeginMicro(Rank* rank, bool last);
  const Rank& FirstTakingPart() const;
  bool AllTakingPart(const std::function<bool(const Rank&)>& holds) const;
  bool Settled(uint32_t rank, ChunkId id) const;
  bool AllSettled(ChunkId id) const;
  bool AbsentEverywhere(uint32_t tensor) const;
  // The sum's terms in the order that the protocol gives; none while a contribution is missing.
  std::optional<std::vector<Term>> Canonical(uint32_t tensor, uint64_t chunk) const;
  LiveSlab* Live(uint64_t step, uint32_t tensor);
  void ResetStep();
  void ResetSums();

  const RunShape& shape_;
  const Peers peers_;
  std::string violation_;
  const StepEvent* event_ = nullptr;
  bool refused_ = false;
  bool waited_for_slab_ = false;
  bool updated_any_ = false;
  const event::Chunk* chunk_ = nullptr;  // of a rank in the step
  uint32_t chunk_answers_ = 0;
  std::optional<uint32_t> known_payload_;

  uint64_t step_;
  bool open_ = false;
  bool judged_ = false;
  bool measured_ = false, discarded_ = false;
  bool measuring_ = false;  // the device, perhaps what is of no open step any more
  std::optional<Outcome> verdict_;
  std::vector<Rank> ranks_;
  uint64_t generation_ = 1;
  std::set<SessionId> outdated_;  // fenced by a change of world or a rewind
  std::vector<Tensor> tensors_;
  std::vector<LiveSlab> slabs_;
  std::vector<uint64_t> version_, applied_;  // by tensor: the step of the last Update, of the last TensorApplied
  std::map<uint64_t, std::vector<uint64_t>> versions_after_;  // by closed step
};

}  // namespace ballast::sim
