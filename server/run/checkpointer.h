// Writes a run's checkpoints: says after which steps one is due, keeps the snapshot that it is made of until it is on the
// disk, and knows which step is durable. Steps go on meanwhile; one checkpoint is written at a time.
//
//   if (checkpointer.Due(step)) { ring.Begin(memory); checkpointer.OnBegun(ring.last_id()); }
//   checkpointer.Ask(Trigger::kRequest, [](auto written) {...});    // as soon as a step has closed
//
// A checkpoint of steps that a rewind undoes is set aside before the rewind is answered, so that a crash does not bring
// them back. Where there is none of an earlier step, one of the state that the rewind has led to is written before
// that: there is always one that counts. What is replaced without a step (LoadState, AmendRun) is written as soon as it
// can be: until then a crash would bring back what it replaced.
//
// Strand-confined. Each `done` is called once, on the strand.
#pragma once

#include <atomic>
#include <cstdint>
#include <functional>
#include <memory>
#include <optional>
#include <string>
#include <string_view>
#include <vector>

#include "absl/base/thread_annotations.h"
#include "absl/functional/any_invocable.h"
#include "absl/status/statusor.h"
#include "absl/synchronization/mutex.h"

#include "server/base/strand.h"
#include "server/run/checkpoint_content.h"
#include "server/run/checkpointed_run.h"
#include "server/storage/checkpoint_writer.h"
#include "server/storage/run_folder.h"
#include "server/store/snapshot_ring.h"

namespace ballast {

// What a daemon with storage gives a run for its checkpoints. What is pointed to outlives the run.
struct RunStorage {
  Fs* fs = nullptr;
  DiskThreads* threads = nullptr;
  RateLimit* rate = nullptr;
  const CheckpointCodec* codec = nullptr;
  std::shared_ptr<RunFolder> folder = {};
  std::function<void(double seconds)> on_journal_sync = [](double) {};  // thread-safe
};

// What had a checkpoint written; the metrics' words.
enum class CheckpointTrigger { kInterval, kRequest, kDrain };
std::string_view TriggerName(CheckpointTrigger trigger);

// How one went.
struct CheckpointReport {
  CheckpointTrigger trigger = CheckpointTrigger::kInterval;
  uint64_t step = 0;
  absl::StatusOr<CheckpointWritten> written = CheckpointWritten{};
  double snapshot_seconds = 0;  // from the step's close until its image was whole
  double stall_seconds = 0;     // SnapshotRing::PinnedStallSeconds
};

class Checkpointer {
 public:
  using Done = absl::AnyInvocable<void(absl::StatusOr<CheckpointWritten>)>;
  // What is pointed to outlives the checkpointer.
  struct Environment {
    const RunSpec* spec;
    const std::string* canonical_spec;
    std::string spec_sha256;
    Strand* strand;
    const ParameterStore* store;
    SnapshotRing* snapshots;
    RunStorage storage;
    std::function<RunFigures()> figures;
    std::function<void(bool writing)> on_writing;
    std::function<void(uint64_t step)> on_begun;  // before on_writing
    std::function<void(const CheckpointReport& report)> on_written;
    std::function<void(bool published)> on_over;  // after on_written, which one that was given up has not
    // Another step is, and none was written: a rewind took it back. Of step 0: none is.
    std::function<void(const CheckpointWritten& newest)> on_durable;
    std::function<void()> on_wanted;  // WantsNow may be
  };
  explicit Checkpointer(Environment environment);

  // Whether a step that closes now is to be written, if there is a place for its snapshot.
  bool Due(uint64_t step) const;
  // Its snapshot is the one with this id, which has begun.
  void OnBegun(uint64_t snapshot);
  // `done` when the state that there is, or a later one, is durable: at once, if it is. set_closed comes before.
  void Ask(CheckpointTrigger trigger, Done done);
  // Whether the state that there is now, with no step open, is to be written: somebody has asked, it was replaced, or
  // nothing came after it for too long.
  bool WantsNow() const;
  // To be asked by WantsNow: that step `closed` is the last.
  void set_closed(uint64_t closed) { closed_ = closed; }
  // One is to be begun as soon as it can be.
  void Want() { wanted_ = true; }
  // In a part of a run: the checkpoint of this step, which all parts have, stays until another is named.
  void Keep(uint64_t step) { kept_step_ = step; }
  // Of the newest checkpoint; 0: there is none, or it is not known.
  uint64_t checkpoint_step() const { return last_.place.step == durable_step_ ? durable_step_ : 0; }
  // The state is no longer what the last closed step left.
  void OnReplaced() { replaced_ = true; }
  // No checkpoint of a later step is to come back. What is being written of them is given up.
  void OnRewound(uint64_t to_step);
  // `done` when none of them can come back any more; an error: they may.
  void WhenSetAside(absl::AnyInvocable<void(absl::Status)> done);
  // The run is what this checkpoint says.
  void OnRestored(CheckpointWritten from);
  // Gives up what is being written, and answers all. Whatever is asked afterwards is answered so, too.
  void End(const absl::Status& status);
  // Waits until the writer has let go of the run, and has told the strand so. From a thread that is not the strand.
  void WaitWritten();

  uint64_t durable_step() const { return durable_step_; }  // 0: none
  bool writing() const { return writing_.has_value(); }
  bool at_writer() const;  // as WaitWritten waits for
  void set_durable_step(uint64_t step) { durable_step_ = step; }

 private:
  struct Writing {
    uint64_t snapshot = 0;
    uint64_t step = 0;
    CheckpointTrigger trigger = CheckpointTrigger::kInterval;
    std::vector<Done> waiting = {};
    double began_s = 0;
    double snapshot_seconds = 0;
    double stall_seconds = 0;
    uint64_t replaces = 0;  // the number of the one that has the same state; 0: none
    std::shared_ptr<std::atomic<bool>> cancelled = std::make_shared<std::atomic<bool>>(false);
  };
  // 0: not by time, or, in a part of a run, when a rank says so, at the same step in all parts.
  double EveryS() const;
  void OnSaved(uint64_t snapshot, bool saved);
  void OnWritten(absl::StatusOr<CheckpointWritten> written);
  // On the strand, when the writer comes to it.
  void PostFromWriter(Strand::Task task);
  void BeginAtWriter();
  // Checkpoints of undone steps, which count until there is another.
  struct Undone {
    uint64_t after_step = 0;
    uint64_t last_number = 0;
    bool told = false;  // the log says that they may come back
  };
  void SetAsideAtWriter(const Undone& undone);
  void OnSetAside(uint64_t to_step, const absl::StatusOr<CheckpointWritten>& newest);
  void OnAllUndone(const Undone& undone);
  void OnWrittenSince(const absl::Status& written);  // while there are such
  void OnNotSetAside(uint64_t to_step, const absl::Status& why);
  void AnswerSetAside();

  const Environment environment_;
  CheckpointWriter writer_;
  absl::Status ended_;
  int setting_aside_ = 0;  // tasks that the writer was given for that
  std::optional<Undone> undone_;
  absl::Status aside_;  // an error: some undone step would come back
  std::vector<absl::AnyInvocable<void(absl::Status)>> when_set_aside_;
  std::optional<Writing> writing_;
  std::vector<Done> asked_;
  CheckpointTrigger trigger_ = CheckpointTrigger::kInterval;  // of asked_
  bool replaced_ = false;
  uint64_t kept_step_ = 0;
  bool wanted_ = false;
  uint64_t closed_ = 0, durable_step_ = 0, begun_step_ = 0;
  CheckpointWritten last_;  // that is durable_step_'s, if its step says so
  double last_begun_s_;
  // Orders and tasks of which the strand has not been told. Shared, since the last of them may outlive the checkpointer
  // by a moment.
  struct AtWriter {
    absl::Mutex mu;
    int count ABSL_GUARDED_BY(mu) = 0;
  };
  const std::shared_ptr<AtWriter> at_writer_ = std::make_shared<AtWriter>();
};

}  // namespace ballast
