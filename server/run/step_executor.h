// Carries out what the step machine decides, for one run: events go in, from the ranks' messages and from the devices,
// and the effects come out, in order, to the parts that each belong to: links to the ranks, the pool that gradients are
// summed in, updates on the devices, the judge, the rewinder and the reporter.
//
// A payload waits, in the memory that it came in, until the machine says to sum it, and counts against its rank's
// credit until a device has added it.
//
// Strand-confined.
#pragma once

#include <cstdint>
#include <deque>
#include <functional>
#include <memory>
#include <optional>
#include <string>
#include <vector>

#include "absl/container/inlined_vector.h"
#include "absl/status/status.h"
#include "absl/status/statusor.h"

#include "server/follow/followed_series.h"
#include "server/run/checkpointer.h"
#include "server/run/gradient_pool.h"
#include "server/run/rank_links.h"
#include "server/run/rank_stream.h"
#include "server/run/rewinder.h"
#include "server/run/run_history.h"
#include "server/run/run_status.h"
#include "server/run/step_gate.h"
#include "server/run/step_judge.h"
#include "server/run/step_reporter.h"
#include "server/run/step_settings.h"
#include "server/run/tensor_updater.h"
#include "server/stability/spike_policy.h"
#include "server/step/client_state.h"
#include "server/step/step_machine.h"
#include "server/step/step_record.h"
#include "server/storage/journal.h"
#include "server/store/parameter_store.h"
#include "server/store/snapshot_ring.h"

namespace ballast {

class StepExecutor {
 public:
  // What is pointed to outlives the executor.
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
    Strand* strand;
    RunStorage storage = {};  // none: the spec has no checkpoints
    const std::string* canonical_spec = nullptr;
    std::string spec_sha256 = {};
    std::string products = {};            // Run::products
    FollowedSeries* followers = nullptr;  // none: the spec has no `follow`
  };
  // What an amended run goes on with.
  struct Past {
    StepMachine::Past steps;
    std::optional<RunMemory> memory;  // none: no step has closed
    SpikePolicy spike_policy{SpikeSettings()};
    RunActivity activity = {};
  };
  struct AttachOutcome {
    absl::Status status;
    double retry_after_s = 0;
    SessionId session = {};
    uint32_t rank = 0;
    bool resumed = false;
  };

  // settle: called when the devices have answered and the effects of that are carried out.
  StepExecutor(Environment environment, std::function<void()> settle);
  StepExecutor(const StepExecutor&) = delete;
  StepExecutor& operator=(const StepExecutor&) = delete;

  // Hands an event to the machine and executes its effects. Returns the refusal where the machine refuses it.
  absl::Status Handle(const StepEvent& event);
  AttachOutcome Attach(const event::Attach& attach);
  // The rank's link takes the stream, unless that is refused.
  absl::Status OpenStream(const std::shared_ptr<RankStream>& stream, const event::StreamOpened& opened);
  // A refusal is what the rank's stream is to end with.
  absl::Status Take(uint32_t rank, RankMessage& message);
  // The rank's stream ends with this status, and the log says so; the machine is not told.
  void Detach(uint32_t rank, absl::Status status);
  void ShowRanks();
  // Of a run that was read from the disk, until a process attaches: those that were held then are lost.
  RunActivity::Ranks CountRanks() const;
  // Its state changes to finished when the last rank leaves cleanly: a checkpoint keeps that.
  void ShowState();
  // When all sessions have ended.
  Past past() const;
  // Before anything else.
  void GoOnFrom(Past past);
  // Before anything else: the run is what a checkpoint says, of which the planes are in the snapshot of its step.
  void GoOnFrom(const RunFigures& figures, CheckpointWritten from);
  // What was replaced between two steps is to be written.
  void OnReplaced();
  // Once every update of a step that has closed is made: it is logged, and a snapshot of it is taken, where they are due.
  void KeepClosed();
  // Begins a checkpoint of what there is, where one is wanted and no step is open.
  void CheckpointIfWanted();
  // Begins a version of the last closed step for readers that follow the run, where one is wanted and its weights are
  // there.
  void MakeVersionIfWanted();
  // The devices have nothing else to do, or that version is late: some more of it is encoded, then `done` is called.
  void EncodeVersion(bool idle, std::function<void()> done) {
    if (followers_ == nullptr || (!idle && !followers_->version_is_late())) return;
    followers_->EncodeNext(std::move(done));
  }
  Checkpointer* checkpointer() { return checkpointer_.get(); }  // nullptr: the run is not checkpointed
  // Before anything else, after the other GoOnFrom: the run has been updated as its journal says, to this state.
  void GoOnFrom(const RunFigures& figures, const RunMemory& memory);
  // Likewise, and whether or not there was such an update: the journal goes on from here.
  void GoOnFrom(const Journal::Place& place);
  // Likewise: it has none of this state.
  void GoOnWithoutJournal() { awaits_journal_ = false; }
  // Likewise: what is in the journal leads to another state.
  void ForgetJournal();
  // `done` when no crash can bring back what a rewind has undone; an error: one can.
  void WhenRewound(absl::AnyInvocable<void(absl::Status)> done);
  // Whether another step must not begin yet: the last one is not kept, or too many wait to be durable.
  bool MustWaitToBegin() const;
  uint64_t DurableStep() const;                                  // by a checkpoint or the journal; 0: none
  bool holds_results() const { return !held_results_.empty(); }  // until their steps are durable
  std::byte* GradientRoom(uint32_t tensor) { return pool_.At(tensor, {}); }
  // Of a run that goes on from its journal: `done` on the strand.
  void Replay(const JournaledUpdate& update, std::function<void()> done);
  // Moves the averages of the tensors that the step, which has closed, has not updated.
  void AverageOthers(uint64_t step);
  void End();
  bool executing() const { return executing_ > 0; }  // effects

  const StepMachine& machine() const { return machine_; }
  StepMachine& machine() { return machine_; }  // events go in by Handle
  StepGate& gate() { return gate_; }
  const StepGate& gate() const { return gate_; }
  RankLinks& links() { return links_; }
  StepReporter& reporter() { return reporter_; }
  Rewinder& rewinder() { return rewinder_; }
  const Rewinder& rewinder() const { return rewinder_; }
  const TensorUpdater& updater() const { return updater_; }
  const StepJudge& judge() const { return judge_; }

  std::optional<StepRecord> last_result() const {
    return results_.empty() ? std::nullopt : std::optional<StepRecord>(results_.back());
  }
  // What the rank's process sent last with the StepEnd of a step that has closed.
  const std::optional<ClientState>& client_state(uint32_t rank) const { return links_[rank].state(); }
  uint64_t held_bytes(uint32_t rank) const { return links_[rank].held_bytes(); }
  // Counted from the live allocations, and what the windows may take.
  uint64_t gradient_bytes() const { return links_.size() * plan_->window_bytes + pool_.bytes(); }
  uint64_t buffer_bytes() const { return links_.buffer_bytes(); }
  uint64_t client_state_bytes() const;  // what the ranks' may take
  uint64_t journal_bytes() const { return journal_ == nullptr ? 0 : JournalWriter::kBytes; }

 private:
  // A step that has closed; no snapshot is taken of one that is torn and to be gone back from.
  struct Unkept {
    uint64_t step = 0;
    bool torn = false;
    bool averages = false;  // also tensors that it has not updated
  };
  // A payload that a device is adding.
  struct Summand {
    uint32_t rank = 0;
    SessionId session = {};
    uint64_t bytes = 0;
  };
  // A sum for the device, and what follows it.
  struct Summing {
    SumTask task;
    TensorUpdater::Done done;
  };

  absl::Status Take(uint32_t rank, message::StepBegin& m);
  absl::Status Take(uint32_t rank, message::MicroBegin& m);
  absl::Status Take(uint32_t rank, message::Gradient& m);
  absl::Status Take(uint32_t rank, message::MicroEnd& m);
  absl::Status Take(uint32_t rank, message::StepMeasure& m);
  absl::Status Take(uint32_t rank, message::StepEnd& m);
  absl::Status Take(uint32_t rank, message::Bad& m);

  absl::Status Execute(StepEffects effects);
  // The second effect, if it is the update that reads what the first sums, and nothing else; else nullptr.
  const effect::Update* UpdateBySum(const StepEffect& first, const StepEffect& second) const;
  void SumAndUpdate(const effect::Sum& sum, const effect::Update& update);
  // Whether ranks send to the device's memory.
  bool SumsOnDevice() const;
  Summing MakeSum(const effect::Sum& e);
  void Do(const effect::Fence& e);
  void Do(const effect::Opened& e);
  void Do(const effect::LeftOut& e);
  void Do(const effect::Begun& e);
  void Do(const effect::Hold& e);
  void Do(const effect::Drop& e);
  void Do(const effect::Sum& e);
  void Do(const effect::Forget& e);
  void Do(const effect::Update& e);
  void Do(const effect::Measure& e) { judge_.Measure(e); }
  void Do(const effect::Measured& e);
  void Do(const effect::Abandon&) { DropAllHeld(); }
  void Do(const effect::Judge& e);
  void Do(const effect::Publish& e);
  void Do(const effect::Close& e);
  void Do(const effect::Result& e);
  void Do(const effect::Discard& e);
  void DropAllHeld();

  void OnUpdated(const effect::Update& e, const TaskResult* result);
  void OnVerdict(const event::Verdict& verdict);
  // All but what the judge fills in.
  StepRecord RecordOf(const effect::Close& e);
  // Goes back to a snapshot, or stops the run, where its policy wants that.
  void AnswerSpikes(const StepRecord& record);
  void StopIf(std::string why);
  std::unique_ptr<Checkpointer> MakeCheckpointer(const Environment& environment);
  std::unique_ptr<Journal> MakeJournal(const Environment& environment);
  // As TensorUpdater::Environment::log.
  std::function<void(uint32_t, const ParameterStore::UpdateValues&, absl::AnyInvocable<void()>)> UpdateLog();
  void LogUpdate(uint32_t tensor, const ParameterStore::UpdateValues& values, absl::AnyInvocable<void()> then);
  void LogClosed(const Unkept& closed);
  void Keep(const Unkept& closed);
  void OnJournalMoved();
  void Tell(const effect::Result& e);
  RunFigures Figures() const;
  RunMemory Memory() const;
  void Recall(const RunMemory& memory);

  const RunSpec* const spec_;
  const Plan* const plan_;
  ParameterStore* const store_;
  const CheckpointCodec* const codec_;
  FollowedSeries* const followers_;  // nullptr: the spec has no `follow`
  RunStatusBoard* const board_;
  const std::function<void()> settle_;
  StepMachine machine_;
  StepGate gate_;
  StepSettings settings_;  // of the open step
  StepReporter reporter_;
  GradientPool pool_;
  RankLinks links_;
  TensorUpdater updater_;
  StepJudge judge_;
  std::unique_ptr<Checkpointer> checkpointer_;
  std::unique_ptr<Journal> journal_;
  Rewinder rewinder_;
  std::deque<StepRecord> results_;  // of the last steps, oldest first
  std::deque<effect::Result> held_results_;
  double had_since_unix_s_ = 0;   // the weights of the last closed step; 0: since before it was asked
  std::optional<Unkept> unkept_;  // the step that KeepClosed is to keep
  // Ranks, when what the run was read from was written, as far as that says so; it counts until a process attaches.
  std::optional<uint32_t> held_before_;
  uint64_t shown_durable_ = 0;
  bool awaits_journal_ = false;  // it was read back, and its journal was not yet: nothing of it may be written
  int executing_ = 0;            // effects
  // The message in hand.
  message::Gradient* gradient_ = nullptr;
  message::StepBegin* begin_ = nullptr;
};

}  // namespace ballast
