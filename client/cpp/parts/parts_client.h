// ballast::Client of a run that is on several daemons, each of which owns a part of it: a client for each daemon, and what
// holds the parts together. client.h says what the calls do, and proto/PROTOCOL.md, "Several daemons", what is said to whom.
//
// Threads: as client.h says. A thread of its own waits for the parts' answers to MeasureStep and EndStep, and brings a
// staged step's verdict; uploads, pulls and attachments go to all daemons side by side, on threads that end with the call.
#pragma once

#include <cstdint>
#include <deque>
#include <functional>
#include <future>
#include <memory>
#include <optional>
#include <set>
#include <string>
#include <thread>
#include <vector>

#include "absl/base/thread_annotations.h"
#include "absl/synchronization/mutex.h"
#include "absl/time/time.h"

#include "client/cpp/client.h"
#include "client/cpp/daemon_client.h"
#include "client/cpp/parts/for_all.h"
#include "client/cpp/parts/part_placement.h"
#include "client/cpp/parts/shared_checkpoint.h"
#include "client/cpp/wire/step_limits.h"

namespace ballast {

class PartsClient final : public Client {
 public:
  static absl::StatusOr<std::unique_ptr<Client>> Connect(ClientOptions options, std::vector<std::string> servers);
  ~PartsClient() override;

  const std::string& server() const override;
  absl::StatusOr<v1::CreateRunResponse> CreateRun(const v1::RunSpec& spec) override;
  absl::StatusOr<v1::GetServerResponse> GetServer() override;
  absl::StatusOr<v1::ListRunsResponse> ListRuns() override;
  absl::StatusOr<v1::GetRunResponse> GetRun(const std::string& run_id) override;
  absl::StatusOr<v1::GetHistoryResponse> GetHistory(const std::string& run_id, uint64_t after_step,
                                                    uint32_t most) override;
  absl::StatusOr<v1::DeleteRunResponse> DeleteRun(const std::string& run_id, bool force,
                                                  bool keep_checkpoints) override;
  absl::StatusOr<v1::RunPlan> Plan(const v1::RunSpec& spec) override;
  absl::StatusOr<v1::AmendRunResponse> AmendRun(const v1::RunSpec& spec) override;
  absl::StatusOr<v1::RewindResponse> Rewind(const v1::RewindRequest& request) override;
  absl::StatusOr<v1::CheckpointResponse> Checkpoint(const std::string& run_id) override;
  absl::StatusOr<v1::TagVersionResponse> TagVersion(const v1::TagVersionRequest& request) override;
  absl::Status UntagVersion(const std::string& run_id, const std::string& name) override;
  absl::StatusOr<v1::ListVersionsResponse> ListVersions(const std::string& run_id) override;
  absl::Status PullVersion(const v1::PullRequest& request,
                           const std::function<absl::Status(const ServedPiece&)>& sink) override;
  absl::StatusOr<v1::ListCheckpointsResponse> ListCheckpoints(const std::string& run_id) override;
  absl::StatusOr<v1::RestoreResponse> Restore(const std::string& run_id, uint64_t step,
                                              const std::string& from) override;
  absl::StatusOr<Attachment> Attach(const AttachOptions& options) override;
  void Detach() override;
  absl::StatusOr<std::vector<uint64_t>> LoadWeights(absl::Span<const TensorView> tensors, bool replace,
                                                    const std::function<void(uint64_t bytes)>& sent) override;
  absl::Status Pull(const std::string& run_id, absl::Span<const uint32_t> tensors,
                    const std::function<absl::Status(uint32_t tensor, uint64_t offset_bytes,
                                                     absl::Span<const std::byte> piece, uint64_t step)>& sink,
                    uint64_t snapshot, absl::Span<const uint64_t> digests, const Shards& shards) override;
  absl::Status PullServed(const std::string& run_id, absl::Span<const uint32_t> tensors,
                          const std::function<absl::Status(const ServedPiece&)>& sink, uint64_t snapshot,
                          absl::Span<const uint64_t> digests, const Shards& shards) override;
  absl::Status PullState(const std::string& run_id, absl::Span<const uint32_t> tensors,
                         absl::Span<const std::string> slots,
                         const std::function<absl::Status(const ServedPiece&)>& sink, uint64_t snapshot,
                         const Shards& shards, std::optional<double> average) override;
  absl::Status BindWeights(uint32_t tensor, void* destination, uint64_t bytes) override;
  absl::Status BindServed(uint32_t tensor, void* codes, uint64_t bytes, absl::Span<float> scales) override;
  absl::Status BeginStep(const StepValues& values) override;
  absl::Status Push(uint32_t tensor, absl::Span<const std::byte> gradient) override;
  absl::Status EndMicro(std::optional<double> loss, bool next_is_last) override;
  std::future<absl::StatusOr<MeasuredStep>> MeasureStep(std::optional<double> loss) override;
  std::future<absl::StatusOr<StepResult>> EndStep(std::optional<double> loss, const StepEndValues& values) override;
  absl::StatusOr<bool> AwaitWeights(uint32_t tensor, double timeout_s) override;
  uint64_t step() const override;
  bool shares_gpu() const override;
  absl::Status status() const override;

 private:
  // What is known of the run that the client last had to do with.
  struct Whole {
    std::string run_id;
    PartPlacement placement;
    v1::RunSpec spec;
    StepLimits limits;
    bool staged() const { return spec.commit() == v1::COMMIT_MODE_STAGED; }
  };
  // From BeginStep to the result of EndStep.
  struct Step {
    bool asked = false;                          // MeasureStep has reached the daemons' clients
    bool ended = false, done = false;            // EndStep was called, and has its result; guarded by mu_
    std::optional<v1::WholeMeasure> whole = {};  // the thread's own, once all parts are measured
  };
  // What is wanted of one daemon, by its own numbers.
  struct Picked {
    std::vector<uint32_t> tensors;
    std::vector<uint64_t> digests;
    Shards shards;
  };
  // `numbers`: of the part's tensors in the run. `one_at_a_time`: for the caller's sink.
  using PullPart = std::function<absl::Status(uint32_t part, const Picked& picked, const std::vector<uint32_t>& numbers,
                                              absl::Mutex* one_at_a_time)>;
  using MeasureFutures = std::vector<std::future<absl::StatusOr<MeasuredStep>>>;
  using ResultFutures = std::vector<std::future<absl::StatusOr<StepResult>>>;

  PartsClient(ClientOptions options, std::vector<std::string> servers,
              std::vector<std::unique_ptr<DaemonClient>> daemons);

  uint32_t parts() const { return static_cast<uint32_t>(daemons_.size()); }
  // What each daemon answers, or the first error, which names the daemon.
  template <typename T, typename Call>
  absl::StatusOr<std::vector<T>> AskAll(const Call& call) const {
    return AllOrError(ForAll(parts(), [&](uint32_t part) -> absl::StatusOr<T> { return call(part, *daemons_[part]); }),
                      names_);
  }
  void Log(const std::string& line) const { daemons_[0]->Log(line); }

  // --- runs (parts_client.cc)
  // FAILED_PRECONDITION: a daemon has lost its part of a run that another has trained.
  absl::StatusOr<std::vector<v1::GetRunResponse>> AskRuns(const std::string& run_id) const;
  absl::Status CheckNoneLost(const std::string& run_id,
                             absl::Span<const absl::StatusOr<v1::GetRunResponse>> runs) const;
  // Of a part, in place: what all say of the run.
  void OfWhole(v1::RunStatus* run);
  // Takes the specs out of what each daemon says of the run.
  static absl::StatusOr<Whole> TakeWhole(std::vector<v1::GetRunResponse>* runs);
  // The parts: first those where the session may have ended, then those on the daemons with the least memory free.
  std::vector<uint32_t> LikelyRefusersFirst(absl::Span<const v1::RunSpec> specs);
  absl::StatusOr<Whole> Look(const std::string& run_id) const;
  absl::StatusOr<PartPlacement> PlaceNew(const v1::RunSpec& spec);
  absl::Status CheckCreated(const std::string& run_id, const std::vector<absl::StatusOr<v1::CreateRunResponse>>& made);
  void Undo(const std::string& run_id, const std::vector<absl::StatusOr<v1::CreateRunResponse>>& made);

  // --- snapshots and checkpoints (parts_client_checkpoints.cc)
  // FAILED_PRECONDITION names a daemon that has no checkpoint of the step.
  absl::Status CheckAllHave(const std::string& run_id, uint64_t step);
  // The last step that no crash of any daemons, or of all, undoes; 0: none is known. `statuses`: of each daemon's part.
  uint64_t DurableStep(const v1::RunSpec& spec, absl::Span<const v1::RunStatus> statuses);
  // The steps of which the daemon has a checkpoint that is whole.
  absl::StatusOr<std::set<uint64_t>> CheckpointsOf(uint32_t part, const std::string& run_id);

  // --- versions with names (parts_client_tags.cc)
  absl::StatusOr<std::vector<v1::ListVersionsResponse>> VersionsOfParts(const std::string& run_id) const;
  // As TagVersion, of who is none of the run's ranks, which go on meanwhile.
  absl::StatusOr<v1::TagVersionResponse> TagBeside(const v1::TagVersionRequest& request);
  // As OrdersOfTag (part_tags.h). `given`: by part, whether it has the name by now; ABORTED: the run has gone on.
  absl::StatusOr<v1::TagVersionResponse> TagAll(const v1::TagVersionRequest& request, uint64_t ahead,
                                                std::vector<bool>* given);

  // --- weights (parts_client_weights.cc)
  absl::StatusOr<PartPlacement::Place> PlaceOf(const char* call, uint32_t tensor) const;
  static std::vector<Shards> SplitShards(const PartPlacement& placement, const Shards& shards);
  static absl::StatusOr<std::vector<Picked>> Pick(const PartPlacement& placement, absl::Span<const uint32_t> tensors,
                                                  absl::Span<const uint64_t> digests, const Shards& shards);
  // `pull` of each daemon that has something of what is wanted, side by side.
  absl::Status PullParts(const std::string& run_id, absl::Span<const uint32_t> tensors,
                         absl::Span<const uint64_t> digests, const Shards& shards, const PullPart& pull);

  // --- attaching (parts_client_attach.cc)
  absl::StatusOr<std::vector<Attachment>> AttachAll(const AttachOptions& options);
  absl::StatusOr<Attachment> AttachPart(uint32_t part, AttachOptions options);
  // By part; none: it finishes a step with what the rank's last process sent.
  using Attachments = std::vector<std::optional<Attachment>>;
  // To all; waits for parts that finish a step.
  absl::Status AttachEach(const AttachOptions& options, Attachments* attachments);
  // To the parts that have none yet. `finishing`: what one of those says that have none afterwards; OK: all have one.
  absl::Status AttachMissing(const AttachOptions& options, const std::vector<uint64_t>& from_steps,
                             Attachments* attachments, absl::Status* finishing);
  // What some parts finish so the rank cannot make on the others: these close it.
  absl::Status CloseBesides(const std::string& run_id, std::vector<uint64_t>* from_steps, Attachments* attachments);
  Attachment OnAttached(const std::vector<Attachment>& attachments);
  Attachment Merge(const std::vector<Attachment>& attachments) const;
  // Brings daemons that are at different steps together: closes a step that some have closed already, or takes the run
  // back to one whose state all have. True: the rank is to attach anew.
  absl::StatusOr<bool> CloseBehind(const AttachOptions& options, uint64_t next, std::vector<Attachment>* attachments);
  absl::StatusOr<bool> Align(const AttachOptions& options, std::vector<Attachment>* attachments);
  bool GoBackIfTorn(const Attachment& whole, const std::vector<Attachment>& attachments);
  absl::Status GoBack(const std::string& run_id, uint64_t at_most);
  absl::Status TakeBack(const std::string& run_id, uint64_t step, const std::vector<v1::RunStatus>& statuses);
  absl::Status NoCommonStep(const std::string& run_id, const std::vector<std::set<uint64_t>>& kept) const;
  absl::Status AwaitAligned(const AttachOptions& options);
  // By part, the steps whose state it has: the last that closed, snapshots, checkpoints.
  absl::StatusOr<std::vector<std::set<uint64_t>>> StepsKept(const std::string& run_id,
                                                            std::vector<v1::RunStatus>* statuses);

  // --- steps (parts_client_step.cc)
  absl::Status CheckOpen(const char* call) const;
  absl::Status AwaitConnected() const;
  // That all daemons are at the same step; else the client has failed as after a rewind.
  absl::Status CheckSameStep();
  absl::StatusOr<MeasureFutures> AskMeasures(std::optional<double> loss);
  absl::StatusOr<ResultFutures> SendEnds(std::optional<double> loss, StepEndValues values);
  bool CheckpointIsDue();
  // On the thread.
  absl::StatusOr<MeasuredStep> TakeMeasures(Step* step, MeasureFutures* futures);
  absl::StatusOr<StepResult> EndStaged(Step* step, MeasureFutures* measures, std::optional<double> loss,
                                       StepEndValues values);
  absl::StatusOr<StepResult> TakeResults(const Step& step, ResultFutures* futures);
  // As DurableStep, when a step closes: sets it in the run's result, by what each daemon told.
  void TellDurable(const std::vector<v1::StepResult>& told, v1::StepResult* whole);
  // True: it has taken the run back.
  bool GoBackIfTorn(const v1::StepResult& whole, const std::vector<v1::StepResult>& told);
  void Finish(Step* step, absl::StatusOr<StepResult> result, std::promise<absl::StatusOr<StepResult>>* promise);
  template <typename T, typename IsEnough>
  absl::StatusOr<std::vector<T>> AwaitAll(std::vector<std::future<absl::StatusOr<T>>>* futures,
                                          const IsEnough& is_enough);

  void Fail(const absl::Status& status);
  void Work();
  void Post(std::function<void()> task);
  void Drain();  // what the thread does is given up

  const ClientOptions options_;
  const std::vector<std::string> names_;  // of the daemons: their addresses
  const std::vector<std::unique_ptr<DaemonClient>> daemons_;
  Whole whole_;
  std::vector<std::string> tensor_names_;  // of the run that is attached to
  bool attached_ = false;
  uint32_t rank_ = 0;
  std::vector<bool> held_;  // by part: a session of this client's own may hold the rank there
  std::shared_ptr<Step> step_;

  // When a checkpoint by time was last asked for, and at which step. Between EndStep and its result the thread's own.
  absl::Time checkpoint_at_ = absl::InfiniteFuture();
  uint64_t checkpoint_step_ = 0;
  uint64_t durable_step_ = 0;
  SharedCheckpoint shared_checkpoint_;  // likewise

  mutable absl::Mutex mu_;
  absl::Status status_ ABSL_GUARDED_BY(mu_);    // why the client failed although its daemons' clients have not
  bool ends_sent_ ABSL_GUARDED_BY(mu_) = true;  // EndStep has reached the daemons' clients
  bool leaving_ ABSL_GUARDED_BY(mu_) = false;
  bool stopping_ ABSL_GUARDED_BY(mu_) = false;  // what the thread does is to be given up
  bool working_ ABSL_GUARDED_BY(mu_) = false;
  std::deque<std::function<void()>> tasks_ ABSL_GUARDED_BY(mu_);
  std::thread worker_;
};

}  // namespace ballast
