// The step machine decides what happens to a run's open step, and nothing else. Events go in with the time; effects
// come out in the order in which they must be carried out. Sockets, threads, payloads, clocks and devices are outside
// (as in etcd's raft), so that scenarios and a simulator can drive it. The rules are those of the wire protocol:
//
//   - exactly one step is open; it closes exactly once, APPLIED, SKIPPED, ABORTED or PARTIAL, and every outcome uses
//     its number up; the ranks' StepBegin and their numbers of micro-batches must agree, or it is ABORTED;
//   - in every micro-batch every rank delivers each tensor whole or lists it absent; ReductionTracker says what may be
//     summed;
//   - a tensor is complete when the last micro-batch of every rank is in its sum. With commit `release` the effect
//     Update follows at once. With `staged` the effect Judge follows when all tensors are complete and the ranks'
//     StepEnds agree, and the Updates follow a favourable Verdict. A tensor has at most one Update a step;
//   - staged: a rank's last micro-batch may become known by its StepMeasure or StepEnd. When each rank that takes part
//     has sent one of them, some the former, and all tensors are complete, the effect Measure follows, and to each rank
//     that asked, once on each stream, the effect Measured; nothing is judged before;
//   - staged: a rank may discard the step at any time after its StepBegin. Nothing of the step is summed, compared or
//     measured from then on, and what comes is dropped; a StepMeasure is answered at once. When every rank that takes
//     part has ended it, the step closes SKIPPED, whatever they said; it waits for them, since a rank that is late would
//     else begin its next step in place of this one. A rank that is lost or too late closes it as any other step;
//   - a rank may begin the next micro-batch but one only when all of the first is summed (ReductionTracker::kMostLive);
//   - a chunk that comes again with the same checksum is acknowledged and ignored, with another one it ends the
//     session; in a micro-batch that is wholly summed and no longer kept account of, any checksum is accepted;
//   - a session is live while its stream is open and for lease_s after; a token resumes it, takeover fences it;
//   - a session that is replaced by a new process, or away for too long, has its contributions to the open step
//     dropped, unless some are summed: then the step closes, ABORTED when no tensor was updated, PARTIAL otherwise. A
//     tensor whose Update was emitted counts as updated;
//   - a step that waits for a rank for longer than step_timeout_s closes likewise, whether the rank is connected or
//     not. Its detail says for whom it waited; their sessions go on. Only the time counts in which the rank could have
//     sent what is missing: a rank that is out of credit, or too far ahead, waits for another rank or for the device;
//   - a step that has updated some tensor when the run is stopped closes likewise, whoever is there, so that all that was
//     made can be written; one that has updated none stays open, and ranks send it again to the next daemon;
//   - with leaves_out_lost, a rank that was away for too long is left out of the steps to come until a process attaches
//     to it again, and of the open step too, if nothing is summed. While a step is open without the rank, that process
//     is refused, since the weights that it would begin with are being replaced; the next step awaits it. Some rank
//     always takes part, and the others' coverage must leave no gap; when nobody is attached any more, all ranks are
//     awaited again. A rank to which no process has attached yet is never left out, however late it starts: it brings
//     weights of its own, which must be those of the run's first step. A rewind remembers that a process has attached
//     to a rank; another world does not;
//   - in a part of a run: a rank brings the verdict of all parts with its StepEnd, once it has been told what this part
//     measures. So when a step is measured, a rank that is gone is not missed as long as another, which is there, brings
//     the verdict; nor is one that is too late once another has brought it, and until then the step waits, whatever
//     step_timeout_s: other parts may have applied it. A part in which no tensor has a gradient is judged as the others. A
//     rank that attaches and makes a later step next, since another part has closed this one, closes it here as torn, open
//     or not. The first that makes a step again which another part has lost discards what all have sent of it here, as long
//     as it has updated nothing, and the others' sessions end; three times, then it is a process in that rank's place;
//   - messages of a rank about a step that closed without it are ignored, until its next StepBegin;
//   - a rewind discards the open step and ends every session; steps count on from the one rewound to, and answers of
//     the device to updates from before belong to no step;
//   - a rank whose session a rewind has ended while it was live is returning, for lease_s after that or after the last
//     KeepAlive of its process, until a process attaches to it. It is not lost by then, and a step waits for it as for one
//     that is connected. Whoever attaches may have the rank.
//
// Strand-confined: no locks.
#pragma once

#include <cstdint>
#include <map>
#include <optional>
#include <string>
#include <utility>
#include <vector>

#include "absl/status/status.h"
#include "absl/status/statusor.h"
#include "absl/strings/string_view.h"
#include "absl/types/span.h"

#include "server/step/awaited_rank.h"
#include "server/step/reduction_tracker.h"
#include "server/step/step_events.h"

namespace ballast {

enum class Commit { kRelease, kStaged };

struct StepMachineOptions {
  std::vector<std::string> tensor_names;
  ReductionTracker::Options reduction;
  Commit commit = Commit::kRelease;
  uint32_t most_micros = 1;     // a step
  uint64_t chunk_elements = 0;  // for messages about ranks that cover chunks in part
  double lease_s = 10;
  double rank_timeout_s = 60;
  double step_timeout_s = 0;  // for each rank, in a step; 0: none
  double counted_tick_s = 1;  // of the time between two ticks, at most: the daemon may have been stopped
  bool leaves_out_lost = false;
  bool is_part = false;  // of a run whose ranks bring the verdict of all its parts
  uint64_t first_step = 1;
};

class StepMachine {
 public:
  // What the machine of an amended run goes on from. A value.
  class Past;

  explicit StepMachine(StepMachineOptions options);
  // After a Rewind, before any other event: nobody is attached, and no step is open.
  Past past() const;
  // Before the first event: goes on with the steps, the generation and the sessions that are over.
  void GoOnFrom(Past past);

  // now_s: any clock that never goes back.
  StepEffects Handle(const StepEvent& event, double now_s);

  // The open step, or the one to be sent next.
  uint64_t step() const { return step_; }
  bool step_open() const { return open_; }
  // Begins at 1; another world or a rewind raises it. What sessions of an earlier generation said is void.
  uint64_t generation() const { return generation_; }
  uint32_t world() const { return static_cast<uint32_t>(ranks_.size()); }  // 0: nobody has attached yet
  std::optional<SessionId> session(uint32_t rank) const { return ranks_[rank].session; }
  std::optional<uint32_t> RankOf(SessionId session) const;
  absl::Status CheckCurrent(SessionId session) const;  // else: how the session ended
  bool connected(uint32_t rank) const { return ranks_[rank].session && ranks_[rank].connected; }
  // A process has it: it is connected, or away for less than its lease.
  bool held(uint32_t rank, double now_s) const { return Live(ranks_[rank], now_s); }
  // A process had it, none has it now, and the last one neither left cleanly nor was left out of a step.
  bool lost(uint32_t rank, double now_s) const {
    const Rank& r = ranks_[rank];
    return r.came && !r.left && !Live(r, now_s) && !returning_since_s(rank, now_s);
  }
  // Since when the rank is returning: when its session was ended; none: it is not.
  std::optional<double> returning_since_s(uint32_t rank, double now_s) const;
  // When the rank's stream was lost, or its process heard of last; meaningful when !connected().
  double disconnected_at_s(uint32_t rank) const { return ranks_[rank].gone_at_s; }
  // Whether the rank is in the open step: it has begun it.
  bool InStep(uint32_t rank) const { return open_ && ranks_[rank].begun == step_ && !reduction_.left_out(rank); }
  // Whether the rank has ended the step that it began last.
  bool Ended(uint32_t rank) const { return ranks_[rank].ended; }
  // Whether it has sent all of that step: it has asked for its norm, or ended it.
  bool SentAll(uint32_t rank) const { return ranks_[rank].asked || ranks_[rank].ended; }
  // Whether some rank discards the open step.
  bool discarded() const { return discarded_; }
  // Whether the event must be handed in again later, since the rank is too far ahead of the others.
  bool MustWait(const event::MicroBegin& e) const;
  // What has arrived of the open step, for a resuming client.
  const ReductionTracker& reduction() const { return reduction_; }
  // The chunk that a rank in the step may send beyond its credit.
  std::optional<ChunkId> Wanted(uint32_t rank) { return InStep(rank) ? reduction_.Wanted(rank) : std::nullopt; }
  // The chunk that the rank is to be told to send although it may find no credit. Returned once for each chunk and
  // stream. A later one replaces the one told before, which is summed by then, without this rank.
  std::optional<ChunkId> Offer(uint32_t rank, bool short_of_credit);
  std::vector<bool> TensorsApplied() const;
  // Whether the open step has updated some tensor, or is about to.
  bool UpdatedAny() const;
  // For how long the open step has waited for what the rank could have sent.
  double awaited_s(uint32_t rank) const { return ranks_[rank].awaited_s; }
  // Whom the open step has waited for, for longer than a moment, in rank order. To be asked again and again: a call looks
  // through the gradients of one rank at most, whose turn it is, and says of the others what was found before.
  std::vector<AwaitedRank> Awaited();

 private:
  enum class Ending : uint8_t { kAway, kTaken, kLeft, kDataLoss, kWorld, kRewound };  // of a session
  enum class TensorState : uint8_t { kAwaited, kSummed, kUpdating, kApplied, kAbsent };
  struct Tensor {
    TensorState state = TensorState::kAwaited;
    std::optional<Slab> slab;  // kSummed
    bool updated() const { return state == TensorState::kUpdating || state == TensorState::kApplied; }
  };
  // What a rank lacked of a micro-batch when its gradients were last looked through.
  struct Lack {
    uint32_t micro = 0;
    uint64_t chunks = 0;  // 0: they were not, in this step
    std::string text = {};
  };
  // A rewind has ended the rank's session, and no process has attached since.
  struct Returning {
    SessionId session;
    double since_s = 0;
  };
  struct Rank {
    std::optional<SessionId> session;
    std::optional<Returning> returning = {};
    bool connected = false;
    double gone_at_s = 0;
    bool came = false;                    // a process has attached to it, in this world
    bool left = false;                    // the last that did has ended its stream cleanly, or was left out
    bool left_out = false;                // of the next step; of the open one: reduction_.left_out
    uint64_t begun = 0;                   // the last step it began
    bool ended = false;                   // that step, by StepEnd
    bool said_end = false;                // the same on its present stream
    bool asked = false;                   // for that step's norm, by StepMeasure
    bool said_measure = false;            // the same on its present stream
    bool told_norm = false;               // the answer was sent on its present stream
    bool named_last = false;              // its last micro-batch, by StepMeasure or StepEnd
    bool discards = false;                // that step
    std::optional<ChunkId> offered = {};  // last, of that step, on its present stream
    bool short_of_credit = false;
    double awaited_s = 0;  // in the open step
    Lack lack = {};
    std::string end_content = {};
    uint64_t lacking = 0;  // the first closed step whose weights and result it may lack; 0: none
    uint64_t told = 0;     // the last step whose result was sent on its stream
  };

  static StepEffects Refuse(absl::Status status, double retry_after_s = 0) {
    return {effect::Reject{std::move(status), retry_after_s}};
  }
  StepEffects On(const event::Attach& e, double now_s);
  StepEffects On(const event::KeepAlive& e, double now_s);
  StepEffects On(const event::StreamOpened& e, double now_s);
  StepEffects On(const event::StreamClosed& e, double now_s);
  StepEffects On(const event::StepBegin& e, double now_s);
  StepEffects On(const event::MicroBegin& e, double now_s);
  StepEffects On(const event::Chunk& e, double now_s);
  StepEffects On(const event::MicroEnd& e, double now_s);
  StepEffects On(const event::StepMeasure& e, double now_s);
  StepEffects On(const event::StepEnd& e, double now_s);
  StepEffects On(const event::TensorApplied& e, double now_s);
  StepEffects On(const event::Measured& e, double now_s);
  StepEffects On(const event::Verdict& e, double now_s);
  StepEffects On(const event::Rewind& e, double now_s);
  StepEffects On(const event::Stop& e, double now_s);
  StepEffects On(const event::Tick& e, double now_s);
  std::string Name(uint32_t tensor) const;

  // The rank that the event comes from. `stale`: the event belongs to a step that closed without the rank.
  struct Speaker {
    uint32_t rank = 0;
    bool stale = false;
  };
  absl::StatusOr<Speaker> CheckSpeaker(SessionId session) const;
  // Whether another part of the run has lost the step that is next here, or open. BeginAgain: what was sent of it is
  // discarded, and all other sessions end.
  bool BeginsAgain(const event::Attach& e) const;
  void BeginAgain(uint32_t rank, double now_s, StepEffects* effects);
  // Closes the step before the one that the rank makes next.
  void CloseBehind(const event::Attach& e, double now_s, StepEffects* effects);
  void EndByRewind(uint32_t rank, double now_s, StepEffects* effects);
  // Whether it is of a rank that is returning, or was until a lease ago, and is now.
  bool HearOf(SessionId session, double now_s);
  absl::Status CheckWorld(const event::Attach& e, double now_s) const;
  absl::Status CheckCovered(const event::Attach& e) const;
  // Where the sets leave a gap: the first of it, for people; empty: they leave none.
  std::string FindGap(absl::Span<const ChunkSet* const> sets) const;
  absl::Status CheckFree(const Rank& rank, bool takeover, double now_s, double* retry_after_s) const;
  absl::Status CheckChunk(uint32_t rank, const event::Chunk& e) const;
  absl::Status CheckMicroNumber(uint32_t micro) const;
  absl::Status CheckMicro(uint32_t rank, uint32_t micro, bool last) const;
  absl::Status CheckAbsent(uint32_t rank, uint32_t micro, const std::vector<bool>& absent) const;
  absl::Status CheckWhole(uint32_t rank, uint32_t micro) const;
  // Whether the rank has sent all of its last micro-batch, as `message` says.
  absl::Status CheckSent(uint32_t rank, absl::string_view message) const;
  absl::Status CheckMeasure(uint32_t rank) const;
  absl::Status CheckEnd(uint32_t rank, const event::StepEnd& e) const;
  std::string BeginConflict(uint32_t rank, const std::string& content) const;
  // Why another rank's number of micro-batches cannot be this rank's; empty: it can.
  std::string MicroConflict(uint32_t rank, uint32_t micro, bool last) const;
  // Makes the rank's present micro-batch its last, where it is not. False: that closed the step.
  bool NameLast(uint32_t rank, StepEffects* effects);
  // Closes the step when another rank ended it with other values.
  bool EndsConflict(uint32_t rank, StepEffects* effects);
  // Counts for how long each rank is waited for, and closes a step that waits for one for too long.
  void CountAwaited(double now_s);
  void CloseOverdue(StepEffects* effects);
  bool CouldSend(uint32_t rank);
  // Whether the step has waited for it for longer than it may.
  bool Overdue(uint32_t rank) const {
    return options_.step_timeout_s > 0 && ranks_[rank].awaited_s >= options_.step_timeout_s;
  }
  bool WaitsFor(uint32_t rank);  // for longer than a moment
  // Looks through the gradients of the next rank of which more has come since it was looked through.
  void LookThroughOne();
  // What the open step waits for from the rank, for people: `has not begun it`; empty: nothing. `look`: through all of
  // its gradients, instead of saying what was found before.
  std::string Missing(uint32_t rank, bool look) const;
  std::string MissingOfMicro(uint32_t rank, uint32_t micro, bool look) const;
  std::string LackOf(uint32_t rank, uint32_t micro) const;
  // All ranks but this one that something is missing of, by name.
  std::string MissingOfOthers(uint32_t rank) const;
  std::string Called(uint32_t rank) const;  // rank 1 (not connected)
  std::string AwayDetail(uint32_t rank) const;
  std::string FinishDetail(uint32_t rank) const;
  // Leaves the rank out of the steps to come and, if possible, of the open one.
  void LeaveOut(uint32_t rank, double now_s, StepEffects* effects);
  bool MayLeaveOut(uint32_t rank) const;
  // Ranks whose processes are back take part again; all ranks do, when nobody is attached.
  void TakeBackIn();
  std::vector<uint32_t> LeftOutRanks() const;
  // The device reads the sums of the step for a measure or a verdict.
  bool BeingRead() const;
  bool AwaitsVerdict() const { return judged_ && !favoured_; }
  bool Live(const Rank& rank, double now_s) const;
  // Begins the only micro-batch of a rank that sends without MicroBegin. False: that closed the step.
  bool BeginImplied(uint32_t rank, const event::MicroBegin& begin, double now_s, StepEffects* effects);
  void PublishMissing(uint32_t rank, const event::StreamOpened& e, StepEffects* effects) const;
  void ChangeWorld(uint32_t world, double now_s, StepEffects* effects);
  void Remember(uint32_t rank, Ending how);  // how its session ends now, for a client that comes late
  void Update(uint32_t tensor, Slab slab, StepEffects* effects);
  void EndSession(uint32_t rank, const absl::Status& why, const char* reason, double now_s, StepEffects* effects);
  void LeaveStep(uint32_t rank, const char* reason, StepEffects* effects);
  // Whether the open step's verdict is known or may still be brought, although the rank is gone, or too late, that has
  // asked for it.
  bool OthersBringVerdict(uint32_t rank) const;
  void CloseTorn(const char* reason, std::string detail, StepEffects* effects);
  // The same, where more may be missing than end marks.
  void CloseAsFarAs(const char* reason, std::string detail, StepEffects* effects);
  // After anything was delivered, ended or released.
  void Proceed(StepEffects* effects);
  void MeasureIfDue(StepEffects* effects);
  void TellMeasured(StepEffects* effects);
  bool AnyAsked() const;
  // The rank discards the step.
  void Abandon(StepEffects* effects);
  std::string WhoDiscards() const;
  // Forgets what the ranks have sent of the step. Slabs that the device reads are free once it has answered.
  void DropSums(const std::vector<bool>& left_out);
  void JudgeIfDue(StepEffects* effects);
  // Whether the step, though no tensor has a gradient here, is judged as other parts judge it.
  bool GoesWithOthers() const;
  void CloseIfDone(StepEffects* effects);
  void PublishClosed(const event::TensorApplied& e, StepEffects* effects);
  void TellResults(StepEffects* effects);
  bool AllEnded() const;
  bool AnyEnded() const;
  void Close(Outcome outcome, std::string reason, std::string detail, StepEffects* effects);
  void Reset();

  const StepMachineOptions options_;
  uint64_t step_;
  uint64_t generation_ = 1;
  struct Over {
    SessionId session;
    uint32_t rank = 0;
    uint64_t generation = 0;  // that it was of
    Ending how = Ending::kAway;
  };
  std::vector<Over> over_;    // sessions that have ended, oldest first
  uint64_t rewound_to_ = 0;   // by the last rewind
  uint64_t begun_again_ = 0;  // the step that was, until all ranks have begun it
  struct Again {
    uint64_t step = 0;
    int times = 0;
  } again_;  // the step that was begun again last, and how often
  bool open_ = false;
  double opened_at_s_ = 0, ticked_at_s_ = 0;
  std::string begin_content_;
  uint32_t begin_rank_ = 0;                      // whose content it is
  uint32_t look_next_ = 0;                       // the rank whose turn it is in LookThroughOne
  bool judged_ = false;                          // Judge was emitted
  bool favoured_ = false;                        // and the verdict is to apply the step
  bool measured_ = false;                        // what the step measures is known
  bool discarded_ = false;                       // by some rank
  bool measuring_ = false;                       // Measure was emitted, perhaps of an earlier step, and is not answered
  std::vector<std::pair<uint32_t, Slab>> lent_;  // with their tensors: of a step that is over, and read by that Measure
  ReductionTracker reduction_;
  std::vector<Tensor> tensors_;
  size_t unsettled_ = 0;                  // tensors neither applied nor absent
  std::vector<uint64_t> applied_in_;      // by tensor: the last step that updated it, as the device has said
  std::vector<uint32_t> updating_;        // by tensor: updates that the device has not answered, in order
  std::vector<uint32_t> abandoned_;       // by tensor: the first so many of them are from before a rewind
  std::map<uint64_t, uint64_t> closing_;  // updates that go on, by closed step: its result waits for them
  uint64_t closed_step_ = 0;              // the last
  std::vector<Rank> ranks_;
};

class StepMachine::Past {
 public:
  Past() = default;
  // Of a run that nobody is attached to, whose last closed step is this one.
  Past(uint64_t of_generation, uint64_t step) : generation(of_generation), rewound_to(step), closed_step(step) {}

 private:
  friend class StepMachine;
  uint64_t generation = 1, rewound_to = 0, closed_step = 0;
  std::vector<Over> over = {};
  std::vector<Rank> ranks = {};
};

}  // namespace ballast
