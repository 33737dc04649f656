// What a run takes for a loss spike, and what it does about it.
#include <re2/re2.h>

#include <algorithm>
#include <cmath>
#include <limits>
#include <memory>
#include <numeric>
#include <utility>
#include <vector>

#include "absl/strings/str_cat.h"
#include "absl/strings/str_join.h"

#include "server/base/status_macros.h"
#include "server/convert/convert.h"
#include "server/spec/layers.h"

namespace ballast {
namespace {

using absl::InvalidArgumentError;
using absl::StrCat;

constexpr uint32_t kMostSteps = 1000000;
// Every pattern may meet every layer's name, so its work is bounded in all of these.
constexpr int kMostThresholds = 1024;
constexpr size_t kMostPatternBytes = 256;
constexpr int64_t kPatternMemory = 64 << 10;  // of one, as RE2 counts it: some 700 instructions
constexpr int kMostInstructions = 1 << 15;    // of all together
// RMS_t of tensors whose rule lists no beta2.
constexpr double kNoBound = std::numeric_limits<double>::infinity();

absl::Status CheckAbove0(absl::string_view field, double value) {
  if (std::isfinite(value) && value > 0) return absl::OkStatus();
  return InvalidArgumentError(StrCat("spikes.", field, " is ", value, "; wanted: a finite number above 0"));
}

absl::Status TakeNumber(absl::string_view field, bool given, double value, double* taken) {
  if (!given) return absl::OkStatus();
  *taken = value;
  return CheckAbove0(field, value);
}

absl::Status TakeSteps(absl::string_view field, bool given, uint32_t value, uint32_t least, uint32_t* taken) {
  if (!given) return absl::OkStatus();
  *taken = value;
  if (value >= least && value <= kMostSteps) return absl::OkStatus();
  return InvalidArgumentError(StrCat("spikes.", field, " is ", value, "; wanted: ", least, " to ", kMostSteps));
}

absl::Status TakeLimits(const v1::SpikeSpec& spikes, SpikeSettings* made) {
  RETURN_IF_ERROR(
      TakeNumber("rms_threshold", spikes.has_rms_threshold(), spikes.rms_threshold(), &made->rms_threshold));
  if (spikes.has_rms_margin()) {
    made->rms_margin = spikes.rms_margin();
    if (!std::isfinite(made->rms_margin) || (made->rms_margin != 0 && made->rms_margin < 1)) {
      return InvalidArgumentError(
          StrCat("spikes.rms_margin is ", made->rms_margin, "; wanted: a finite number of at least 1, or 0 for none"));
    }
  }
  if (spikes.has_rms_min_elements()) {
    made->rms_min_elements = spikes.rms_min_elements();
    if (made->rms_min_elements == 0) {
      return InvalidArgumentError("spikes.rms_min_elements is 0; wanted: at least 1, which watches every tensor");
    }
  }
  RETURN_IF_ERROR(TakeNumber("loss_sigmas", spikes.has_loss_sigmas(), spikes.loss_sigmas(), &made->loss_sigmas));
  RETURN_IF_ERROR(TakeNumber("norm_sigmas", spikes.has_norm_sigmas(), spikes.norm_sigmas(), &made->norm_sigmas));
  RETURN_IF_ERROR(TakeSteps("warmup_steps", spikes.has_warmup_steps(), spikes.warmup_steps(), 0, &made->warmup_steps));
  RETURN_IF_ERROR(TakeSteps("rewind_steps", spikes.has_rewind_steps(), spikes.rewind_steps(), 1, &made->rewind_steps));
  RETURN_IF_ERROR(TakeSteps("max_rewinds", spikes.has_max_rewinds(), spikes.max_rewinds(), 1, &made->most_rewinds));
  RETURN_IF_ERROR(TakeSteps("max_skips", spikes.has_max_skips(), spikes.max_skips(), 1, &made->most_skips));
  return TakeSteps("cooldown_steps", spikes.has_cooldown_steps(), spikes.cooldown_steps(), 0, &made->cooldown_steps);
}

absl::Status CheckActOn(const v1::SpikeSpec& spikes, v1::SpikeKind kind, SpikeAction action) {
  if (!v1::SpikeKind_IsValid(kind) || kind == v1::SPIKE_KIND_UNSPECIFIED) {
    return InvalidArgumentError(StrCat("spikes.act_on has ", static_cast<int>(kind), ", which is no kind of spike"));
  }
  if (action == SpikeAction::kWarn) {
    return InvalidArgumentError(
        "spikes.act_on is given, but spikes.action is SPIKE_ACTION_WARN, which warns of every kind: leave act_on "
        "unset, or set action to SPIKE_ACTION_SKIP or SPIKE_ACTION_REWIND");
  }
  if (kind == v1::SPIKE_KIND_CURVATURE && !spikes.curvature()) {
    return InvalidArgumentError(
        "spikes.act_on has SPIKE_KIND_CURVATURE, but spikes.curvature is false, so that it is not measured: set it to "
        "true, or take the kind out");
  }
  return absl::OkStatus();
}

absl::Status TakeAction(const v1::RunSpec& spec, SpikeSettings* made) {
  const v1::SpikeSpec& spikes = spec.spikes();
  if (!v1::SpikeAction_IsValid(spikes.action())) {
    return InvalidArgumentError(
        StrCat("spikes.action is ", static_cast<int>(spikes.action()), ", which this version lacks"));
  }
  if (spikes.action() == v1::SPIKE_ACTION_SKIP) made->action = SpikeAction::kSkip;
  if (spikes.action() == v1::SPIKE_ACTION_REWIND) made->action = SpikeAction::kRewind;
  if (made->action == SpikeAction::kRewind && spec.rewind().snapshots() == 0) {
    return InvalidArgumentError(
        "spikes.action = SPIKE_ACTION_REWIND needs snapshots to go back to, but rewind.snapshots is 0: set it to 1 or "
        "more, or change spikes.action");
  }
  for (const int kind : spikes.act_on()) {
    RETURN_IF_ERROR(CheckActOn(spikes, static_cast<v1::SpikeKind>(kind), made->action));
    made->acts_on[static_cast<size_t>(kind) - 1] = true;
  }
  if (spikes.act_on().empty() && made->action == SpikeAction::kSkip) {
    made->acts_on[static_cast<size_t>(SpikeKind::kRms)] = true;
    made->acts_on[static_cast<size_t>(SpikeKind::kGradientNorm)] = true;
  }
  if (spikes.act_on().empty() && made->action == SpikeAction::kRewind) {
    made->acts_on[static_cast<size_t>(SpikeKind::kLoss)] = true;
  }
  return absl::OkStatus();
}

// The largest RMS_t that one of the layer's watched tensors can have, sqrt(1 / (1 - beta2)); 0: none has one.
std::vector<double> RmsBounds(const RunSpec& spec, const LayerGroups& layers) {
  std::vector<double> bounds(layers.names().size());
  for (uint32_t i = 0; i < spec.tensors.size(); ++i) {
    const GroupSpec& group = spec.groups[spec.tensors[i].group];
    if (!WatchesRms(spec, spec.tensors[i])) continue;
    const std::optional<double> beta2 = HyperOf(group, group.hyper, "beta2");
    const double bound = beta2 ? std::sqrt(1 / (1 - *beta2)) : kNoBound;
    bounds[layers.group(i)] = std::max(bounds[layers.group(i)], bound);
  }
  return bounds;
}

absl::Status OutOfReach(const std::string& field, double threshold, double bound, uint64_t least) {
  if (bound == 0) {
    return InvalidArgumentError(
        StrCat(field, " is ", threshold,
               ", but no tensor it is for is watched: RMS_t is watched where the rule has a second moment, of tensors "
               "of two dimensions and at least spikes.rms_min_elements = ",
               least, " elements; lower that, or leave the threshold unset"));
  }
  return InvalidArgumentError(StrCat(field, " is ", threshold, ", but RMS_t is at most sqrt(1 / (1 - beta2)), here ",
                                     bound, ": it would never be reached; lower it, or raise beta2"));
}

// `left`: instructions that this pattern and those after it may have.
absl::StatusOr<std::unique_ptr<RE2>> ToPattern(const std::string& layer, const std::string& at, int* left) {
  if (layer.size() > kMostPatternBytes) {
    return InvalidArgumentError(StrCat(at, ".layer has ", layer.size(), " bytes; wanted: at most ", kMostPatternBytes));
  }
  RE2::Options options(RE2::Quiet);
  options.set_max_mem(kPatternMemory);
  auto pattern = std::make_unique<RE2>(layer, options);
  if (!pattern->ok()) {
    return InvalidArgumentError(StrCat(at, ".layer '", layer, "' is no regular expression (RE2) of ", kPatternMemory,
                                       " bytes of memory at most: ", pattern->error()));
  }
  if (*left -= pattern->ProgramSize(); *left >= 0) return pattern;
  return InvalidArgumentError(StrCat(at, ".layer '", layer, "' is one too many: with those before it, it has ",
                                     kMostInstructions - *left, " instructions; wanted: at most ", kMostInstructions,
                                     " in all patterns together; make them shorter or fewer"));
}

// The layers that the rule's pattern matches: at least one, unless the others are in other parts of the run.
absl::StatusOr<std::vector<uint32_t>> LayersOf(const v1::LayerThreshold& rule, const std::string& at,
                                               const LayerGroups& layers, bool is_part, int* instructions_left) {
  RETURN_IF_ERROR(CheckAbove0(at + ".rms_threshold", rule.rms_threshold()));
  ASSIGN_OR_RETURN(const std::unique_ptr<RE2> pattern, ToPattern(rule.layer(), "spikes." + at, instructions_left));
  std::vector<uint32_t> matched;
  for (uint32_t layer = 0; layer < layers.names().size(); ++layer) {
    if (RE2::FullMatch(layers.names()[layer], *pattern)) matched.push_back(layer);
  }
  if (!matched.empty() || is_part) return matched;
  return InvalidArgumentError(
      StrCat("spikes.", at, ".layer '", rule.layer(),
             "' matches no layer's whole name; the layers are: ", absl::StrJoin(layers.names(), ", ")));
}

// A threshold that was asked for, and the layers it is for.
struct AskedFor {
  std::string field;
  double threshold = 0;
  std::vector<uint32_t> layers = {};
};

// In the order in which they hold.
absl::StatusOr<std::vector<AskedFor>> ThresholdsOf(const v1::SpikeSpec& spikes, const LayerGroups& layers,
                                                   bool is_part) {
  if (spikes.layers_size() > kMostThresholds) {
    return InvalidArgumentError(
        StrCat("spikes.layers has ", spikes.layers_size(), " entries; wanted: at most ", kMostThresholds));
  }
  std::vector<AskedFor> asked;
  int instructions_left = kMostInstructions;
  for (int i = 0; i < spikes.layers_size(); ++i) {
    const std::string at = StrCat("layers[", i, "]");
    const v1::LayerThreshold& rule = spikes.layers(i);
    ASSIGN_OR_RETURN(std::vector<uint32_t> matched, LayersOf(rule, at, layers, is_part, &instructions_left));
    asked.push_back({StrCat("spikes.", at, ".rms_threshold"), rule.rms_threshold(), std::move(matched)});
  }
  // The default is nobody's wish: where it is out of reach there are no RMS events.
  if (!spikes.has_rms_threshold()) return asked;
  asked.push_back({"spikes.rms_threshold", spikes.rms_threshold(), std::vector<uint32_t>(layers.names().size())});
  std::iota(asked.back().layers.begin(), asked.back().layers.end(), 0);
  return asked;
}

// Has small tensors watched where a threshold is for nothing else.
void WatchAskedFor(const std::vector<AskedFor>& all_asked, const LayerGroups& layers, RunSpec* made) {
  std::vector<bool> watched(layers.names().size()), small(layers.names().size());
  for (uint32_t i = 0; i < made->tensors.size(); ++i) {
    if (WatchesRms(*made, made->tensors[i])) watched[layers.group(i)] = true;
  }
  for (const AskedFor& asked : all_asked) {
    const auto is_watched = [&](uint32_t layer) { return watched[layer]; };
    if (std::any_of(asked.layers.begin(), asked.layers.end(), is_watched)) continue;
    for (const uint32_t layer : asked.layers) small[layer] = true;
  }
  for (uint32_t i = 0; i < made->tensors.size(); ++i) made->tensors[i].rms_asked_for = small[layers.group(i)];
}

absl::Status CheckReach(const v1::SpikeSpec& spikes, const RunSpec& made, const std::vector<AskedFor>& all_asked,
                        const std::vector<double>& bounds) {
  for (const AskedFor& asked : all_asked) {
    double bound = 0;
    for (const uint32_t layer : asked.layers) bound = std::max(bound, bounds[layer]);
    if (bound == 0 && made.part) continue;  // other parts have what is watched
    if (asked.threshold > bound) return OutOfReach(asked.field, asked.threshold, bound, made.spikes.rms_min_elements);
  }
  const double highest = *std::max_element(bounds.begin(), bounds.end());
  const bool any_rms =
      std::any_of(made.groups.begin(), made.groups.end(), [](const GroupSpec& group) { return group.kernel->has_rms; });
  if (spikes.has_rms_min_elements() && any_rms && highest == 0 && !made.part) {
    return InvalidArgumentError(StrCat("spikes.rms_min_elements is ", made.spikes.rms_min_elements,
                                       ", and no tensor has so many: no RMS_t would be watched; lower it"));
  }
  if (spikes.has_rms_margin() && highest > 0 && made.spikes.rms_margin > highest) {
    return InvalidArgumentError(StrCat("spikes.rms_margin is ", made.spikes.rms_margin,
                                       ", but RMS_t is at most sqrt(1 / (1 - beta2)), here ", highest,
                                       ": so many times what is usual would never be reached; lower it"));
  }
  return absl::OkStatus();
}

}  // namespace

absl::Status TakeSpikes(const v1::RunSpec& spec, RunSpec* made) {
  const v1::SpikeSpec& spikes = spec.spikes();
  RETURN_IF_ERROR(TakeLimits(spikes, &made->spikes));
  RETURN_IF_ERROR(TakeAction(spec, &made->spikes));
  made->spikes.curvature = spikes.curvature();
  const LayerGroups layers(TensorNames(*made), made->layer_groups);
  ASSIGN_OR_RETURN(const std::vector<AskedFor> asked, ThresholdsOf(spikes, layers, made->part.has_value()));
  if (!spikes.has_rms_min_elements()) WatchAskedFor(asked, layers, made);  // else it was said how small
  RETURN_IF_ERROR(CheckReach(spikes, *made, asked, RmsBounds(*made, layers)));
  for (const std::string& name : layers.names()) made->layers.push_back({name, made->spikes.rms_threshold});
  for (auto one = asked.rbegin(); one != asked.rend(); ++one) {  // the first that matches holds
    for (const uint32_t layer : one->layers) made->layers[layer].rms_threshold = one->threshold;
  }
  return absl::OkStatus();
}

}  // namespace ballast
