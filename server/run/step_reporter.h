// Tells those who watch a run what becomes of it: the metrics, the status board, the history and the log. Takes the
// times of the open step and counts its bytes, which nobody else needs.
//
// Strand-confined; what it writes to may be read from any thread.
#pragma once

#include <array>
#include <cstdint>
#include <string>
#include <vector>

#include "absl/status/status.h"

#include "server/metrics/metrics.h"
#include "server/run/checkpointer.h"
#include "server/run/rank_stream.h"
#include "server/run/run_activity.h"
#include "server/run/run_history.h"
#include "server/run/run_status.h"
#include "server/run/step_statistics.h"
#include "server/spec/run_spec.h"
#include "server/step/step_machine.h"
#include "server/step/step_record.h"
#include "server/store/snapshot_ring.h"

namespace ballast {

class StepReporter {
 public:
  // All outlive the reporter.
  struct Environment {
    const RunSpec* spec;
    const StepMachine* machine;
    RunMetrics* metrics;
    RunStatusBoard* board;
    RunHistory* history;
  };
  explicit StepReporter(Environment environment);

  // For what is a metric and nothing else.
  RunMetrics& metrics() { return *environment_.metrics; }

  // The open step.
  void OnOpened();
  void OnReceived(const std::string& transport, uint64_t bytes);  // a gradient's payload
  void OnSent(const std::string& transport, uint64_t bytes);      // a weights chunk's
  // The rank has sent all of the step, which so many ranks take part in: its StepMeasure, or else its StepEnd, came. If
  // it is the last, all others have waited for it.
  void OnRankEnded(uint32_t rank, uint32_t ranks_in_step);
  // What a rank has counted of its gradients' conversion, where it has: of the step the most of any rank.
  void OnConverted(std::optional<double> flushed, std::optional<double> overflowed);

  // A closed step.
  // Fills in its times, bytes and last_rank, once. last_update_s: MonotonicSeconds; 0: no tensor was updated.
  void Complete(StepRecord* record, double last_update_s);
  void OnSpikes(const SpikeReport& report, const StepRecord& record);
  void LogSpikes(const StepRecord& record);  // a line a kind and minute, at most
  // Shows the record, and returns what of it is kept.
  StepRecord Report(StepRecord record, const StepStatistics& statistics);

  // The run.
  // Its state, also in the metrics and, when it changes, in the log; at each tick and when ranks come and go.
  void ShowState(RunActivity::Ranks ranks, bool stopped);
  RunState state() const { return state_; }  // as it was shown last
  const RunActivity& activity() const { return activity_; }
  void GoOnFrom(const RunActivity& activity) { activity_ = activity; }  // of a run that was amended
  void ShowRanks(std::vector<RankStatus> ranks);                        // by rank, of all there are
  void ShowAwaited(std::vector<AwaitedRank> ranks);
  void ShowSnapshots(std::vector<uint64_t> steps);
  void ShowStopped(const std::string& why);
  void ShowRewound(const RunMemory& memory);
  void OnRewound(uint64_t from_step, uint64_t to_step, const std::string& reason);
  void OnCheckpointBegun() { activity_.OnCheckpointBegun(); }
  void OnCheckpoint(const CheckpointReport& report);
  void ShowNewest(const CheckpointWritten& newest);
  void ShowDurable(uint64_t step);
  void OnJournaled(uint64_t bytes);
  void OnJournalFailed(const absl::Status& why);
  void ShowJournaling();  // it did not fail, or does so no more
  // Of a run that a checkpoint was read of.
  void ShowRestored(const RunFigures& figures);
  void LogNotRewound(const std::string& why) const;
  void LogReplaced(bool whole) const;  // the weights, or some of them

  // Streams and sessions.
  void LogOpened(uint32_t rank, const RankStream& stream) const;
  void LogRefused(const RankStream& stream, const absl::Status& why) const;
  // A stream, or a session without one, is over.
  void LogEnd(uint32_t rank, const std::string& peer, const std::string& transport, const absl::Status& why) const;
  // For each rank at each tick: logs a lease that is over, once.
  void LogLeaseIfOver(uint32_t rank, const std::string& peer, double now_s);

 private:
  struct StepClock {
    double begin_s = 0, first_byte_s = 0, last_byte_s = 0;
    double last_end_s = 0;   // a rank's StepEnd
    uint32_t ended = 0;      // ranks
    uint32_t last_rank = 0;  // that ended
    double wait_s = 0;       // of all others for it
    std::optional<double> flushed = {}, overflowed = {};
  };

  struct KindLogged {
    double at_s = 0;           // last; 0: never
    uint64_t passed_over = 0;  // events since
  };

  void SetState(RunState state);
  void LogTorn(const StepRecord& record) const;
  // How long it should take from one checkpoint to the next, as the spec says and, of those due by steps, the last ones.
  void ShowCheckpointInterval();

  const Environment environment_;
  StepClock clock_;                             // of the open step
  std::array<KindLogged, kSpikeKinds> logged_;  // by SpikeKind
  RunActivity activity_;
  RunState state_ = RunState::kWaiting;
  uint64_t received_bytes_ = 0, sent_bytes_ = 0;  // payload, since a step closed
  std::vector<bool> lease_over_;                  // by rank: and the log was told
};

}  // namespace ballast
