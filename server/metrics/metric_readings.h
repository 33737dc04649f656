// How the families of metric_table.h are read from what is reported. Functions without a state; thread-safe.
#pragma once

#include <cmath>
#include <cstddef>
#include <cstdint>
#include <string_view>

#include "server/metrics/metric_families.h"
#include "server/metrics/metrics.h"
#include "server/metrics/samples.h"
#include "server/stability/spike_score.h"
#include "server/stability/spikes.h"
#include "server/step/step_machine.h"

namespace ballast {

// How values are read from reports. A Field is a number or, where there may be none, an optional one.
namespace reading {

template <auto Field>
void OfRun(const RunLabels& run, Samples& to) {
  to.AddNumber(run.*Field);
}

// At least some of its tensors were updated.
inline bool Updated(const StepRecord& step) {
  return step.outcome == Outcome::kApplied || step.outcome == Outcome::kPartial;
}

template <auto Field>
void AtClose(const StepRecord& step, Samples& to) {
  to.AddNumber(step.*Field);
}

template <auto Field>
void AtUpdate(const StepRecord& step, Samples& to) {
  if (Updated(step)) to.AddNumber(step.*Field);
}

template <auto Field>
void OfLayers(const StepRecord& step, Samples& to) {
  if (!Updated(step)) return;
  for (size_t layer = 0; layer < step.layers.size(); ++layer) to.AddLayer(layer, step.layers[layer].*Field);
}

inline void Applied(const StepRecord& step, Samples& to) {
  if (step.outcome == Outcome::kApplied) to.Add(1);
}

template <Outcome kOutcome>
void ByReason(const StepRecord& step, Samples& to) {
  if (step.outcome == kOutcome) to.Add(step.reason, 1);
}

// What trainers discard, they know to be wrong.
inline void NonfiniteTensors(const StepRecord& step, Samples& to) {
  if (!step.discarded()) to.AddNumber(step.nonfinite_tensors);
}

inline void TimeOfUpdate(const StepRecord& step, Samples& to) {
  if (Updated(step)) to.Add(to.unix_s());
}

inline void Phases(const StepRecord& step, Samples& to) {
  if (!Updated(step)) return;
  to.Add("receive", step.receive_seconds);
  to.Add("update", step.update_seconds);
}

inline void RmsOfTensors(const StepRecord& step, Samples& to) {
  if (Updated(step)) to.AddAll(step.tensor_rms);
}

template <auto Field>
void OfCheckpoint(const CheckpointFigures& checkpoint, Samples& to) {
  to.AddNumber(checkpoint.*Field);
}

inline void TimeOfCheckpoint(const CheckpointFigures&, Samples& to) { to.Add(to.unix_s()); }

inline void PhasesOfCheckpoint(const CheckpointFigures& checkpoint, Samples& to) {
  to.Add("snapshot", checkpoint.snapshot_seconds);
  to.Add("write", checkpoint.write_seconds);
  to.Add("publish", checkpoint.publish_seconds);
}

template <auto Field>
void OfVersion(const VersionFigures& version, Samples& to) {
  to.AddNumber(version.*Field);
}

template <auto Field>
void OfFollowers(const FollowerFigures& followers, Samples& to) {
  to.AddNumber(followers.*Field);
}

template <auto Field>
void OfRelay(const RelayFigures& relay, Samples& to) {
  to.AddNumber(relay.*Field);
}

inline void RelayClosedAt(const RelayFigures& relay, Samples& to) {
  if (relay.closed_unix_s > 0) to.Add(relay.closed_unix_s);
}

template <auto Field>
void OfSpikes(const SpikeReport& spikes, Samples& to) {
  to.AddNumber(spikes.*Field);
}

template <SpikeKind kKind>
void EventsOf(const SpikeReport& spikes, Samples& to) {
  for (const SpikeEvent& event : spikes.events) {
    if (event.kind == kKind) to.Add(1);
  }
}

inline void RmsEvents(const SpikeReport& spikes, Samples& to) {
  for (const SpikeEvent& event : spikes.events) {
    if (event.kind == SpikeKind::kRms && event.since == 0) to.AddLayer(*event.layer, 1);
  }
}

inline void NonfiniteLoss(const StepRecord& report, Samples& to) {
  if (report.loss && !std::isfinite(*report.loss)) to.Add(1);
}

// Calls use(name, counts).
template <class Use>
void ForEachPredictor(const SpikeReport& spikes, Use use) {
  for (size_t i = 0; i < kPredictors; ++i) use(NameOf(static_cast<SpikeKind>(i)), spikes.scores[i]);
}

template <auto Field>
void Score(const SpikeReport& spikes, Samples& to) {
  ForEachPredictor(spikes, [&](std::string_view name, const SpikeScore::Counts& counts) {
    to.SetTotal(name, static_cast<double>(counts.*Field));
  });
}

inline void LeadSteps(const SpikeReport& spikes, Samples& to) {
  ForEachPredictor(spikes, [&](std::string_view name, const SpikeScore::Counts& counts) {
    uint64_t steps = 0;
    for (size_t lead = 1; lead < counts.leads.size(); ++lead) steps += lead * counts.leads[lead];
    to.SetTotal(name, static_cast<double>(steps));
  });
}

inline void Chance(const SpikeReport& spikes, Samples& to) {
  ForEachPredictor(spikes,
                   [&](std::string_view name, const SpikeScore::Counts& counts) { to.Add(name, counts.chance()); });
}

}  // namespace reading

}  // namespace ballast
