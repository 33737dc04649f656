// One model in training. The edge's door to a run: every call here posts to the run's strand and answers by callback,
// on that strand. What a run holds in memory is reserved by Create, exactly as its plan says, and freed by End.
//
// Thread-safe. Each callback is called exactly once, also when the run has ended. Streams are shared with gRPC; a run
// lets go of them when they are over. End: once, from a thread that is not the strand.
#pragma once

#include <cstdint>
#include <functional>
#include <memory>
#include <optional>
#include <string>
#include <utility>
#include <vector>

#include "absl/functional/any_invocable.h"
#include "absl/functional/function_ref.h"
#include "absl/status/statusor.h"

#include "server/base/strand.h"
#include "server/follow/followed_series.h"
#include "server/follow/version_source.h"
#include "server/run/journal_replay.h"
#include "server/run/run_history.h"
#include "server/run/run_status.h"
#include "server/run/step_driver.h"
#include "server/run/step_executor.h"
#include "server/run/weight_loader.h"
#include "server/spec/layers.h"
#include "server/step/held.h"
#include "server/store/digest_job.h"
#include "server/store/load_job.h"
#include "server/store/pulls.h"

namespace ballast {

class Run final : public VersionSource {
 public:
  struct Options {
    RunSpec spec;
    std::string canonical_spec;  // as the edge compares and shows it; opaque here
    std::string spec_sha256;
    Plan plan;
    std::vector<Device*> devices;  // by shard of the plan
    Metrics* metrics = nullptr;
    // Of a run that is to take the place of another, which outlives Create: its tensors come first in the spec, and in
    // the same shards of the plan. Until TakeOver nothing else is asked of this run.
    const Run* past = nullptr;
    // Asked when that is done which may take long, and before anything of `past` is touched: an error ends Create.
    std::function<absl::Status()> still_wanted = [] { return absl::OkStatus(); };
    RunStorage storage = {};  // where the spec has checkpoints
  };
  struct AttachRequest {
    SessionId fresh = {};  // the id a new session shall have
    std::optional<SessionId> resumes = {};
    uint32_t rank = 0, world = 1;
    uint64_t from_step = 0, again_step = 0;  // of event::Attach
    bool takeover = false;
    bool want_digests = false;
    bool knows_whole = false;  // HeldChunks may be of micro-batches and tensors as a whole
    std::string peer;
    std::function<void()> accepted = [] {};  // on the strand, once the rank is its own: the reply may wait for digests
    Coverage coverage = {};
  };
  struct AttachReply {
    SessionId session = {};
    bool resumed = false;
    uint64_t resume_step = 0;
    bool weights_loaded = false;
    bool loaded_here = false;  // by this very session
    std::vector<uint64_t> digests = {};
    std::optional<StepRecord> last_result = {};
    bool step_open = false;  // and of the open step, when resumed:
    Held held = {};
    std::vector<bool> applied = {};  // updated, by tensor
    uint64_t credit_held = 0;        // bytes that wait to be summed
    std::optional<ClientState> client_state = {};
    uint64_t generation = 1;
  };
  using AttachDone = absl::AnyInvocable<void(absl::StatusOr<AttachReply>, double retry_after_s)>;
  using Digests = std::vector<uint64_t>;

  // RESOURCE_EXHAUSTED when the memory is not there; nothing is left behind then.
  static absl::StatusOr<std::shared_ptr<Run>> Create(Options options);
  ~Run() override;

  const RunSpec& spec() const override { return spec_; }
  const ChunkSet::Starts& chunk_starts() const { return chunk_starts_; }  // of its ranks' coverage
  const Plan& plan() const { return plan_; }
  // What the bits of its updates over matrices depend on (Device::MatrixProducts); empty: it has none.
  const std::string& products() const { return products_; }
  const std::vector<std::string>& devices() const { return devices_; }  // labels, by shard
  const LayerGroups& layers() const { return layers_; }
  const std::string& canonical_spec() const { return canonical_spec_; }
  const std::string& spec_sha256() const { return spec_sha256_; }
  RunStatus Status() const { return board_.Read(); }
  const RunHistory& history() const { return *history_; }
  RunMetrics& metrics() { return *metrics_; }
  double busy_s() const { return strand_.busy_s(); }

  void Attach(AttachRequest request, AttachDone done);
  // The process of the session lives, though a rewind has ended it. An error: the session ended otherwise, or another
  // process has its rank.
  void KeepAlive(SessionId session, absl::AnyInvocable<void(absl::Status)> done);

  void OpenStream(std::shared_ptr<RankStream> stream, event::StreamOpened opened);
  void OnMessages(std::shared_ptr<RankStream> stream, std::vector<RankMessage> messages);
  void OnWritten(std::shared_ptr<RankStream> stream);
  void OnRoom();                                           // a stream that would not lend, will
  void OnInputClosed(std::shared_ptr<RankStream> stream);  // the client has said all it will
  void OnStreamGone(std::shared_ptr<RankStream> stream);

  // As in WeightLoader.
  void BeginLoad(LoadCall call, bool replaces, absl::AnyInvocable<void(absl::Status)> done);
  void Load(LoadCall call, std::vector<LoadChunk> chunks, absl::AnyInvocable<void(absl::Status)> done);
  void FinishLoad(LoadCall call, DigestJob::Done done);
  void AbandonLoad(LoadCall call);

  void Pull(std::shared_ptr<WeightSink> sink, PullOrder order);
  void OnPullWritten(std::shared_ptr<WeightSink> sink);
  void OnPullGone(std::shared_ptr<WeightSink> sink);

  // As in Followers. FAILED_PRECONDITION: the spec has no `follow`, or there are no weights.
  void Follow(std::shared_ptr<VersionSink> sink, FollowOrder order) override;
  // Likewise, of versions that have names; without weights there may be names of earlier ones.
  void TagVersion(Followers::TagOrder order, TagKeeper::Done done);
  void UntagVersion(std::string name, absl::AnyInvocable<void(absl::Status)> done);
  void ListVersions(WeightSeries series, absl::AnyInvocable<void(absl::StatusOr<Followers::VersionList>)> done);
  void OnVersionSent(std::shared_ptr<VersionSink> sink) override;
  void OnFollowerGone(std::shared_ptr<VersionSink> sink) override;

  // `done` once the run is held for another to take its place: no step is open, every connected rank has the last
  // one's weights and result, and until Release or TakeOver StepBegins wait, and LoadState and Rewind are UNAVAILABLE.
  // FAILED_PRECONDITION: a step is open, there are no weights, or the session is over; UNAVAILABLE: it is held already.
  void Hold(SessionId session, absl::AnyInvocable<void(absl::Status)> done);
  void Release();
  // As in ParameterStore, of a run that is held. Thread-safe.
  std::vector<uint64_t> StayingBytes(const RunSpec& next) const { return store_->StayingBytes(next); }
  // Takes the place of `past`, which is held: its weights, state, steps, results and client_state. Its sessions end as
  // by a rewind to the last step, and it is over. An error, and nothing has changed: `past` has failed. Once, from a
  // thread that is neither run's strand.
  struct Taken {
    uint64_t step = 0;                             // the last closed one
    uint64_t generation = 0;                       // since
    std::vector<uint64_t> snapshots_dropped = {};  // steps
  };
  absl::StatusOr<Taken> TakeOver(Run* past);

  // As in StepDriver::Rewind.
  void Rewind(RewindOrder order, RewindDone done);

  // As in Checkpointer::Ask.
  void Checkpoint(CheckpointTrigger trigger, Checkpointer::Done done);
  // As in StepDriver. A run that has failed, or is over, has nothing to write.
  void WriteLast(std::string why, absl::AnyInvocable<void(absl::Status)> done);
  // The same, although the newest checkpoint may be of this very step: it is of another history.
  void CheckpointAnew(Checkpointer::Done done);
  // Goes back to the checkpoint, as Rewind does. FAILED_PRECONDITION: it is of a later step than the last closed one.
  // DATA_LOSS: it is damaged. UNAVAILABLE: another one is being written; ask again. With an error the run is as it was: a
  // snapshot may have made room for a checkpoint that is whole, and no other. From a thread that is not the strand; `done`
  // comes there, or from the call. progress: called as it gets on, from any thread; likewise below.
  void Restore(const CheckpointReader& checkpoint, const std::function<void()>& progress, RewindDone done);
  // That FAILED_PRECONDITION alone, before what takes long. From a thread that is not the strand.
  absl::Status CheckGoesBack(const CheckpointReader& checkpoint);
  // The checkpoint's planes and memory become a snapshot of a new run, for GoOnFrom. Errors and thread as above.
  absl::StatusOr<RunFigures> Bring(const CheckpointReader& checkpoint, const std::function<void()>& progress);
  // Before anything else is asked of a new run: it is what was brought of this checkpoint. `restored`: from what, for
  // people; `older`: since newer ones are damaged.
  void GoOnFrom(const RunFigures& figures, const CheckpointWritten& from, std::string restored, bool older);

  // After that: the updates of the survey's steps, over the checkpoint that it goes on from, of base_step; then the
  // journal goes on. DATA_LOSS: it is damaged. From a thread that is not the strand.
  absl::Status Replay(const JournalSurvey& survey, uint64_t base, uint64_t base_step,
                      const std::function<void()>& progress);
  // The state is not what a journal leads to: what is there of one goes.
  void ForgetJournal();

  // `done` once no step is open and the stream has been told all; at once for an idle run.
  void Drain(std::function<void()> done);
  // Whether a step is open now.
  void AskStepOpen(std::function<void(bool)> done);
  // FAILED_PRECONDITION: a trainer is attached, or may come back after a rewind.
  void CheckUnattended(absl::AnyInvocable<void(absl::Status)> done);
  // The strand's answer to that, and that no step is open; then no trainer may attach any more.
  void Close(absl::AnyInvocable<void(absl::Status)> done);
  // A device of the run has failed: what is there is lost. Streams, readers and uploads end with this status, and who
  // comes later is told the same; the memory stays until End.
  void Fail(absl::Status why);
  // Ends streams and readers with this status, waits for the devices, frees all memory. Returns the bytes freed.
  uint64_t End(absl::Status status);

 private:
  // Takes the spec, its texts and the plan out of them.
  explicit Run(Options* options);
  absl::Status Allocate(const Options& options);
  // Where the spec has `follow`.
  void AddFollowers();
  // Why it cannot be followed.
  absl::Status Unfollowed() const;
  // Those that pull and those that follow.
  void EndReaders(const absl::Status& why);
  // What goes on in the run that takes this one's place.
  struct Heritage {
    StepExecutor::Past steps;
    RunStatus status;
    std::vector<std::string> layers;  // of status.layers
    std::unique_ptr<ParameterStore> store;
  };
  // Frees all but the store, which it returns, on the strand; nullptr: not yet, for completions are awaited, or it was
  // done before.
  std::unique_ptr<ParameterStore> EndNow(uint64_t* freed);
  // Waits for the devices, and then does as EndNow.
  std::unique_ptr<ParameterStore> EndWhenIdle(uint64_t* freed);
  // Why it may not be held, or held on.
  absl::Status CheckHold(SessionId session) const;
  absl::Status BeingAmended() const;
  absl::StatusOr<Heritage> HandOver();
  void Inherit(Heritage heritage);
  // What was read of a checkpoint into a place of the ring that is pinned, and is no snapshot yet.
  struct Brought {
    uint64_t id = 0;
    RunFigures figures = {};
  };
  absl::StatusOr<Brought> Read(const CheckpointReader& checkpoint, const std::function<void()>& progress);
  // As in SnapshotRing; UNAVAILABLE: all places are pinned.
  absl::StatusOr<std::optional<uint64_t>> BeginBringing(SnapshotRing::OldestSnapshot oldest);
  SnapshotRing& snapshots() { return driver_->executor().rewinder().snapshots(); }
  PlanBytes LiveBytes() const;
  // On the strand, and waits for it.
  void PostAndWait(absl::FunctionRef<void()> task);
  // Streams, readers and uploads end; nobody may attach any more.
  void Dismiss(const absl::Status& why);
  // As CheckUnattended; OK also of a run that has failed.
  absl::Status Unattended() const;
  // Why nobody may attach.
  absl::Status Gone() const;
  // All but what comes with each message or write.
  void Post(Strand::Task task);
  void Settle();
  absl::StatusOr<AttachReply> ReplyTo(const StepExecutor::AttachOutcome& outcome, bool knows_whole) const;
  void AttachOnStrand(const AttachRequest& request, AttachDone done);
  // Shows the run's state, and whether a rank is held.
  void ShowState();
  void Tick();

  const RunSpec spec_;
  const ChunkSet::Starts chunk_starts_;
  const std::string canonical_spec_;
  const std::string spec_sha256_;
  const Plan plan_;
  const RunStorage storage_;
  const std::vector<std::string> devices_;
  const std::string products_;
  const LayerGroups layers_;
  const uint32_t kept_;  // tensors that come with TakeOver
  RunStatusBoard board_;
  const std::shared_ptr<RunHistory> history_;  // shared by runs that take each other's place
  std::unique_ptr<RunMetrics> metrics_;        // once there is memory for the run

  // The strand's, from here on.
  bool ended_ = false;   // what follows is gone
  bool closed_ = false;  // no Attach any more
  bool held_ = false;    // for another run to take its place
  absl::Status failure_ = absl::OkStatus();
  absl::Status gone_ = absl::OkStatus();           // once nobody may attach any more: why, which latecomers are told
  bool amended_ = false;                           // another run has taken its place
  std::optional<double> unattended_since_s_ = {};  // as in RunStatus
  std::unique_ptr<ParameterStore> store_;
  std::unique_ptr<FollowedSeries> followers_;
  std::unique_ptr<StepDriver> driver_;
  std::unique_ptr<DigestJob> digests_;
  std::unique_ptr<Pulls> pulls_;
  std::unique_ptr<WeightLoader> loader_;
  Strand strand_;  // last: nothing above is gone while its thread runs
};

}  // namespace ballast
