// Carries out what the step machine decides, for one run: holds and sums gradients in the reduce pool, sends updates to
// the device, publishes weights, reports closed steps. Messages of the ranks' streams come in; effects go out to them.
//
// A payload waits, in the memory that it came in, until the machine says to sum it, and counts against its rank's
// credit until then; a rank that is out of credit is told which chunk it may send nevertheless. The stream of one that
// sends more is not read on until there is room, and ends with RESOURCE_EXHAUSTED where the chunk that sums wait for is
// behind.
//
// Strand-confined.
#pragma once

#include <deque>
#include <functional>
#include <map>
#include <memory>
#include <optional>
#include <string>
#include <vector>

#include "server/run/rank_stream.h"
#include "server/run/run_history.h"
#include "server/run/run_status.h"
#include "server/run/sender.h"
#include "server/run/step_statistics.h"
#include "server/stability/spike_detector.h"
#include "server/stability/spike_policy.h"
#include "server/step/step_machine.h"
#include "server/store/parameter_store.h"
#include "server/store/pull_job.h"
#include "server/store/snapshot_ring.h"

namespace ballast {

// To which snapshot: that of this step, or of so many before the last closed one, or the nearest before; neither: the
// latest.
struct RewindOrder {
  std::optional<uint64_t> to_step = {};
  std::optional<uint32_t> steps_back = {};
  std::string reason = "operator";  // of ballast_rewinds_total
};
struct Rewound {
  uint64_t step = 0;        // the run is as when it had closed
  uint64_t generation = 0;  // since
};
using RewindDone = absl::AnyInvocable<void(absl::StatusOr<Rewound>)>;

class StepRunner {
 public:
  struct Environment {
    const RunSpec* spec;
    const LayerGroups* layers;
    ParameterStore* store;
    std::vector<DeviceBuffer> pools;  // by shard
    std::unique_ptr<SnapshotRing> snapshots;
    const Plan* plan;
    RunMetrics* metrics;
    RunStatusBoard* board;
    RunHistory* history;
  };
  struct AttachOutcome {
    absl::Status status;
    double retry_after_s = 0;
    SessionId session = {};
    uint32_t rank = 0;
    bool resumed = false;
  };

  explicit StepRunner(Environment environment);

  AttachOutcome Attach(const event::Attach& attach, const std::string& peer);
  void OpenStream(const std::shared_ptr<RankStream>& stream, const event::StreamOpened& opened);
  void OnMessage(const std::shared_ptr<RankStream>& stream, RankMessage message);
  void OnWritten(const RankStream* stream);
  void OnRoom() { Settle(); }
  void OnInputClosed(const RankStream* stream);
  void OnStreamGone(const RankStream* stream);
  void Tick();

  // As soon as the event in hand is done with and no step is being judged. Every session ends with proto/rewound.h's
  // status; updates under way are done first, and undone. FAILED_PRECONDITION names the snapshots kept.
  void Rewind(RewindOrder order, RewindDone done);
  // For a PullJob: of the snapshot of `step`, or with 0 the latest weights. FAILED_PRECONDITION as above.
  absl::StatusOr<PullSource> SourceOf(uint64_t step) const;

  void set_weights_loaded(bool loaded) { weights_loaded_ = loaded; }
  // No new step begins; `done` once no step is open and all is sent, or the rank is away.
  void Drain(std::function<void()> done);
  // Ends every stream with this status, now.
  void End(absl::Status status);

  const StepMachine& machine() const { return machine_; }
  // Some rank is attached, or its session may still resume.
  bool AnyRankHeld() const;
  std::optional<ClosedStep> last_result() const {
    return results_.empty() ? std::nullopt : std::optional<ClosedStep>(results_.back());
  }
  // What the rank's process sent last with the StepEnd of a step that has closed.
  const std::optional<ClientState>& client_state(uint32_t rank) const { return links_[rank].state; }
  uint64_t held_bytes(uint32_t rank) const { return links_[rank].held_bytes; }
  // Counted from the live allocations, and what the windows may take.
  uint64_t gradient_bytes() const;
  uint64_t slot_bytes() const;
  uint64_t snapshot_bytes() const;
  uint64_t client_state_bytes() const;  // what the ranks' may take

 private:
  // A rank's connection, and what it has sent that is not summed.
  struct Link {
    std::shared_ptr<RankStream> stream;
    SessionId session = {};  // of the stream
    bool input_closed = false;
    std::string peer, lane;
    bool lease_over = false;  // and the log was told
    std::unique_ptr<Sender> sender;
    std::deque<RankMessage> parked;  // a gradient that finds no room, and what follows it
    std::map<ChunkId, Payload> held;
    uint64_t held_bytes = 0;
    uint64_t held_promised = 0;         // as the client was told when it resumed, until its stream is open
    std::map<uint32_t, double> losses;  // of the open step, by micro-batch
    // Of the step that it was sent with: of the open one, until that closes; and of the last one that did.
    std::optional<ClientState> coming_state, state;
  };
  struct StepClock {
    double begin_s = 0, first_byte_s = 0, last_byte_s = 0, last_update_s = 0, update_s = 0;
    double last_end_s = 0;   // a rank's StepEnd
    uint32_t ended = 0;      // ranks
    uint32_t last_rank = 0;  // that ended
    double wait_s = 0;       // of all others for it
  };

  void TakeParked(uint32_t rank);
  // For lack of room, or for the other ranks.
  bool MustWait(const Link& link, const RankMessage& message) const;
  void RefuseStuck(uint32_t rank);
  void Take(uint32_t rank, message::StepBegin& m);
  void Take(uint32_t rank, message::MicroBegin& m);
  void Take(uint32_t rank, message::Gradient& m);
  void Take(uint32_t rank, message::MicroEnd& m);
  void Take(uint32_t rank, message::StepEnd& m);
  void Take(uint32_t rank, message::Bad& m);

  // Executes the effects; a refusal ends the stream.
  void HandleFrom(uint32_t rank, const StepEvent& event);
  absl::Status Execute(StepEffects effects);
  void Do(const effect::Fence& e);
  void Do(const effect::Opened& e);
  void Do(const effect::LeftOut& e);
  void Do(const effect::Begun& e);
  void Do(const effect::Hold& e);
  void Do(const effect::Drop& e);
  void Do(const effect::Sum& e);
  void Do(const effect::Forget& e);
  void Do(const effect::Update& e);
  void Do(const effect::Judge& e);
  void Do(const effect::Publish& e);
  void Do(const effect::Close& e);
  void Do(const effect::Result& e);
  void Do(const effect::Discard& e);

  void Submit(const effect::Update& e, ParameterStore::UpdateValues values);
  // rewinds: how many there had been when the update was submitted.
  void OnUpdated(const effect::Update& e, float clip, uint64_t rewinds, const TaskResult& result);
  // Before the tensor's update with these values, or the skip of its step; `done` once it is known.
  void ProbeCurvature(uint32_t tensor, const ParameterStore::UpdateValues& values, std::function<void()> done);
  // Of an update of the tensor, or of its measure before.
  ParameterStore::UpdateValues ValuesOf(uint64_t step, uint32_t tensor, Slab slab);
  void OnMeasured(uint64_t step, uint32_t tensor, const TaskResult& result);
  void TakeEndValues();
  void Probe(uint64_t step, uint32_t tensor, Slab slab);
  void OnProbed();
  void JudgeOn();
  void JudgeMeasured();
  void Pronounce(event::Verdict verdict);
  // What the open step shows, when it is closed or judged.
  StepFindings FindingsOf(uint64_t step) const;
  // Skips a step that would else be applied, where the run's policy wants that.
  void JudgeSpikes(event::Verdict* verdict);
  // Returns what it found them in.
  StepFindings FindSpikes(ClosedStep* closed);
  // Goes back to a snapshot, or stops the run, where its policy wants that.
  void Answer(const ClosedStep& closed);
  // The rank has ended the step. If it is the last, all others have waited for it.
  void CountWait(uint32_t rank);
  void StopIf(std::string why);
  void KeepSnapshot();
  void SaveInIdleTime();
  void ShowSnapshots();
  void CarryOutRewinds();
  // Of the runner's own accord: `rewound` when it is done; where it cannot be, the log says so, with `why`.
  void RewindItself(RewindOrder order, std::string why, absl::AnyInvocable<void()> rewound);
  absl::StatusOr<uint64_t> SnapshotFor(const RewindOrder& order) const;
  // UNAVAILABLE: a step is being judged.
  absl::StatusOr<Rewound> RewindNow(const RewindOrder& order);
  void Recall(const RunMemory& memory);
  Payload TakeHeld(uint32_t rank, const ChunkId& id);
  void DropHeld(uint32_t rank);
  void DropAllHeld();
  void OfferWanted(uint32_t rank);
  std::byte* SlabAt(uint32_t tensor, Slab slab) { return pools_[ShardOf(tensor)].data() + slab.offset; }
  uint32_t ShardOf(uint32_t tensor) const { return environment_.plan->placement.shard_of[tensor]; }
  std::optional<double> Loss() const;
  uint32_t ranks_in_step() const { return machine_.world() - static_cast<uint32_t>(left_out_.size()); }
  StepReport ReportOf(const effect::Close& e) const;
  void Report(const effect::Close& e, const StepFindings& found);
  // Adds the step to the history.
  void Remember(const StepReport& report, const StepFindings& found);
  std::optional<uint32_t> RankOf(const RankStream* stream) const;
  void LeaveOldStream(uint32_t rank);
  void EndStream(uint32_t rank, absl::Status status);
  void Detach(uint32_t rank, absl::Status status);
  static void KeepHeld(Link* link);
  void Settle();
  void FinishWhenDone(uint32_t rank);
  void FinishWhenDrained();
  void ShowRanks();
  void LogRefused(const RankStream& stream, const absl::Status& why) const;
  void LogEnd(uint32_t rank, const absl::Status& why) const;
  void LogExpiredLeases(double now_s);
  void LogTorn(const effect::Close& e) const;

  Environment environment_;
  StepMachine machine_;
  std::vector<DeviceBuffer> pools_;  // by shard
  StepStatistics statistics_;
  SpikeDetector detector_;
  SpikePolicy policy_;
  std::optional<TensorClip> tensor_clip_;
  std::vector<double> last_lr_;  // of the last update, by tensor, where curvature is probed; 0: none
  std::vector<Link> links_;      // by rank
  uint32_t updating_ = 0;        // submitted and not done, of any step
  bool weights_loaded_ = false;
  bool draining_ = false;
  std::string stopped_;  // why no step begins any more; empty: it may
  std::function<void()> drained_;
  struct DueRewind {
    RewindOrder order;
    RewindDone done;
  };
  std::deque<DueRewind> rewinds_due_;
  uint64_t rewinds_ = 0;  // carried out
  int executing_ = 0;     // effects

  uint64_t received_bytes_ = 0, sent_bytes_ = 0;  // payload, since a step was remembered

  // The open step.
  std::vector<std::vector<double>> hyper_;
  std::vector<uint32_t> left_out_;               // ranks, ascending
  std::vector<message::GroupValue> end_values_;  // that win over them once the step is judged
  double loss_scale_ = 1;
  float clip_ = 1;
  std::vector<std::optional<Slab>> judged_;  // gradients that are to be judged, by tensor
  uint32_t measuring_ = 0;                   // of these: tasks submitted and not done
  bool probed_ = false;                      // their updates were tried
  uint64_t judging_ = 0;                     // the step that is being judged; 0: none
  event::Verdict verdict_;                   // of its gradients by themselves
  StepClock clock_;
  std::deque<ClosedStep> results_;  // of the last steps, oldest first

  // The message in hand.
  message::Gradient* gradient_ = nullptr;
  message::StepBegin* begin_ = nullptr;
  struct Leaving {
    std::shared_ptr<RankStream> stream;
    double cancel_at_s = 0;
  };
  std::vector<Leaving> leaving_;  // told to end; cancelled when they do not
};

}  // namespace ballast
