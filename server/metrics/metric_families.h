// The one list of what /metrics shows. To add a metric: a row here, then give it values in metrics.cc, run_metrics.cc
// or process_metrics.cc; METRICS.md and the count of series for admission follow from the row.
//
// Prometheus's naming rules hold (one unit, base units, _total for counters); the label of a run is run_id, never job;
// there is no label for tensors. `labels` are separated by blanks; `name=a|b` says that a and b are all its values, and
// that a value outside the list counts as its last. Thread-safe: constants.
#pragma once

#include <array>
#include <cstddef>
#include <cstdint>
#include <span>
#include <string>
#include <string_view>
#include <vector>

namespace ballast {

enum class MetricType { kCounter, kGauge, kHistogram };

struct MetricFamily {
  const char* section;
  const char* name;
  MetricType type;
  const char* labels;
  const char* help;
  std::span<const double> buckets = {};
  bool two_components = false;  // only runs that store a weight in two components have it
};

// Steps last from milliseconds (tests, small models) to minutes.
inline constexpr std::array kSecondsBuckets = {0.001, 0.0025, 0.005, 0.01, 0.025, 0.05, 0.1,  0.25,
                                               0.5,   1.0,    2.5,   5.0,  10.0,  30.0, 60.0, 300.0};
// Coarser, for there are several phases.
inline constexpr std::array kPhaseBuckets = {0.001, 0.005, 0.01, 0.05, 0.1, 0.5, 1.0, 5.0, 10.0, 60.0};
// Around 1, where RMS_t of a healthy tensor is, and 2.3, from where StableAdamW's authors call it a spike.
inline constexpr std::array kRmsBuckets = {0.5, 0.8, 1.0, 1.2, 1.5, 2.0, 2.3, 3.0, 5.0, 10.0};
inline constexpr std::array kNormBuckets = {1e-4, 1e-3, 1e-2, 1e-1, 1.0, 1e1, 1e2, 1e3, 1e4};

#define BALLAST_PREDICTORS "rms|curvature|gradient_norm"
#define BALLAST_TORN_REASONS "restarted|rank_lost|data_loss|timeout|other"

inline constexpr auto kMetricFamilies = std::to_array<MetricFamily>({
    {"Process", "ballast_build_info", MetricType::kGauge, "version revision compiler cuda", "Constant 1."},
    {"Process", "ballast_start_time_timestamp_seconds", MetricType::kGauge, "", "When the daemon started (Unix time)."},
    {"Process", "ballast_ready", MetricType::kGauge, "", "1 while serving, 0 while starting or draining."},
    {"Process", "ballast_state", MetricType::kGauge, "state=starting|serving|draining",
     "The daemon's state: one of the series is 1."},
    {"Process", "process_resident_memory_bytes", MetricType::kGauge, "", "Resident memory."},
    {"Process", "process_open_fds", MetricType::kGauge, "", "Open file descriptors."},
    {"Process", "process_max_fds", MetricType::kGauge, "", "Limit of open file descriptors."},
    {"Process", "process_cpu_seconds_total", MetricType::kCounter, "", "User and system CPU time."},
    {"Process", "process_threads", MetricType::kGauge, "", "Threads."},

    {"Runs and steps", "ballast_runs", MetricType::kGauge, "state=waiting|training|failed", "Runs by state."},
    {"Runs and steps", "ballast_run_info", MetricType::kGauge, "run_id optimizer master state_format serving",
     "Constant 1; formats and optimizer of the first tensor."},
    {"Runs and steps", "ballast_run_state", MetricType::kGauge, "run_id state=waiting|training|failed|done",
     "The run's state: one of the series is 1. done: it has ended, and its series are about to."},
    {"Runs and steps", "ballast_run_parameters", MetricType::kGauge, "run_id", "Parameters owned."},
    {"Runs and steps", "ballast_run_ranks", MetricType::kGauge, "run_id", "Ranks connected."},
    {"Runs and steps", "ballast_run_ranks_expected", MetricType::kGauge, "run_id", "Ranks configured."},
    {"Runs and steps", "ballast_steps_applied_total", MetricType::kCounter, "run_id", "Steps applied whole."},
    {"Runs and steps", "ballast_steps_partial_total", MetricType::kCounter, "run_id reason=" BALLAST_TORN_REASONS,
     "Steps closed when only some of their tensors were updated."},
    {"Runs and steps", "ballast_steps_aborted_total", MetricType::kCounter,
     "run_id reason=disagreement|nonfinite|" BALLAST_TORN_REASONS, "Steps closed before any tensor was updated."},
    {"Runs and steps", "ballast_steps_skipped_total", MetricType::kCounter,
     "run_id reason=nonfinite|overflow|spike|operator|other", "Steps not applied, on purpose."},
    {"Runs and steps", "ballast_rewinds_total", MetricType::kCounter, "run_id reason=operator|trainer|spike|other",
     "Times that the run was taken back to a snapshot, by who asked; other: a torn step, as in on_torn."},
    {"Runs and steps", "ballast_snapshots", MetricType::kGauge, "run_id", "Steps that the run can be rewound to now."},
    {"Runs and steps", "ballast_step", MetricType::kGauge, "run_id", "Last step applied, whole or in part."},
    {"Runs and steps", "ballast_last_step_timestamp_seconds", MetricType::kGauge, "run_id",
     "When it was applied (Unix time)."},
    {"Runs and steps", "ballast_step_duration_seconds", MetricType::kHistogram, "run_id",
     "From a step's begin to its last update.", kSecondsBuckets},
    {"Runs and steps", "ballast_step_phase_duration_seconds", MetricType::kHistogram, "run_id phase=receive|update",
     "receive: first gradient byte to last; update: time the device spent on updates.", kPhaseBuckets},
    {"Runs and steps", "ballast_learning_rate", MetricType::kGauge, "run_id",
     "Of the first parameter group at the last step, as the trainer gave it."},
    {"Runs and steps", "ballast_loss", MetricType::kGauge, "run_id",
     "At the last step for which the trainer sent one."},

    {"Optimizer health", "ballast_rms_ratio", MetricType::kGauge, "run_id layer",
     "RMS_t = sqrt(mean(g^2 / max(v, eps^2))) at the last step, maximum over the layer's tensors; none for rules "
     "without "
     "a second moment."},
    {"Optimizer health", "ballast_rms_ratio_recent_max", MetricType::kGauge, "run_id layer",
     "Maximum of ballast_rms_ratio over the last 60 s, and never less than at the last step."},
    {"Optimizer health", "ballast_rms_ratio_distribution", MetricType::kHistogram, "run_id",
     "RMS_t of every tensor at every step.", kRmsBuckets},
    {"Optimizer health", "ballast_gradient_norm", MetricType::kGauge, "run_id",
     "L2 norm of the whole gradient at the last step."},
    {"Optimizer health", "ballast_gradient_norm_distribution", MetricType::kHistogram, "run_id",
     "L2 norm of the whole gradient at every step.", kNormBuckets},
    {"Optimizer health", "ballast_layer_gradient_norm", MetricType::kGauge, "run_id layer",
     "L2 norm of the layer's gradient at the last step."},
    {"Optimizer health", "ballast_update_to_weight_ratio", MetricType::kGauge, "run_id layer",
     "L2 norm of the update over that of the weights, at the last step with full statistics."},
    {"Optimizer health", "ballast_edq_ratio", MetricType::kGauge, "run_id layer",
     "Part of the wanted update that rounding let through (EDQ / L2 norm of the wanted update; 1: all of it), at the "
     "last "
     "step with full statistics."},
    {"Optimizer health", "ballast_unchanged_ratio", MetricType::kGauge, "run_id layer",
     "Part of the layer's weights that the update left bit for bit the same, at the last step with full statistics."},
    {"Optimizer health",
     "ballast_hi_edq_ratio",
     MetricType::kGauge,
     "run_id layer",
     "ballast_edq_ratio of the first component alone, where weights are stored in two (mcf): what bf16 weights by "
     "themselves would have taken up.",
     {},
     true},
    {"Optimizer health", "ballast_gradients_nonfinite_total", MetricType::kCounter, "run_id",
     "Tensors whose gradient had a NaN or an infinity."},
    {"Optimizer health", "ballast_blocks_rejected_total", MetricType::kCounter, "run_id",
     "Blocks of 32 elements left as they were because their update was not finite."},

    {"Loss spikes", "ballast_rms_spike_threshold", MetricType::kGauge, "run_id",
     "Of RMS_t, for layers that have none of their own."},
    {"Loss spikes", "ballast_rms_spike_events_total", MetricType::kCounter, "run_id layer",
     "Times that RMS_t of the layer rose to its threshold; within 10 steps it counts once."},
    {"Loss spikes", "ballast_curvature_ratio", MetricType::kGauge, "run_id",
     "Curvature of the loss along the last update as a multiple of what its step size bears, largest layer, where "
     "spikes.curvature is on."},
    {"Loss spikes", "ballast_curvature_events_total", MetricType::kCounter, "run_id",
     "Times that a layer's curvature rose to 1; within 10 steps it counts once."},
    {"Loss spikes", "ballast_gradient_norm_outliers_total", MetricType::kCounter, "run_id",
     "Steps whose gradient norm lay above the mean of the last 128 by spikes.norm_sigmas."},
    {"Loss spikes", "ballast_loss_spikes_total", MetricType::kCounter, "run_id",
     "Losses above the mean of the last 128 by spikes.loss_sigmas, or not finite; within 10 steps they count once."},
    {"Loss spikes", "ballast_update_clipped_total", MetricType::kCounter, "run_id",
     "Updates of a tensor that were scaled down for its own sake: by StableAdamW's RMS_t, or tensor_clip."},
    {"Loss spikes", "ballast_predictor_hits_total", MetricType::kCounter, "run_id predictor=" BALLAST_PREDICTORS,
     "Loss spikes that an event of the predictor came 1 to 8 steps before."},
    {"Loss spikes", "ballast_predictor_misses_total", MetricType::kCounter, "run_id predictor=" BALLAST_PREDICTORS,
     "Loss spikes that none came before."},
    {"Loss spikes", "ballast_predictor_false_alarms_total", MetricType::kCounter,
     "run_id predictor=" BALLAST_PREDICTORS, "Events that no loss spike followed within 8 steps."},
    {"Loss spikes", "ballast_predictor_lead_steps_total", MetricType::kCounter, "run_id predictor=" BALLAST_PREDICTORS,
     "Steps from the last event to the loss spike, summed over the hits."},
    {"Loss spikes", "ballast_predictor_chance_ratio", MetricType::kGauge, "run_id predictor=" BALLAST_PREDICTORS,
     "Part of all steps that lie 1 to 8 after an event: the hits that chance alone would give."},
    {"Loss spikes", "ballast_spike_actions_total", MetricType::kCounter, "run_id action=skip|rewind|stop",
     "What the run's policy did about events."},

    {"Protocol", "ballast_rpc_started_total", MetricType::kCounter, "method", "RPCs begun."},
    {"Protocol", "ballast_rpc_handled_total", MetricType::kCounter,
     "method code=OK|CANCELLED|INVALID_ARGUMENT|DEADLINE_EXCEEDED|NOT_FOUND|ALREADY_EXISTS|PERMISSION_DENIED|"
     "RESOURCE_EXHAUSTED|FAILED_PRECONDITION|ABORTED|OUT_OF_RANGE|UNIMPLEMENTED|INTERNAL|UNAVAILABLE|DATA_LOSS|"
     "UNAUTHENTICATED|UNKNOWN",
     "RPCs ended, by status."},
    {"Protocol", "ballast_rpc_duration_seconds", MetricType::kHistogram, "method",
     "How long RPCs lasted; a Train stream lasts as long as its trainer.", kSecondsBuckets},
    {"Protocol", "ballast_streams", MetricType::kGauge, "", "Train streams open now."},
    {"Protocol", "ballast_received_bytes_total", MetricType::kCounter, "run_id transport=grpc|shm",
     "Gradient payload."},
    {"Protocol", "ballast_sent_bytes_total", MetricType::kCounter, "run_id transport=grpc|shm", "Weights payload."},
    {"Protocol", "ballast_chunks_received_total", MetricType::kCounter, "run_id", "Gradient chunks."},
    {"Protocol", "ballast_chunks_rejected_total", MetricType::kCounter,
     "run_id reason=checksum|bounds|unknown_tensor|too_large|malformed", "Gradient chunks refused."},
    {"Protocol", "ballast_chunks_duplicate_total", MetricType::kCounter, "run_id match=same|different",
     "Gradient chunks that came again; different ones end the session and must stay 0."},
    {"Protocol", "ballast_rank_reconnects_total", MetricType::kCounter, "run_id rank",
     "Sessions resumed after their connection was lost."},
    {"Protocol", "ballast_rank_last_seen_timestamp_seconds", MetricType::kGauge, "run_id rank",
     "When the rank last began or ended a step (Unix time)."},
    {"Protocol", "ballast_rank_wait_caused_seconds_total", MetricType::kCounter, "run_id rank",
     "Time for which all other ranks had ended a step and this one had not."},
    {"Protocol", "ballast_admission_rejected_total", MetricType::kCounter,
     "reason=memory|max_runs|series|draining|other", "Runs refused."},

    {"Memory", "ballast_host_memory_used_bytes", MetricType::kGauge,
     "device kind=weights|momentum|variance|gradients|staging|snapshots|client_state",
     "Host memory reserved by runs; of those on a GPU, their snapshots and client_state alone."},
    {"Memory", "ballast_host_memory_limit_bytes", MetricType::kGauge, "device",
     "What runs may reserve of it together."},
    {"Memory", "ballast_gpu_memory_used_bytes", MetricType::kGauge,
     "device kind=weights|momentum|variance|gradients|staging", "GPU memory reserved by runs."},
    {"Memory", "ballast_gpu_memory_limit_bytes", MetricType::kGauge, "device",
     "What runs may reserve of it together; 0 once the GPU failed."},
    {"Memory", "ballast_gpu_failures_total", MetricType::kCounter, "device",
     "GPUs that failed for good; the runs on it are lost."},
});

#undef BALLAST_PREDICTORS
#undef BALLAST_TORN_REASONS

// A family by its name, checked when compiling.
class FamilyRef {
 public:
  consteval FamilyRef(const char* name) : index_(Find(name)) {}  // NOLINT: a name is a reference
  size_t index() const { return index_; }
  const MetricFamily& operator*() const { return kMetricFamilies[index_]; }
  const MetricFamily* operator->() const { return &kMetricFamilies[index_]; }

 private:
  static consteval size_t Find(std::string_view name) {
    for (size_t i = 0; i < kMetricFamilies.size(); ++i) {
      if (std::string_view(kMetricFamilies[i].name) == name) return i;
    }
    throw "no such family";
  }
  size_t index_;
};

struct MetricLabel {
  std::string name;
  std::vector<std::string> values;  // empty: open
};
std::vector<MetricLabel> LabelsOf(const MetricFamily& family);

// What a run's number of series depends on.
struct RunShape {
  uint64_t layers = 1;
  uint64_t ranks = 1;
  bool two_components = false;  // some weight is stored in two
};
// Time series (lines of /metrics) of all families with a run_id, for one run.
uint64_t SeriesPerRun(const RunShape& run);
// METRICS.md.
std::string DescribeFamilies();

}  // namespace ballast
