// Loss spikes: what may be found at a step, and how a run looks for it and answers.
//
// The thresholds 2.3 (RMS) and 3.2 (loss) and the windows of 1 to 8 and 10 steps are those that StableAdamW's authors
// used (arXiv 2304.13013); the margin and the least size are from tests/studies/results/spike_study.md. Values; no thread
// rule.
#pragma once

#include <array>
#include <cstddef>
#include <cstdint>
#include <optional>
#include <string_view>

namespace ballast {

enum class SpikeKind : uint8_t {
  kRms,           // RMS_t of a layer's tensor is at its threshold, and far above those before
  kCurvature,     // the loss curves too much along the last update for its step size
  kGradientNorm,  // the gradient's norm lies far above those of the steps before
  kNonfinite,     // a gradient is not finite
  kLoss,          // the loss lies far above those of the steps before and stays there, or is not finite
};
inline constexpr size_t kSpikeKinds = 5;
// How many kinds foretell a loss spike; they come first in SpikeKind.
inline constexpr size_t kPredictors = 3;
inline constexpr std::array<std::string_view, kSpikeKinds> kSpikeKindNames = {"rms", "curvature", "gradient_norm",
                                                                              "nonfinite", "loss"};
constexpr std::string_view NameOf(SpikeKind kind) { return kSpikeKindNames[static_cast<size_t>(kind)]; }

enum class SpikeAction : uint8_t {
  kWarn,    // the ranks are told, with the step's result
  kSkip,    // the step is not applied; staged
  kRewind,  // the run goes back to a snapshot
};
inline constexpr std::array<std::string_view, 3> kSpikeActionNames = {"warn", "skip", "rewind"};
constexpr std::string_view NameOf(SpikeAction action) { return kSpikeActionNames[static_cast<size_t>(action)]; }

struct SpikeEvent {
  SpikeKind kind = SpikeKind::kRms;
  std::optional<uint32_t> layer = {};   // of kRms and kCurvature
  std::optional<uint32_t> tensor = {};  // the layer's largest, or the first with a gradient that is not finite
  std::optional<uint32_t> rank = {};    // of kLoss: the first whose loss is not finite
  double value = 0;
  double threshold = 0;  // that the value reached; 0 for kNonfinite, and for a loss that is not finite
  // Of kLoss the spike's first step, whose loss is the value. Of the others the first step of a loss spike that goes on,
  // so that they foretell none; 0: none does.
  uint64_t since = 0;
};

struct SpikeSettings {
  double rms_threshold = 2.3;  // for layers that have none of their own
  // Times the largest RMS_t of the layer's last 128 steps, that an event reaches as well; 0: the threshold alone counts.
  double rms_margin = 2.25;
  uint64_t rms_min_elements = 4096;  // of a tensor whose RMS_t is watched: WatchesRms (server/spec/run_spec.h)
  uint32_t warmup_steps = 100;       // in which only kNonfinite and a loss that is not finite are found
  double loss_sigmas = 3.2;          // as in LossWatch
  double norm_sigmas = 6;            // standard deviations above the mean of the last 128 steps
  bool curvature = false;            // is measured

  SpikeAction action = SpikeAction::kWarn;
  std::array<bool, kSpikeKinds> acts_on = {};  // by kind; for kSkip and kRewind
  uint32_t rewind_steps = 20;                  // a rewind goes back at least so many
  uint32_t most_rewinds = 3;                   // in a run; the next one stops it
  uint32_t most_skips = 5;                     // in a row; the next step is applied
  uint32_t cooldown_steps = 0;                 // after an action, without another one, except skips in a row
};

}  // namespace ballast
