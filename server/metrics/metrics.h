// Everything /metrics shows. One table has the families and how their values are read (metric_table.h); METRICS.md is
// generated from it. Names and labels follow one rule: the label is run_id, never job; never a tensor name.
//
// Thread-safe: the run's strand writes, the ops HTTP threads serialize. No call here waits for a step or a device.
#pragma once

#include <array>
#include <cstdint>
#include <functional>
#include <memory>
#include <optional>
#include <string>
#include <string_view>
#include <vector>

#include "server/base/version.h"
#include "server/metrics/metric_families.h"
#include "server/stability/spike_score.h"
#include "server/stability/spikes.h"
#include "server/step/step_record.h"

namespace ballast {

struct PlanBytes;

struct RunLabels {
  std::string run_id;
  std::string optimizer, master, state, serving;  // of the first tensor
  uint64_t parameters = 0;
  std::vector<std::string> layers;  // by index into StepRecord::layers
  uint32_t ranks = 1;               // at most
  bool two_components = false;      // some weight is stored in two
  double rms_threshold = 0;
  bool durable = false;   // it is written to a disk: only then it has the series of "Durability"
  bool followed = false;  // readers may follow it: only then it has those of "Following"

  RunShape shape() const {
    return {.layers = layers.size(),
            .ranks = ranks,
            .two_components = two_components,
            .durable = durable,
            .followed = followed};
  }
};

// What a run's detector found at a closed step, and its predictors' scores until then.
struct SpikeReport {
  std::vector<SpikeEvent> events;
  std::array<SpikeScore::Counts, kPredictors> scores;  // by SpikeKind; no count ever falls
  std::optional<double> curvature;                     // of the layer where it is largest
  uint64_t updates_held = 0;                           // tensors whose update was clipped by itself
};

// A checkpoint that was written.
struct CheckpointFigures {
  std::string_view trigger;  // interval | request | drain
  uint64_t step = 0, bytes = 0;
  double snapshot_seconds = 0;  // from the step's close until its image was whole
  double write_seconds = 0;     // until all its files were synced
  double publish_seconds = 0;   // since
  double stall_seconds = 0;     // that steps lost to the snapshot, at most
};

// A version that was made for readers that follow a run.
struct VersionFigures {
  uint64_t step = 0, generation = 0;
  uint64_t bytes = 0;         // of all of it
  uint64_t change_bytes = 0;  // of what it has changed of the one before; 0: there was none
  double changed_ratio = 0;   // elements that it has changed, of all
  double make_seconds = 0;    // from the step's close
};
// Those readers now.
struct FollowerFigures {
  uint32_t count = 0;
  size_t tags = 0;            // versions that have names
  uint64_t tag_bytes = 0;     // of these
  double behind_seconds = 0;  // of the one for which a version that it wants has been there longest
};

// What a run is about.
struct ActivityFigures {
  uint32_t ranks_lost = 0;
  bool stopped = false;         // by itself, and begins no step
  double step_opened_at_s = 0;  // Unix time; 0: no step is open
  double stall_after_s = 0;
  double unsaved_s = 0;  // RunActivity::unsaved_s
};

// What is told of a run's versions and their readers. Of a run that nobody may follow there are no such series.
class FollowMetrics {
 public:
  virtual ~FollowMetrics() = default;
  // An event, of a family of the run's that is a counter without a reading; who calls it includes metric_table.h.
  // label_value: of the label that lists its values, if it has one.
  virtual void Count(FamilyRef counter, std::string_view label_value, double by) = 0;
  virtual void OnVersion(const VersionFigures& figures) = 0;
  virtual void OnFollowers(const FollowerFigures& figures) = 0;
};

// Where the versions of a run come from that a relay serves.
struct RelayFigures {
  bool connected = false;    // it is being told of versions there
  double closed_unix_s = 0;  // when the step of the newest version here closed; 0: there is none
};

// A relayed run's series. Threads: one of the relay's own calls OnRelay; the others as in FollowMetrics.
class RelayMetrics : public FollowMetrics {
 public:
  virtual void OnRelay(const RelayFigures& figures) = 0;
};

// One run's series. They disappear a minute after the run's end, so that a last scrape sees them.
class RunMetrics : public FollowMetrics {
 public:
  virtual void OnStep(const StepRecord& report) = 0;  // when it closes
  virtual void OnSpikes(const SpikeReport& report) = 0;
  // As in FollowMetrics.
  void Count(FamilyRef counter, std::string_view label_value = "", double by = 1) override = 0;
  // These seven of a run that is durable; others have no such series.
  virtual void OnCheckpoint(const CheckpointFigures& figures) = 0;  // once it is durable
  virtual void OnCheckpointFailed(std::string_view trigger) = 0;    // as CheckpointFigures::trigger
  virtual void OnDurable(uint64_t step) = 0;                        // where that is not what OnCheckpoint says
  virtual void SetCheckpointInterval(double seconds) = 0;           // from one to the next; 0: none is due by itself
  virtual void OnVerifyFailed(std::string_view reason) = 0;  // checksum | truncated | missing | manifest | version
  virtual void OnRestored(std::string_view result) = 0;      // latest | older | failed
  // What came of storage.on_published for a checkpoint: success | failed | timeout | skipped, which is neither.
  virtual void OnCopied(std::string_view result) = 0;
  virtual void OnSpikeAction(std::string_view action) = 0;                  // skip | rewind | stop
  virtual void OnReceived(std::string_view transport, uint64_t bytes) = 0;  // one gradient chunk's payload
  virtual void OnSent(std::string_view transport, uint64_t bytes) = 0;      // weights payload; grpc | shm | gpu
  virtual void OnDuplicateChunk(bool same_bytes) = 0;
  virtual void OnRejectedChunk(
      std::string_view reason) = 0;  // checksum | bounds | unknown_tensor | too_large | malformed
  virtual void OnRanks(uint32_t connected, uint32_t expected) = 0;
  virtual void OnReconnect(uint32_t rank) = 0;
  virtual void OnRankSeen(uint32_t rank) = 0;
  virtual void OnWaitCaused(uint32_t rank, double seconds) = 0;
  virtual void OnRewind(std::string_view reason) = 0;  // operator | trainer | spike | restore
  // The run is at this step again, by a rewind, or since it was read from the disk.
  virtual void OnWentBack(const StepRecord& last) = 0;
  virtual void OnSnapshots(size_t kept) = 0;
  virtual void OnActivity(const ActivityFigures& figures) = 0;
  virtual void OnState(std::string_view state) = 0;  // waiting | training | idle | finished | failed
  // A run with the same id has taken this one's place: it alone counts among ballast_runs. Nothing follows.
  virtual void OnReplaced() = 0;
};

// Where times come from; tests have their own.
struct MetricsClock {
  std::function<double()> unix_s;    // for timestamps
  std::function<double()> steady_s;  // never goes back

  static MetricsClock System();
};

class Metrics {
 public:
  explicit Metrics(BuildInfo build, MetricsClock clock = MetricsClock::System());
  ~Metrics();

  // Series of all runs together, at most, those that have ended among them: a scrape of so many takes half of the 50 ms
  // that tests/bench/scrape.py allows. Admission sees to it for the runs that there are; one that was deleted counts
  // beside them until the last that holds it, a stream or a request, lets go.
  static constexpr uint64_t kMostSeries = 16000;

  // Counters and histograms exist, at zero, from here on, and gauges from their first value on. The series go a minute
  // after the result's end, or when too many others have ended since, or when their place among kMostSeries is needed,
  // or when a run with the same id is added; where the result of an earlier AddRun with that id still exists, the new
  // run goes on from its counts.
  std::unique_ptr<RunMetrics> AddRun(const RunLabels& labels);

  // Of a run that this daemon relays: as long as the result lives.
  std::unique_ptr<RelayMetrics> AddRelayed(const std::string& run_id);

  // method: its name or its path, "/ballast.v1.TrainerService/Train"; code: "OK", "ABORTED", ...
  void OnRpcStarted(std::string_view method);
  void OnRpcHandled(std::string_view method, std::string_view code, double seconds);
  // An event, of a family of the daemon's that is a counter, as RunMetrics::Count.
  void Count(FamilyRef counter, std::string_view label_value = "", double by = 1);
  void OnStreams(int delta);                          // open Train streams
  void OnAdmissionRejected(std::string_view reason);  // memory | max_runs | series | draining
  // These three of a daemon with storage; others have no such series.
  void SetStorage(uint64_t free_bytes, uint64_t size_bytes);
  void OnRestore(double seconds);      // a run was read back
  void OnJournalSync(double seconds);  // of any run
  // Unix times of a certificate in use. file: certificate | client_ca. Without TLS there are no such series.
  void SetCertificate(std::string_view file, double not_before_s, double not_after_s);
  // When the first grant of the access file expires (Unix time); 0: none does. Without a file there is no such series.
  void SetGrantExpiry(double at_s);
  // Whether what was read last is in use. files: tls | access. Until files have changed there is no such series.
  void SetLastReload(std::string_view files, bool successful);
  void SetConnections(uint32_t open);  // to the gRPC port
  void SetMemory(std::string_view device, const PlanBytes& reserved, uint64_t limit_bytes);
  void OnDeviceFailed(std::string_view device);
  void SetState(std::string_view state);  // starting | restoring | serving | draining
  void SetLive(bool live);                // as /livez says

  // How many runs that have ended are shown, at most, the last ones; 16 until this is called.
  void KeepEnded(size_t runs);

  // Prometheus text exposition 0.0.4.
  std::string Serialize() const;
  // Series that a run adds at most; for admission.
  static uint64_t SeriesOfRun(const RunShape& run) { return SeriesPerRun(run); }
  // The table of METRICS.md.
  static std::string Describe();

 private:
  class Impl;
  std::shared_ptr<Impl> impl_;
};

}  // namespace ballast
