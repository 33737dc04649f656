// A run's description after validation: names are resolved to the registry's entries, and defaults are filled in.
// ToRunSpec (server/convert/convert.h) makes it; it is immutable afterwards, and shared by the run's strand and the
// streams.
#pragma once

#include <algorithm>
#include <cstdint>
#include <optional>
#include <span>
#include <string>
#include <string_view>
#include <vector>

#include "kernels/registry.h"
#include "server/stability/spikes.h"
#include "server/stability/tensor_clip.h"

namespace ballast {

struct TensorSpec {
  std::string name;
  std::vector<uint64_t> shape = {};
  uint64_t elements = 0;         // at least 1
  kernels::WireIndex dtype = 0;  // what the trainer computes in
  kernels::WireIndex gradient_format = 0;
  kernels::WireIndex serving_format = 0;
  // Elements that share a scale when served, a divisor of `elements`; 0: served without scales.
  uint64_t row_length = 0;
  uint32_t group = 0;
  double lr_scale = 1;
  double wd_scale = 1;
  uint64_t key = 0;            // of its random bits: xxh3_64(name, seed)
  bool rms_asked_for = false;  // by a threshold for its layer: RMS_t is watched although it is small
};

struct GroupSpec {
  const kernels::Kernel* kernel = nullptr;
  const kernels::MasterFormat* master = nullptr;
  bool stochastic = true;
  std::vector<double> hyper;  // in the order of kernel->hypers
};

// What becomes of a gradient that is not finite. The block it falls in keeps its contents whatever the policy.
enum class Nonfinite {
  kSkipTensor,  // nothing more happens
  kSkipStep,    // the step is skipped; staged
  kStop,        // no later step begins; a staged step is aborted
};

// A layer, as LayerGroups (server/spec/layers.h) forms it from the tensors' names.
struct LayerSpec {
  std::string name;
  double rms_threshold = 0;
};

// What a crash may take: ballast.v1.DurabilityMode.
enum class DurabilityMode { kCheckpoint, kJournal, kJournalSync };

// When a run is written to the daemon's storage.
struct CheckpointSettings {
  uint32_t every_steps = 0;  // 0: not by steps
  double every_s = 600;      // 0: not by time
  uint32_t retain = 2;       // checkpoints that are kept
  DurabilityMode durability = DurabilityMode::kCheckpoint;
  uint32_t journal_steps = 0;  // closed steps that may wait to be durable, with a journal; else 0
};

// What this daemon has of a run that several own: ballast.v1.RunPart. The numbers in the run are for the clients.
struct RunPart {
  uint32_t index = 0;
  uint32_t count = 0;
};

// That readers may follow the run: ballast.v1.FollowSpec.
struct FollowSettings {
  uint32_t every = 1;     // steps from version to version
  uint32_t readers = 16;  // at a time
  uint32_t tags = 0;      // versions that may have names, at a time
  bool averages = false;  // also RunSpec::averages
  // Also in these, each once; none in which all tensors are served.
  std::vector<kernels::WireIndex> formats = {};
};

inline constexpr size_t kMostAverages = 4;  // of a run's weights

inline constexpr uint32_t kJournalSteps = 16;  // CheckpointSettings::journal_steps where nothing is asked for

struct RunSpec {
  std::string run_id;
  std::vector<TensorSpec> tensors = {};
  std::vector<GroupSpec> groups = {};
  uint64_t seed = 0;
  uint32_t ranks = 1;                        // at most
  uint32_t accumulation = 1;                 // micro-batches a step, at most
  bool mean = true;                          // of the ranks' gradients; false: their sum
  bool staged = false;                       // tensors are updated when all gradients are judged
  std::optional<double> max_grad_norm = {};  // staged; the gradient's norm is clipped to it
  bool dynamic_loss_scale = false;           // staged, and kSkipStep: the trainers adapt to steps skipped
  Nonfinite nonfinite = Nonfinite::kSkipTensor;
  SpikeSettings spikes = {};
  std::optional<TensorClip::Options> tensor_clip = {};
  std::vector<LayerSpec> layers = {};
  uint32_t snapshots = 0;  // of past steps, kept at most
  uint32_t snapshot_every = 50;
  std::optional<CheckpointSettings> checkpoints = {};  // none: nothing of the run is on a disk
  std::optional<RunPart> part = {};                    // none: this daemon has all of the run
  std::optional<FollowSettings> follow = {};           // none: nobody may
  std::vector<double> averages = {};                   // of the weights, by their decays
  bool rewinds_torn = false;                           // a step that closes PARTIAL is undone
  uint32_t stats_every = 10;
  double rank_timeout_s = 60;
  double step_timeout_s = 0;     // 0: none
  bool leaves_out_lost = false;  // steps go on without ranks that were away for too long
  // The daemon's limits when the run was created.
  uint64_t chunk_elements = 0;  // C of the wire: a multiple of the tile
  uint64_t credit_bytes = 0;
  double lease_s = 10;
  uint32_t layer_groups = 64;
  double pull_timeout_s = 60;
};

inline std::vector<std::string> TensorNames(const RunSpec& spec) {
  std::vector<std::string> names;
  for (const TensorSpec& t : spec.tensors) names.push_back(t.name);
  return names;
}

// A tensor as a matrix: the first dimension's length is that of a column; others are one row. At least two dimensions.
inline uint64_t MatrixRows(const TensorSpec& t) { return t.shape[0]; }
// Whether the tensor is updated as a matrix.
inline bool IsOverMatrix(const RunSpec& spec, const TensorSpec& t) {
  return spec.groups[t.group].kernel->fit != nullptr;
}

inline bool HasMatrices(const RunSpec& spec) {
  for (const GroupSpec& group : spec.groups) {
    if (group.kernel->fit != nullptr) return true;
  }
  return false;
}

// Whether some weight is stored in two components.
inline bool HasPairedMaster(const RunSpec& spec) {
  for (const GroupSpec& group : spec.groups) {
    if (group.master->paired) return true;
  }
  return false;
}

// Room for snapshots: where the run is checkpointed, for one more, that is being written.
inline uint32_t SnapshotImages(const RunSpec& spec) { return spec.snapshots + (spec.checkpoints ? 1 : 0); }

// Whether steps are written as they are made.
inline bool HasJournal(const RunSpec& spec) {
  return spec.checkpoints && spec.checkpoints->durability != DurabilityMode::kCheckpoint;
}

// Whether several contributions make a gradient: they are summed in fp32.
inline bool SumsGradients(const RunSpec& spec) { return spec.ranks > 1 || spec.accumulation > 1; }

// Whether the detector of loss spikes watches the tensor's RMS_t: of few elements it is noise. One dimension with very
// many is many parameters in one, as trainers flatten them. A threshold for small tensors alone asks for them.
inline bool WatchesRms(const RunSpec& spec, const TensorSpec& t) {
  const uint64_t least = spec.spikes.rms_min_elements;
  constexpr uint64_t kFlat = 256;  // times
  const bool matrix = least == 1 || t.shape.size() >= 2;
  if (!spec.groups[t.group].kernel->has_rms) return false;
  return t.rms_asked_for || t.elements / (matrix ? 1 : kFlat) >= least;
}
// Whether the tensor's curvature is probed, and its sampled gradients kept for it.
inline bool ProbesCurvature(const RunSpec& spec, const TensorSpec& t) {
  return spec.spikes.curvature && spec.groups[t.group].kernel->curvature != nullptr;
}

// Whether a step's gradients are measured before any is applied.
inline bool JudgesGradients(const RunSpec& spec) {
  return spec.staged &&
         (spec.max_grad_norm || spec.nonfinite != Nonfinite::kSkipTensor || spec.spikes.action == SpikeAction::kSkip);
}

// The value, among `values`, of the group's hyperparameter of this name; none: the group's rule has no such one.
inline std::optional<double> HyperOf(const GroupSpec& group, std::span<const double> values, std::string_view name) {
  for (size_t h = 0; h < values.size(); ++h) {
    if (group.kernel->hypers[h].name == name) return values[h];
  }
  return std::nullopt;
}

// By group, the values that hold where a step brings none.
inline std::vector<std::vector<double>> HyperOfSpec(const RunSpec& spec) {
  std::vector<std::vector<double>> values;
  for (const GroupSpec& group : spec.groups) values.push_back(group.hyper);
  return values;
}

inline const kernels::WireFormat& WireFormatAt(kernels::WireIndex format) {
  return kernels::WireFormats()[static_cast<size_t>(format)];
}
inline uint64_t WireBytes(kernels::WireIndex format) { return WireFormatAt(format).bytes; }
inline uint64_t GradientBytes(const TensorSpec& t) { return t.elements * WireBytes(t.gradient_format); }
inline uint64_t ServingBytes(const TensorSpec& t) { return t.elements * WireBytes(t.serving_format); }
inline uint64_t ScaleCount(const TensorSpec& t) { return t.row_length == 0 ? 0 : t.elements / t.row_length; }

// How many elements share a scale where the tensor is served in this format: a row, that is the last dimension. A tensor
// of one dimension, or with rows of one element, counts as one row. 0: the format has no scales.
inline uint64_t RowLength(const TensorSpec& t, kernels::WireIndex format) {
  const kernels::Scaling scaling = WireFormatAt(format).scaling;
  if (scaling == kernels::Scaling::kNone) return 0;
  const bool rows = scaling == kernels::Scaling::kRow && t.shape.size() > 1 && t.shape.back() > 1;
  return rows ? t.shape.back() : t.elements;
}
// Whether all tensors are served in this format.
inline bool IsServedIn(const RunSpec& spec, kernels::WireIndex format) {
  return std::all_of(spec.tensors.begin(), spec.tensors.end(),
                     [format](const TensorSpec& t) { return t.serving_format == format; });
}
// The run as readers have it who follow it in this format: as one that is served in it.
inline RunSpec ServedIn(RunSpec spec, kernels::WireIndex format) {
  for (TensorSpec& t : spec.tensors) {
    t.serving_format = format;
    t.row_length = RowLength(t, format);
  }
  if (spec.follow) spec.follow->formats.clear();
  return spec;
}
// The formats, beside those that the tensors are served in, in which readers may follow the run.
inline std::span<const kernels::WireIndex> FollowedFormats(const RunSpec& spec) {
  if (!spec.follow) return {};
  return spec.follow->formats;
}

// Chunk k of a tensor is elements [ChunkBegin, ChunkEnd).
inline uint64_t ChunkCount(const RunSpec& spec, const TensorSpec& t) {
  return (t.elements + spec.chunk_elements - 1) / spec.chunk_elements;
}
// By tensor, how many chunks of the run come before its first; the last entry is the number of all chunks.
inline std::vector<uint64_t> ChunkStarts(const RunSpec& spec) {
  std::vector<uint64_t> starts;
  starts.reserve(spec.tensors.size() + 1);
  starts.push_back(0);
  for (const TensorSpec& t : spec.tensors) starts.push_back(starts.back() + ChunkCount(spec, t));
  return starts;
}
inline uint64_t ChunkBegin(const RunSpec& spec, uint64_t chunk) { return chunk * spec.chunk_elements; }
inline uint64_t ChunkEnd(const RunSpec& spec, const TensorSpec& t, uint64_t chunk) {
  const uint64_t end = (chunk + 1) * spec.chunk_elements;
  return end < t.elements ? end : t.elements;
}

// The scales that elements [first, last) need, as indices into the tensor's scales.
struct ScaleRange {
  uint64_t first = 0, last = 0;
  uint64_t size() const { return last - first; }
};
inline ScaleRange ScalesOf(uint64_t row_length, uint64_t first, uint64_t last) {
  if (row_length == 0) return {};
  return {first / row_length, (last - 1) / row_length + 1};
}
inline ScaleRange ScalesOf(const TensorSpec& t, uint64_t first, uint64_t last) {
  return ScalesOf(t.row_length, first, last);
}

}  // namespace ballast
