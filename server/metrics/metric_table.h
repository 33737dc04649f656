// The one list of what /metrics shows: a row has a family's name, help, type, labels and buckets, and how its values
// are read from what a run reports. A metric of values that are reported already is a row here and its line of
// METRICS.md; one of a new value is a field of the report besides, and the place that computes it. A counter of events
// is a row without a reading, and RunMetrics::Count where the event is.
//
// Thread-safe: constants.
#pragma once

#include <array>
#include <cstddef>
#include <string_view>

#include "server/metrics/buckets.h"
#include "server/metrics/metric_families.h"
#include "server/metrics/metric_readings.h"
#include "server/step/step_machine.h"

namespace ballast {

// Of runs that are written to a disk; the other runs have no series of it.
consteval MetricFamily Durable(MetricFamily family) {
  family.of_runs = OfRuns::kDurable;
  return family;
}

// Of runs that this daemon relays.
consteval MetricFamily Relayed(MetricFamily family) {
  family.of_runs = OfRuns::kRelayed;
  return family;
}

// Of runs that readers may follow.
consteval MetricFamily Followed(MetricFamily family) {
  family.of_runs = OfRuns::kFollowed;
  return family;
}

#define BALLAST_RUN_STATES "waiting|training|idle|finished|failed"
#define BALLAST_PREDICTORS "rms|curvature|gradient_norm"
#define BALLAST_TORN_REASONS "restarted|rank_lost|data_loss|timeout|other"

inline constexpr auto kMetricFamilies = std::to_array<MetricFamily>({
    {"Process", "ballast_build_info", MetricType::kGauge, "version revision compiler cuda", "Constant 1."},
    {"Process", "ballast_start_time_timestamp_seconds", MetricType::kGauge, "", "When the daemon started (Unix time)."},
    {"Process", "ballast_ready", MetricType::kGauge, "", "1 while serving, 0 while starting or draining."},
    {"Process", "ballast_live", MetricType::kGauge, "",
     "1 while /livez says 200: the gRPC port, the runs and the devices answer."},
    {"Process", "ballast_state", MetricType::kGauge, "state=starting|restoring|serving|draining",
     "The daemon's state: one of the series is 1."},
    {"Process", "process_resident_memory_bytes", MetricType::kGauge, "", "Resident memory."},
    {"Process", "process_open_fds", MetricType::kGauge, "", "Open file descriptors."},
    {"Process", "process_max_fds", MetricType::kGauge, "", "Limit of open file descriptors."},
    {"Process", "process_cpu_seconds_total", MetricType::kCounter, "", "User and system CPU time."},
    {"Process", "process_threads", MetricType::kGauge, "", "Threads."},

    {"Runs and steps", "ballast_runs", MetricType::kGauge, "state=" BALLAST_RUN_STATES, "Runs by state."},
    {"Runs and steps", "ballast_run_info", MetricType::kGauge, "run_id optimizer master state_format serving",
     "Constant 1; formats and optimizer of the first tensor."},
    {"Runs and steps", "ballast_run_state", MetricType::kGauge, "run_id state=" BALLAST_RUN_STATES "|ended",
     "The run's state: one of the series is 1. waiting: for trainers, or its first step. idle: its trainers are there, "
     "and no step for a while. finished: they have left cleanly. ended: it was deleted, and its series go next."},
    {"Runs and steps", "ballast_run_parameters", MetricType::kGauge, "run_id", "Parameters owned.",
     reading::OfRun<&RunLabels::parameters>},
    {"Runs and steps", "ballast_run_ranks", MetricType::kGauge, "run_id", "Ranks connected."},
    {"Runs and steps", "ballast_run_ranks_expected", MetricType::kGauge, "run_id", "Ranks configured."},
    {"Runs and steps", "ballast_run_ranks_lost", MetricType::kGauge, "run_id",
     "Ranks that have been away for longer than their lease without having left cleanly, and that nobody has taken."},
    {"Runs and steps", "ballast_run_stopped", MetricType::kGauge, "run_id",
     "1: it has stopped itself, after spikes.max_rewinds or at a gradient with nonfinite=\"stop\", and begins no step "
     "until it is rewound."},
    {"Runs and steps", "ballast_step_open_timestamp_seconds", MetricType::kGauge, "run_id",
     "When the open step was begun (Unix time); 0: none is open."},
    {"Runs and steps", "ballast_step_stall_threshold_seconds", MetricType::kGauge, "run_id",
     "How long a step may stay open, and none be begun before the run counts as idle: ten of its own steps, at least "
     "30 s; 600 s before two have closed."},
    {"Runs and steps", "ballast_steps_applied_total", MetricType::kCounter, "run_id", "Steps applied whole.",
     reading::Applied},
    {"Runs and steps", "ballast_steps_partial_total", MetricType::kCounter,
     "run_id reason=stopped|" BALLAST_TORN_REASONS, "Steps closed when only some of their tensors were updated.",
     reading::ByReason<Outcome::kPartial>},
    {"Runs and steps", "ballast_steps_aborted_total", MetricType::kCounter,
     "run_id reason=disagreement|nonfinite|" BALLAST_TORN_REASONS, "Steps closed before any tensor was updated.",
     reading::ByReason<Outcome::kAborted>},
    {"Runs and steps", "ballast_steps_skipped_total", MetricType::kCounter,
     "run_id reason=nonfinite|overflow|spike|discarded|operator|other", "Steps not applied, on purpose.",
     reading::ByReason<Outcome::kSkipped>},
    {"Runs and steps", "ballast_rewinds_total", MetricType::kCounter,
     "run_id reason=operator|trainer|spike|restore|other",
     "Times that the run was taken back to a snapshot, or a checkpoint (restore), by who asked; other: a torn step, as "
     "in "
     "on_torn."},
    {"Runs and steps", "ballast_snapshots", MetricType::kGauge, "run_id", "Steps that the run can be rewound to now."},
    {"Runs and steps", "ballast_step", MetricType::kGauge, "run_id",
     "Last step applied, whole or in part; after a rewind, and when the run was read from the disk, the step that it "
     "is "
     "at. What other gauges tell of the last step is then that step's, too, or absent until the next one.",
     reading::AtUpdate<&StepRecord::step>},
    {"Runs and steps", "ballast_last_step_timestamp_seconds", MetricType::kGauge, "run_id",
     "When a step was last applied by this daemon (Unix time), also where a rewind has undone it.",
     reading::TimeOfUpdate},
    {"Runs and steps", "ballast_step_duration_seconds", MetricType::kHistogram, "run_id",
     "From a step's begin to its last update.", reading::AtUpdate<&StepRecord::seconds>, kSecondsBuckets},
    {"Runs and steps", "ballast_step_phase_duration_seconds", MetricType::kHistogram, "run_id phase=receive|update",
     "receive: first gradient byte to last; update: time the device spent on updates.", reading::Phases, kPhaseBuckets},
    {"Runs and steps", "ballast_learning_rate", MetricType::kGauge, "run_id",
     "Of the first parameter group at the last step, as the trainer gave it.",
     reading::AtUpdate<&StepRecord::learning_rate>},
    {"Runs and steps", "ballast_loss", MetricType::kGauge, "run_id", "At the last step for which the trainer sent one.",
     reading::AtClose<&StepRecord::loss>},

    {"Optimizer health", "ballast_rms_ratio", MetricType::kGauge, "run_id layer",
     "RMS_t = sqrt(mean(g^2 / v)), v debiased and held off 0 by eps, at the last step, maximum over the layer's "
     "tensors that are watched (spikes.rms_min_elements), or over all where none is; none for rules without a second "
     "moment.",
     reading::OfLayers<&StepRecord::Layer::rms_ratio>},
    {"Optimizer health", "ballast_rms_ratio_recent_max", MetricType::kGauge, "run_id layer",
     "Maximum of ballast_rms_ratio over the last 60 s, and never less than at the last step."},
    {"Optimizer health", "ballast_rms_ratio_distribution", MetricType::kHistogram, "run_id",
     "RMS_t of every tensor at every step.", reading::RmsOfTensors, kRmsBuckets},
    {"Optimizer health", "ballast_gradient_norm", MetricType::kGauge, "run_id",
     "L2 norm of the whole gradient at the last step; of a run on several daemons that is released, of this daemon's "
     "part "
     "(the run's is the root of the sum of their squares), of a staged one of the whole on each.",
     reading::AtUpdate<&StepRecord::grad_norm>},
    {"Optimizer health", "ballast_gradient_norm_distribution", MetricType::kHistogram, "run_id",
     "ballast_gradient_norm of every step.", reading::AtUpdate<&StepRecord::grad_norm>, kNormBuckets},
    {"Optimizer health", "ballast_layer_gradient_norm", MetricType::kGauge, "run_id layer",
     "L2 norm of the layer's gradient at the last step.", reading::OfLayers<&StepRecord::Layer::gradient_norm>},
    {"Optimizer health", "ballast_update_to_weight_ratio", MetricType::kGauge, "run_id layer",
     "L2 norm of the wanted update, before rounding, over that of the weights, at the last step with full statistics.",
     reading::OfLayers<&StepRecord::Layer::update_to_weight_ratio>},
    {"Optimizer health", "ballast_edq_ratio", MetricType::kGauge, "run_id layer",
     "Part of the wanted update that rounding let through (EDQ / L2 norm of the wanted update; 1: all of it), at the "
     "last step with full statistics.",
     reading::OfLayers<&StepRecord::Layer::edq_ratio>},
    {"Optimizer health", "ballast_unchanged_ratio", MetricType::kGauge, "run_id layer",
     "Part of the layer's weights that the update left bit for bit the same, at the last step with full statistics.",
     reading::OfLayers<&StepRecord::Layer::unchanged_ratio>},
    {"Optimizer health",
     "ballast_hi_edq_ratio",
     MetricType::kGauge,
     "run_id layer",
     "ballast_edq_ratio of the first component alone, where weights are stored in two (mcf): what bf16 weights by "
     "themselves would have taken up.",
     reading::OfLayers<&StepRecord::Layer::hi_edq_ratio>,
     {},
     OfRuns::kTwoComponents},
    {"Optimizer health", "ballast_gradients_nonfinite_total", MetricType::kCounter, "run_id",
     "Tensors whose gradient had a NaN or an infinity, in steps that no trainer discarded.", reading::NonfiniteTensors},
    {"Optimizer health", "ballast_blocks_rejected_total", MetricType::kCounter, "run_id",
     "Blocks of 32 elements left as they were because their update was not finite.",
     reading::AtClose<&StepRecord::rejected_blocks>},

    {"Optimizer health", "ballast_gradient_flushed_ratio", MetricType::kGauge, "run_id",
     "Share of the gradients' elements that were not 0 and became so when the trainer converted them to 16 or 8 bits, "
     "of the rank with most; at the last step that the trainers counted, every tenth.",
     reading::AtClose<&StepRecord::gradient_flushed>},
    {"Optimizer health", "ballast_gradient_overflowed_ratio", MetricType::kGauge, "run_id",
     "Likewise, of those that were finite and became infinite.", reading::AtClose<&StepRecord::gradient_overflowed>},

    {"Loss spikes", "ballast_rms_spike_threshold", MetricType::kGauge, "run_id",
     "Of RMS_t, for layers that have none of their own.", reading::OfRun<&RunLabels::rms_threshold>},
    {"Loss spikes", "ballast_rms_spike_events_total", MetricType::kCounter, "run_id layer",
     "Times that RMS_t of the layer rose to its limit while no loss spike went on; within 10 steps it counts once.",
     reading::RmsEvents},
    {"Loss spikes", "ballast_curvature_ratio", MetricType::kGauge, "run_id",
     "Curvature of the loss along the last update as a multiple of what its step size bears, largest layer, where "
     "spikes.curvature is on.",
     reading::OfSpikes<&SpikeReport::curvature>},
    {"Loss spikes", "ballast_curvature_events_total", MetricType::kCounter, "run_id",
     "Times that a layer's curvature rose to 1; within 10 steps it counts once.",
     reading::EventsOf<SpikeKind::kCurvature>},
    {"Loss spikes", "ballast_gradient_norm_outliers_total", MetricType::kCounter, "run_id",
     "Steps whose gradient norm lay above the mean of the last 128 by spikes.norm_sigmas.",
     reading::EventsOf<SpikeKind::kGradientNorm>},
    {"Loss spikes", "ballast_loss_spikes_total", MetricType::kCounter, "run_id",
     "Loss spikes: from a loss above the median of the last 128 by spikes.loss_sigmas on, half of ten losses stay "
     "high, or "
     "one is huge or not finite. One ends after ten losses that are not high.",
     reading::EventsOf<SpikeKind::kLoss>},
    {"Loss spikes", "ballast_loss_nonfinite_total", MetricType::kCounter, "run_id",
     "Steps whose loss was a NaN or an infinity, from the first one on.", reading::NonfiniteLoss},
    {"Loss spikes", "ballast_update_clipped_total", MetricType::kCounter, "run_id",
     "Updates of a tensor that were scaled down for its own sake: by StableAdamW's RMS_t, or tensor_clip.",
     reading::OfSpikes<&SpikeReport::updates_held>},
    {"Loss spikes", "ballast_predictor_hits_total", MetricType::kCounter, "run_id predictor=" BALLAST_PREDICTORS,
     "Loss spikes that an event of the predictor came 1 to 8 steps before.", reading::Score<&SpikeScore::Counts::hits>},
    {"Loss spikes", "ballast_predictor_misses_total", MetricType::kCounter, "run_id predictor=" BALLAST_PREDICTORS,
     "Loss spikes that none came before.", reading::Score<&SpikeScore::Counts::misses>},
    {"Loss spikes", "ballast_predictor_false_alarms_total", MetricType::kCounter,
     "run_id predictor=" BALLAST_PREDICTORS, "Events that no loss spike followed within 8 steps, known 17 steps later.",
     reading::Score<&SpikeScore::Counts::false_alarms>},
    {"Loss spikes", "ballast_predictor_lead_steps_total", MetricType::kCounter, "run_id predictor=" BALLAST_PREDICTORS,
     "Steps from the last event to the loss spike, summed over the hits.", reading::LeadSteps},
    {"Loss spikes", "ballast_predictor_chance_ratio", MetricType::kGauge, "run_id predictor=" BALLAST_PREDICTORS,
     "Part of all steps that lie 1 to 8 after an event: the hits that chance alone would give.", reading::Chance},
    {"Loss spikes", "ballast_spike_actions_total", MetricType::kCounter, "run_id action=skip|rewind|stop",
     "What the run's policy did about events."},

    {"Protocol", "ballast_rpc_started_total", MetricType::kCounter, "method", "RPCs begun."},
    {"Protocol", "ballast_rpc_handled_total", MetricType::kCounter,
     "method code=OK|CANCELLED|INVALID_ARGUMENT|DEADLINE_EXCEEDED|NOT_FOUND|ALREADY_EXISTS|PERMISSION_DENIED|"
     "RESOURCE_EXHAUSTED|FAILED_PRECONDITION|ABORTED|OUT_OF_RANGE|UNIMPLEMENTED|INTERNAL|UNAVAILABLE|DATA_LOSS|"
     "UNAUTHENTICATED|UNKNOWN",
     "RPCs ended, by status."},
    {"Protocol",
     "ballast_rpc_duration_seconds",
     MetricType::kHistogram,
     "method",
     "How long RPCs lasted; a Train stream lasts as long as its trainer.",
     {},
     kSecondsBuckets},
    {"Protocol", "ballast_streams", MetricType::kGauge, "", "Train streams open now."},
    {"Protocol", "ballast_received_bytes_total", MetricType::kCounter, "run_id transport=grpc|shm|gpu",
     "Gradient payload."},
    {"Protocol", "ballast_sent_bytes_total", MetricType::kCounter, "run_id transport=grpc|shm|gpu", "Weights payload."},
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
     "reason=memory|max_runs|series|draining|rule|other", "Runs refused."},
    {"Protocol", "ballast_tls_certificate_expiry_timestamp_seconds", MetricType::kGauge, "file=certificate|client_ca",
     "When what is in use expires (Unix time): the daemon's certificate with its chain, and the clients' authority "
     "that is "
     "valid longest; none without TLS."},
    {"Protocol", "ballast_tls_certificate_start_timestamp_seconds", MetricType::kGauge, "file=certificate|client_ca",
     "From when on it is valid (Unix time)."},
    {"Protocol", "ballast_connections", MetricType::kGauge, "",
     "Connections to the gRPC port when one was last accepted or refused, some of which may be over; of a Unix socket "
     "none is counted."},
    {"Protocol", "ballast_connections_refused_total", MetricType::kCounter, "reason=all|address|calls|descriptors",
     "Connections turned away: limits.connections are open, three quarters of them from that address; too many calls "
     "are open; no file descriptor is left."},
    {"Protocol", "ballast_quota_refused_total", MetricType::kCounter, "reason=runs|bytes|streams|requests|failures",
     "Calls refused for what their caller uses already (most_... of its grant, limits.caller_...); failures: for "
     "earlier "
     "ones that failed."},
    {"Protocol", "ballast_access_expiry_timestamp_seconds", MetricType::kGauge, "",
     "When the first grant of the access file expires, or has (Unix time); 0: none does. None without an access file."},
    {"Protocol", "ballast_last_reload_successful", MetricType::kGauge, "files=tls|access",
     "1 while the files are in use as they were read last, 0 while those before are, since they are not right; from "
     "their first change on."},
    {"Protocol", "ballast_access_reloads_total", MetricType::kCounter, "result=success|failed",
     "Times that the access file was found changed: taken into use, or not right, so that the grants before stay."},
    {"Protocol", "ballast_tls_reloads_total", MetricType::kCounter, "result=success|failed",
     "Times that the files of TLS were found changed: taken into use, or not right, so that those before stay in use."},

    Durable({"Durability", "ballast_checkpoints_total", MetricType::kCounter,
             "run_id result=success|failed trigger=interval|request|drain",
             "Checkpoints written, and those that could not be, by what had them written. One that a rewind gave up is "
             "neither."}),
    Durable(
        {"Durability", "ballast_checkpoint_duration_seconds", MetricType::kHistogram,
         "run_id phase=snapshot|write|publish",
         "snapshot: from the step's end until it was copied, while steps go on; write: until its files were synced; "
         "publish: since.",
         reading::PhasesOfCheckpoint, kCheckpointBuckets}),
    Durable(
        {"Durability", "ballast_checkpoint_step_stall_seconds", MetricType::kHistogram, "run_id",
         "What steps lost to a checkpoint's snapshot, at most: time of the devices for copies that updates waited for. "
         "Those made while they had nothing else to do are free.",
         reading::OfCheckpoint<&CheckpointFigures::stall_seconds>, kStallBuckets}),
    Durable({"Durability", "ballast_checkpoint_last_success_timestamp_seconds", MetricType::kGauge, "run_id",
             "When the last checkpoint was written, by this daemon (Unix time).", reading::TimeOfCheckpoint}),
    Durable({"Durability", "ballast_checkpoint_last_success_step", MetricType::kGauge, "run_id",
             "Its step. A rewind may have undone it: see ballast_durable_step.",
             reading::OfCheckpoint<&CheckpointFigures::step>}),
    Durable({"Durability", "ballast_checkpoint_size_bytes", MetricType::kGauge, "run_id", "Size of all its files.",
             reading::OfCheckpoint<&CheckpointFigures::bytes>}),
    Durable({"Durability", "ballast_checkpoint_interval_target_seconds", MetricType::kGauge, "run_id",
             "How long it should take in training from one checkpoint to the next; where they are due by steps, at the "
             "pace of the last ones. 0: none is due yet."}),
    Durable(
        {"Durability", "ballast_unsaved_training_seconds", MetricType::kGauge, "run_id",
         "Training that no checkpoint of this daemon has: the steps since the last one written, from close to close, "
         "without the pauses between them."}),
    Durable({"Durability", "ballast_durable_step", MetricType::kGauge, "run_id",
             "The last step that survives a crash; 0: none.", reading::OfCheckpoint<&CheckpointFigures::step>}),
    {"Durability", "ballast_checkpoint_hooks_total", MetricType::kCounter, "result=success|failed|timeout|skipped",
     "Checkpoints for which storage.on_published was due, by how that command ended. skipped: a newer checkpoint came "
     "before its turn, too many runs waited, it was undone or deleted, or the daemon ended."},
    Durable({"Durability", "ballast_checkpoint_hook_failures_in_a_row", MetricType::kGauge, "run_id",
             "How often that command has failed, or was ended, since it last succeeded."}),
    Durable({"Durability", "ballast_checkpoint_verify_failures_total", MetricType::kCounter,
             "run_id reason=checksum|truncated|missing|manifest|version|other",
             "Checkpoints that were to be read back and are not whole, by what is wrong with them first."}),
    Durable(
        {"Durability", "ballast_restores_total", MetricType::kCounter, "run_id result=latest|older|failed",
         "Times that the run was to be read back from the disk; older: since newer checkpoints are damaged; failed: "
         "it stays there, since none could be read, there was no room, or they are another run's."}),
    Durable({"Durability", "ballast_journal_bytes_total", MetricType::kCounter, "run_id",
             "Written to the run's journal; nothing where its durability is that of checkpoints."}),
    Durable({"Durability", "ballast_journal_failures_total", MetricType::kCounter, "run_id",
             "Times that the journal could not be written: from then on the run's durability is that of checkpoints, "
             "until one is written."}),
    Durable({"Durability", "ballast_journal_replayed_steps_total", MetricType::kCounter, "run_id",
             "Steps that the journal had beyond the checkpoint that the run was read back from."}),
    {"Durability",
     "ballast_journal_fsync_duration_seconds",
     MetricType::kHistogram,
     "",
     "Of syncs of runs' journals, for which results wait with journal_sync; from the first one on.",
     {},
     kSyncBuckets},
    {"Durability",
     "ballast_restore_duration_seconds",
     MetricType::kHistogram,
     "",
     "Of a run that was read back, from its first file until it could train; from the first such run on.",
     {},
     kCheckpointBuckets},
    {"Durability", "ballast_storage_free_bytes", MetricType::kGauge, "",
     "Free for this daemon on the file system of storage.dir; none without storage."},
    {"Durability", "ballast_storage_size_bytes", MetricType::kGauge, "", "Size of that file system."},

    Followed({"Following", "ballast_followers", MetricType::kGauge, "run_id",
              "Readers that follow the run's weights now.", reading::OfFollowers<&FollowerFigures::count>}),
    Followed(
        {"Following", "ballast_follower_behind_seconds", MetricType::kGauge, "run_id",
         "For how long there has been a version that a reader wants and was not sent whole: of the one for which that "
         "is longest.",
         reading::OfFollowers<&FollowerFigures::behind_seconds>}),
    Followed(
        {"Following", "ballast_followers_ended_total", MetricType::kCounter, "run_id",
         "Readers whose call was ended since a new version needed the memory of the one that they were being sent."}),
    Followed({"Following", "ballast_follow_sent_bytes_total", MetricType::kCounter, "run_id kind=whole|changes",
              "Weights sent to readers that follow, in versions that came whole or as changes."}),
    Followed({"Following", "ballast_version_tags", MetricType::kGauge, "run_id",
              "Versions of the run's weights that have names, and stay until UntagVersion.",
              reading::OfFollowers<&FollowerFigures::tags>}),
    Followed({"Following", "ballast_version_tag_bytes", MetricType::kGauge, "run_id",
              "Of these versions, each counted whole: on the disk where the run has checkpoints, else in host memory.",
              reading::OfFollowers<&FollowerFigures::tag_bytes>}),
    Followed({"Following", "ballast_version_step", MetricType::kGauge, "run_id",
              "The step of the newest version; none are made while nobody follows.",
              reading::OfVersion<&VersionFigures::step>}),
    Followed({"Following", "ballast_version_make_duration_seconds", MetricType::kHistogram, "run_id",
              "From a step's close until the version was made of it, beside the next step; at a relay, for how long it "
              "came.",
              reading::OfVersion<&VersionFigures::make_seconds>, kStallBuckets}),
    Followed({"Following", "ballast_version_bytes", MetricType::kGauge, "run_id", "Of the newest version, sent whole.",
              reading::OfVersion<&VersionFigures::bytes>}),
    Followed({"Following", "ballast_version_change_bytes", MetricType::kGauge, "run_id",
              "Of what it has changed of the version before; 0: there was none.",
              reading::OfVersion<&VersionFigures::change_bytes>}),
    Followed({"Following", "ballast_version_changed_ratio", MetricType::kGauge, "run_id",
              "Weights that it has changed, as they are served, of all.",
              reading::OfVersion<&VersionFigures::changed_ratio>}),

    Relayed({"Relaying", "ballast_relay_connected", MetricType::kGauge, "run_id",
             "1 while the relay is being told of the run's versions by its upstream, else 0.",
             reading::OfRelay<&RelayFigures::connected>}),
    Relayed({"Relaying", "ballast_relay_version_timestamp_seconds", MetricType::kGauge, "run_id",
             "When the step of the newest version here closed, by the clock of the daemon that trains: how old the "
             "weights are that readers get.",
             reading::RelayClosedAt}),
    Relayed({"Relaying", "ballast_relay_received_bytes_total", MetricType::kCounter, "run_id kind=whole|changes",
             "Weights that came from the upstream, in versions that came whole or as changes."}),
    Relayed({"Relaying", "ballast_relay_failures_total", MetricType::kCounter,
             "run_id reason=unreachable|refused|damaged|circle|memory|spec",
             "Calls to the upstream that failed or were refused; what came damaged or out of order; and runs that "
             "could not be served here."}),

    {"Memory", "ballast_host_memory_used_bytes", MetricType::kGauge,
     "device kind=weights|momentum|variance|averages|gradients|staging|snapshots|client_state|following",
     "Host memory reserved by runs; of those on a GPU, their snapshots, client_state and following alone."},
    {"Memory", "ballast_host_memory_limit_bytes", MetricType::kGauge, "device",
     "What runs may reserve of it together."},
    {"Memory", "ballast_gpu_memory_used_bytes", MetricType::kGauge,
     "device kind=weights|momentum|variance|averages|gradients|staging", "GPU memory reserved by runs."},
    {"Memory", "ballast_gpu_memory_limit_bytes", MetricType::kGauge, "device",
     "What runs may reserve of it together; 0 once the GPU failed."},
    {"Memory", "ballast_gpu_failures_total", MetricType::kCounter, "device",
     "GPUs that failed for good; the runs on it are lost."},
});

#undef BALLAST_RUN_STATES
#undef BALLAST_PREDICTORS
#undef BALLAST_TORN_REASONS

consteval FamilyRef::FamilyRef(const char* name) : index_(0) {
  while (std::string_view(kMetricFamilies.at(index_).name) != name) ++index_;  // no such family: at() does not compile
}

}  // namespace ballast
