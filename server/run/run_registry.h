// The runs of a daemon: who may be created, on which of its devices, who is there. Creations and deletions are decided one
// after another on a strand of their own, so admission is decided once, against what is really reserved. What takes long,
// a run's memory, reading and writing it, goes on aside: what is asked for with that run waits for it (run_turns.h), with
// others it does not. When a device fails, its runs fail, and those on others go on.
//
// Thread-safe. Callbacks come on that strand, or from the call itself.
#pragma once

#include <atomic>
#include <cstdint>
#include <functional>
#include <map>
#include <memory>
#include <optional>
#include <string>
#include <string_view>
#include <thread>
#include <utility>
#include <vector>

#include "absl/base/thread_annotations.h"
#include "absl/functional/any_invocable.h"
#include "absl/status/statusor.h"
#include "absl/strings/string_view.h"
#include "absl/synchronization/mutex.h"

#include "server/access/quotas.h"
#include "server/device/device_pool.h"
#include "server/run/run.h"
#include "server/run/run_turns.h"
#include "server/run/sessions.h"
#include "server/storage/checkpoint_reader.h"
#include "server/storage/storage.h"

namespace ballast {

class RunRegistry {
 public:
  struct Created {
    std::shared_ptr<Run> run;
    bool created = false;
  };
  // How another spec under the same id differs, in words; given by the edge, which can read canonical specs.
  using Difference = std::function<std::string(const std::string& existing, const std::string& asked)>;
  struct CreateRequest {
    RunSpec spec;
    std::string canonical_spec;
    std::string spec_sha256;
    Difference difference;
    Payer payer = {};  // whose run it is, and whose quota it must fit
  };
  struct Options {
    DevicePool* devices = nullptr;
    Metrics* metrics = nullptr;
    Sessions* sessions = nullptr;
    Quotas* quotas = nullptr;  // where requests have payers
    uint32_t max_runs = 16;
    bool tells_of_all = true;  // errors name the runs that there are; not where callers may not know of each other's
    double idle_run_timeout_s = 0;  // a run without a trainer is deleted after so long; 0: it is not
    std::function<void(const absl::Status&)> on_last_failure = nullptr;  // no device is left, for this last reason
    // Where runs are written to, as the edge says: none, they end with the daemon. Outlives the registry.
    Storage* storage = nullptr;
    const CheckpointCodec* codec = nullptr;
    // What would create the run of a spec.json, of this hash; given by the edge. `file` is for messages.
    std::function<absl::StatusOr<CreateRequest>(const std::string& spec_json, const std::string& sha256,
                                                const std::string& file)>
        read_spec = nullptr;
  };

  explicit RunRegistry(Options options);
  ~RunRegistry();  // ends every run

  void Create(CreateRequest request, absl::AnyInvocable<void(absl::StatusOr<Created>)> done);
  // Another spec for a run that exists, from a session of it, between two steps.
  struct AmendRequest {
    RunSpec spec;
    std::string canonical_spec;
    std::string spec_sha256;
    SessionId session = {};
    // Whether the spec may take the place of this canonical one; given by the edge.
    std::function<absl::Status(const std::string& existing)> check;
    // Whether nobody waits for the answer any more, asked when the run could be amended: then it is not, since whoever
    // asked for it would be missed when the weights of what is added are due. Thread-safe.
    std::function<bool()> abandoned;
    Payer payer = {};
  };
  struct Amended {
    std::shared_ptr<Run> run;  // with the spec asked for
    bool amended = false;      // it had another one
    uint32_t tensors_added = 0;
    Run::Taken taken = {};
  };
  // All or nothing: with an error the run goes on as it was. Waits as Run::Hold does. RESOURCE_EXHAUSTED says what is
  // needed, also while both are there, and what is free.
  void Amend(AmendRequest request, absl::AnyInvocable<void(absl::StatusOr<Amended>)> done);
  struct DeleteMode {
    bool force = false;             // also while a trainer is attached, or on fewer daemons than the run is on
    bool keep_checkpoints = false;  // they stay on the disk, and Restore brings the run back
    uint32_t daemons = 0;           // on so many the caller deletes it; 0: not told
  };
  // Of a run that is only on disk, and whose checkpoints are not to be kept, these.
  void Delete(std::string run_id, DeleteMode mode, absl::AnyInvocable<void(absl::StatusOr<uint64_t> freed_bytes)> done);

  // Whether there is storage: then every run is written to it, as its spec says.
  bool has_storage() const { return options_.storage != nullptr; }
  // Creates the runs that are on the disk, as far as there is room, each as its newest checkpoint that is whole says. To
  // be called once, before anybody else can ask for a run.
  void RestoreAll();
  struct Checkpointed {
    uint64_t step = 0;
    uint64_t number = 0;  // in its run
    std::string folder = {};
    uint64_t bytes = 0;
    double seconds = 0;
  };
  // Writes the run's last closed step, and is done when it is published. Where that step is durable already, this is
  // answered at once, and where it is being written, with that. A rank asks between two steps, when others may have
  // begun the next one, which cannot close without it: so a step that is open is waited for only if it has updated
  // something. FAILED_PRECONDITION: there is no storage, no step has closed, or the step was undone meanwhile; else what
  // the disk said.
  void Checkpoint(std::string run_id, absl::AnyInvocable<void(absl::StatusOr<Checkpointed>)> done);
  struct StoredCheckpoint {
    uint64_t number = 0, step = 0, generation = 0, bytes = 0;
    std::string folder = {}, written_at = {};
    std::string state = {};  // newest; kept; discarded; damaged: and why
  };
  // Ascending by number; also of a run that is only on disk. Reads the disk. NOT_FOUND as Find; FAILED_PRECONDITION: there
  // is no storage.
  absl::StatusOr<std::vector<StoredCheckpoint>> Checkpoints(const std::string& run_id) const;
  // Ends all sessions and goes back to the checkpoint of that step; later ones are discarded. A run that is only on disk
  // is created from it. FAILED_PRECONDITION names the steps that there are, or says what becomes of a later step than the
  // run's; DATA_LOSS: it is damaged. Either way the run goes on.
  void Restore(std::string run_id, uint64_t step, Payer payer, absl::AnyInvocable<void(absl::StatusOr<Rewound>)> done);

  // The same with a checkpoint from beneath storage.import_dir, in two parts. The first reads all of it, which may take
  // minutes, on the caller's thread, and changes nothing; it ends when the daemon does. Errors as of ExamineImported;
  // FAILED_PRECONDITION also: it is of another run.
  absl::StatusOr<CheckpointReader> Examine(const std::string& run_id, const std::string& from, uint64_t step) const;
  // The run, which is created where it is not there, becomes what the checkpoint says, and is written to storage.dir as
  // that. FAILED_PRECONDITION: it has another spec, which differs in what is named.
  void RestoreFrom(std::string run_id, CheckpointReader checkpoint, Payer payer,
                   absl::AnyInvocable<void(absl::StatusOr<Rewound>)> done);

  // storage.on_published has come to this for a checkpoint of the run, if it is still there.
  void OnCopied(const std::string& run_id, std::string_view result);

  // NOT_FOUND, with those that there are; UNAVAILABLE once they end with the daemon.
  absl::StatusOr<std::shared_ptr<Run>> Find(absl::string_view run_id) const;
  std::vector<std::shared_ptr<Run>> All() const;  // by id
  uint32_t max_runs() const { return options_.max_runs; }
  bool draining() const;

  // No new runs or steps; waits for the open steps. Returns how many were left open.
  int Drain(double timeout_s);
  // Whether the last step of every run was written by Drain, where there is storage.
  bool wrote_all() const { return wrote_all_; }
  // For how long the strand busiest now has been at one task.
  double busy_s() const;
  // Ends every run with this status.
  void End(const absl::Status& status);

 private:
  // What a run that is created goes on from, other than its newest checkpoint on the disk.
  struct Origin {
    std::optional<uint64_t> only = std::nullopt;              // the checkpoint of this number, if it is on the disk
    std::optional<CheckpointReader> imported = std::nullopt;  // this one, of the request's spec, from elsewhere
    Payer payer = {};                                         // who has it restored
  };
  // A run that has been admitted, and what it is made of: read alone, but for `made`, which whoever builds it sets.
  struct Making {
    CreateRequest request = {};
    Plan plan = {};
    std::shared_ptr<RunFolder> folder = nullptr;
    std::vector<CheckpointReader> candidates = {};  // newest first
    std::vector<absl::Status> damaged = {};
    bool replays = false;  // goes on from its journal, too
    absl::StatusOr<std::shared_ptr<Run>> made = absl::UnknownError("");
  };
  // The run that is there, or why there can be none; none: it is to be made.
  std::optional<absl::StatusOr<Created>> Existing(const CreateRequest& request) const;
  absl::StatusOr<Created> CreateNow(CreateRequest request);
  // The same aside, of a run that is not there.
  void MakeAside(CreateRequest request, Origin origin, absl::AnyInvocable<void(absl::StatusOr<Created>)> done);
  // Admits and reserves; makes, on any thread; has it or gives the room back.
  absl::StatusOr<std::shared_ptr<Making>> Prepare(CreateRequest request, Origin origin);
  absl::StatusOr<std::shared_ptr<Run>> Build(const Making& making);
  absl::StatusOr<Created> Publish(Making* making);
  // On the strand, when nothing is under way with the run.
  void InTurn(std::string run_id, RunTurns::Task task);
  // On a thread of its own, and on the strand `then`; in between, what is asked for with the run waits.
  void WorkAside(const std::string& run_id, RunTurns::Task work, RunTurns::Task then);
  // Where it may be created.
  absl::StatusOr<Placement> Admit(const RunSpec& spec) const;
  absl::StatusOr<Placement> AdmitMemory(const RunSpec& spec) const;
  // "5 bytes (weights 2, ...)".
  static std::string DescribeBytes(const PlanBytes& b);
  // What the devices have free, for a refusal.
  std::string DescribeRoom() const;
  absl::Status AdmitSeries(const RunSpec& spec) const;
  // `done` is called at the latest when the run has been held.
  void HoldAndAmend(AmendRequest request, absl::AnyInvocable<void(absl::StatusOr<Amended>)> done);
  // Of a run that is held.
  absl::StatusOr<Amended> AmendNow(AmendRequest request, const std::shared_ptr<Run>& run);
  absl::Status AdmitAmended(const RunSpec& spec, const Plan& plan, const Run& run) const;
  absl::Status AdmitOneMore(const RunSpec& spec) const;
  // Whether the payer's quota has room for the run; or, where it is amended, for its new spec.
  absl::Status AdmitQuota(const Payer& payer, const RunSpec& spec, bool amends) const;
  // The run counts for the payer from now on, unless it counts for somebody.
  void Claim(const std::string& run_id, const Payer& payer);
  struct Counted {
    std::string run_id;
    uint64_t bytes = 0;
  };
  // Other runs that count for the payer, also while they are made.
  std::vector<Counted> OthersOf(const Payer& payer, const std::string& run_id) const;
  // FAILED_PRECONDITION: the devices do not have a rule of the run's.
  absl::Status AdmitRules(const RunSpec& spec) const;
  using Deleted = absl::AnyInvocable<void(absl::StatusOr<uint64_t> freed_bytes)>;
  // Waits for no disk: `done` comes on the strand, when what the run has is written.
  void DeleteNow(const std::string& run_id, DeleteMode mode, Deleted done);
  absl::StatusOr<uint64_t> DeleteStored(const std::string& run_id, DeleteMode mode, absl::Status unknown);
  // Of a run of which nothing is left to be written.
  absl::StatusOr<uint64_t> DeleteWritten(const std::shared_ptr<Run>& run, DeleteMode mode);
  // Those that no trainer has come to for idle_run_timeout_s.
  void DeleteIdle();
  void Expire(const std::shared_ptr<Run>& run, double idle_s);
  void Tick();
  uint64_t Remove(const std::shared_ptr<Run>& run);
  // NOT_FOUND: the run is no more. UNAVAILABLE: another one has its name since.
  absl::Status CheckThere(const Run& run) const;
  // Those that a new run may go on from, newest first. FAILED_PRECONDITION: they are of another spec.
  absl::StatusOr<std::vector<CheckpointReader>> Candidates(const CreateRequest& request, std::optional<uint64_t> only,
                                                           std::vector<absl::Status>* damaged);
  // The new run becomes what the first of them says that can be read. DATA_LOSS: none can.
  // replays: and from its journal; else what is there of one goes.
  absl::Status ReplayJournalOf(const CheckpointReader& checkpoint, uint64_t base, Run* run);
  absl::Status GoOnFromNewest(const std::vector<CheckpointReader>& candidates, bool replays,
                              std::vector<absl::Status> damaged, Run* run);
  absl::Status RestoreFromDisk(const std::string& run_id);
  // Where a checkpoint was to be read for the run, and this came of it.
  static void CountDamage(const absl::Status& status, Run* run);
  // In the metrics: of a run that cannot be restored.
  void ShowLost(const std::string& run_id, const absl::Status& why) const;
  absl::StatusOr<CreateRequest> RequestOf(const CheckpointReader& checkpoint) const;
  // Of the newest checkpoint that says what run it is of; whether its planes can be read is seen later. None: there is none.
  absl::StatusOr<std::optional<CreateRequest>> NewestRequest(const std::string& run_id) const;
  // A run that is, in memory, as a checkpoint says.
  struct Restored {
    std::shared_ptr<Run> run;
    uint64_t step = 0;
    bool lived = false;
  };
  void RestoreNow(const std::string& run_id, uint64_t step, const Payer& payer, RewindDone done);
  void RestoreImported(const std::string& run_id, CheckpointReader checkpoint, const Payer& payer, RewindDone done);
  // Its number, too.
  absl::StatusOr<CheckpointReader> OpenOfStep(const std::string& run_id, uint64_t step, uint64_t* number) const;
  // Of the run that lives, or is created of it.
  void RestoreOf(const std::string& run_id, const CheckpointReader& checkpoint, Origin origin, RewindDone done);
  // On any thread.
  absl::Status RestoreLiving(const CheckpointReader& checkpoint, Run* run);
  // Waits for no disk: `done` comes on the strand.
  void MakeNewest(Restored restored, RewindDone done);
  absl::StatusOr<Rewound> EndRestore(const Restored& restored);
  // What the run has that is not on the disk, before it goes. `force`: also while a trainer is attached. Waits for no disk:
  // `done` comes on the strand.
  void WriteLast(const std::shared_ptr<Run>& run, bool force, absl::AnyInvocable<void(absl::Status)> done);
  RunStorage StorageOf(const std::shared_ptr<RunFolder>& folder) const;
  absl::Status NoStorage() const;
  // Says that what is being read back gets on: it may take minutes.
  std::function<void()> Progress();
  // Writes what is not on the disk of all runs, and waits for it. Says at last of which it could not be written.
  void CheckpointAll();
  void ShowMemory() const;
  // The room on the disk, where there is storage.
  void ShowStorage();
  void OnDeviceFailed(size_t device, const absl::Status& why);
  static void FailWith(const absl::Status& why, Run* run);

  const Options options_;
  mutable absl::Mutex mu_;
  std::map<std::string, std::shared_ptr<Run>, std::less<>> runs_ ABSL_GUARDED_BY(mu_);
  bool draining_ ABSL_GUARDED_BY(mu_) = false;
  size_t working_ ABSL_GUARDED_BY(mu_) = 0;  // threads, until they have been heard
  std::atomic<bool> wrote_all_ = true;
  bool room_unknown_ = false;  // the log was told so; on the strand
  // Whose runs they are where there is no access file: of those that were created, or asked for, since the daemon
  // started. On the strand.
  std::map<std::string, std::string> payers_;
  // Idle runs that are being written, or could not be. On the strand.
  struct Expiry {
    bool under_way = false;
    double not_before_s = 0;  // is it tried again
  };
  std::map<std::string, Expiry> expiries_;
  // On the strand: what is under way, by run.
  RunTurns turns_;
  std::map<std::string, std::shared_ptr<const Making>> making_;
  std::map<std::string, std::thread> threads_;
  Strand strand_;
};

}  // namespace ballast
