#include "client/cpp/parts/merge.h"

#include <algorithm>
#include <cmath>
#include <limits>
#include <map>
#include <optional>
#include <set>

#include "absl/strings/str_cat.h"
#include "absl/strings/str_join.h"

#include "client/cpp/parts/merge_follow.h"

namespace ballast {
namespace {

void Add(const v1::ByteCounts& part, v1::ByteCounts* whole) {
  whole->set_weights(whole->weights() + part.weights());
  whole->set_momentum(whole->momentum() + part.momentum());
  whole->set_variance(whole->variance() + part.variance());
  whole->set_gradients(whole->gradients() + part.gradients());
  whole->set_staging(whole->staging() + part.staging());
  whole->set_padding(whole->padding() + part.padding());
  whole->set_snapshots(whole->snapshots() + part.snapshots());
  whole->set_client_state(whole->client_state() + part.client_state());
  whole->set_following(whole->following() + part.following());
  whole->set_averages(whole->averages() + part.averages());
}

// From what nothing can be said of to what goes well.
int Badness(v1::RunState state) {
  switch (state) {
    case v1::RUN_STATE_FAILED:
      return 5;
    case v1::RUN_STATE_WAITING:
      return 4;
    case v1::RUN_STATE_IDLE:
      return 3;
    case v1::RUN_STATE_TRAINING:
      return 2;
    case v1::RUN_STATE_FINISHED:
      return 1;
    default:
      return 0;
  }
}

bool Updates(v1::StepOutcome outcome) {
  return outcome == v1::STEP_OUTCOME_APPLIED || outcome == v1::STEP_OUTCOME_PARTIAL;
}

// Of parts that differ.
v1::StepOutcome Merged(const std::set<v1::StepOutcome>& outcomes) {
  if (outcomes.size() == 1) return *outcomes.begin();
  if (std::any_of(outcomes.begin(), outcomes.end(), Updates)) return v1::STEP_OUTCOME_PARTIAL;
  return v1::STEP_OUTCOME_ABORTED;
}

// Each part finds the same in what all ranks say.
void AddSpike(const v1::SpikeEvent& event, google::protobuf::RepeatedPtrField<v1::SpikeEvent>* all) {
  const auto same = [&](const v1::SpikeEvent& other) {
    return other.kind() == event.kind() && other.layer() == event.layer() && other.value() == event.value();
  };
  if (std::none_of(all->begin(), all->end(), same)) *all->Add() = event;
}

// Whom one daemon has waited for longest.
void AddAwaited(const v1::AwaitedRank& rank, google::protobuf::RepeatedPtrField<v1::AwaitedRank>* all) {
  auto same = all->begin();
  while (same != all->end() && same->rank() < rank.rank()) ++same;
  if (same != all->end() && same->rank() == rank.rank()) {
    if (rank.seconds() > same->seconds()) *same = rank;
    return;
  }
  const auto place = same - all->begin();
  *all->Add() = rank;
  std::rotate(all->begin() + place, all->end() - 1, all->end());
}

// Of a layer that has tensors in several parts, what is worst.
void AddLayer(const v1::LayerStatistics& part, google::protobuf::RepeatedPtrField<v1::LayerStatistics>* all) {
  const auto same = std::find_if(all->begin(), all->end(),
                                 [&](const v1::LayerStatistics& other) { return other.layer() == part.layer(); });
  if (same == all->end()) {
    *all->Add() = part;
    return;
  }
  if (part.has_rms_ratio()) same->set_rms_ratio(std::max(same->rms_ratio(), part.rms_ratio()));
  same->set_gradient_norm(std::hypot(same->gradient_norm(), part.gradient_norm()));
  same->set_update_to_weight_ratio(std::max(same->update_to_weight_ratio(), part.update_to_weight_ratio()));
  same->set_edq_ratio(std::min(same->edq_ratio(), part.edq_ratio()));
  same->set_unchanged_ratio(std::max(same->unchanged_ratio(), part.unchanged_ratio()));
  if (part.has_hi_edq_ratio()) same->set_hi_edq_ratio(std::min(same->hi_edq_ratio(), part.hi_edq_ratio()));
  if (part.has_hi_unchanged_ratio()) {
    same->set_hi_unchanged_ratio(std::max(same->hi_unchanged_ratio(), part.hi_unchanged_ratio()));
  }
}

template <typename Message>
void AddSteps(const Message& from, std::map<uint64_t, size_t>* in_how_many) {
  for (const uint64_t step : from) ++(*in_how_many)[step];
}

}  // namespace

uint64_t MergeGenerations(const std::vector<uint64_t>& generations) {
  uint64_t whole = 1;
  for (const uint64_t generation : generations) whole += generation - 1;
  return whole;
}

v1::RunPlan MergePlans(absl::Span<const v1::RunPlan> plans) {
  v1::RunPlan whole = plans[0];
  for (const v1::RunPlan& part : plans.subspan(1)) {
    whole.set_parameters(whole.parameters() + part.parameters());
    whole.set_tensors(whole.tensors() + part.tensors());
    Add(part.server(), whole.mutable_server());
    whole.set_wire_push_bytes(whole.wire_push_bytes() + part.wire_push_bytes());
    whole.set_wire_pull_bytes(whole.wire_pull_bytes() + part.wire_pull_bytes());
    whole.set_trainer_weight_bytes(whole.trainer_weight_bytes() + part.trainer_weight_bytes());
    whole.set_trainer_buffer_bytes(whole.trainer_buffer_bytes() + part.trainer_buffer_bytes());
    whole.set_memory_free_bytes(whole.memory_free_bytes() + part.memory_free_bytes());
    whole.set_journal_bytes(whole.journal_bytes() + part.journal_bytes());
    for (int g = 0; g < std::min(whole.groups_size(), part.groups_size()); ++g) {
      whole.mutable_groups(g)->set_parameters(whole.groups(g).parameters() + part.groups(g).parameters());
    }
    for (const std::string& device : part.devices()) whole.add_devices(device);
  }
  const auto fits = [](const v1::RunPlan& part) { return !part.devices().empty(); };
  if (!std::all_of(plans.begin(), plans.end(), fits)) whole.clear_devices();
  return whole;
}

namespace {

void AddStatus(const v1::RunStatus& part, v1::RunStatus* whole) {
  whole->set_step(std::min(whole->step(), part.step()));
  if (Badness(part.state()) > Badness(whole->state())) whole->set_state(part.state());
  if (part.has_rms_ratio_max()) {
    whole->set_rms_ratio_max(std::max(whole->has_rms_ratio_max() ? whole->rms_ratio_max() : 0, part.rms_ratio_max()));
  }
  whole->set_parameters(whole->parameters() + part.parameters());
  Add(part.bytes(), whole->mutable_bytes());
  for (const v1::LayerStatistics& layer : part.layers()) AddLayer(layer, whole->mutable_layers());
  whole->set_step_seconds(std::max(whole->step_seconds(), part.step_seconds()));
  whole->set_received_bytes(whole->received_bytes() + part.received_bytes());
  whole->set_sent_bytes(whole->sent_bytes() + part.sent_bytes());
  if (whole->failure().empty()) whole->set_failure(part.failure());
  whole->set_weights_loaded(whole->weights_loaded() && part.weights_loaded());
  whole->set_steps_applied(std::min(whole->steps_applied(), part.steps_applied()));
  whole->set_steps_partial(std::max(whole->steps_partial(), part.steps_partial()));
  whole->set_steps_aborted(std::max(whole->steps_aborted(), part.steps_aborted()));
  whole->set_steps_skipped(std::max(whole->steps_skipped(), part.steps_skipped()));
  whole->set_generation(MergeGenerations({whole->generation(), part.generation()}));
  whole->set_rewinds(std::max(whole->rewinds(), part.rewinds()));
  for (const v1::AwaitedRank& rank : part.awaited()) AddAwaited(rank, whole->mutable_awaited());
  if (!whole->has_durability() || !part.has_durability()) return;
  v1::DurabilityStatus* durability = whole->mutable_durability();
  durability->set_checkpoint_bytes(durability->checkpoint_bytes() + part.durability().checkpoint_bytes());
  durability->set_checkpoint_age_s(std::max(durability->checkpoint_age_s(), part.durability().checkpoint_age_s()));
  durability->set_writing(durability->writing() || part.durability().writing());
  if (durability->last_failure().empty()) durability->set_last_failure(part.durability().last_failure());
  if (durability->restored().empty()) durability->set_restored(part.durability().restored());
  if (durability->journal_failure().empty()) durability->set_journal_failure(part.durability().journal_failure());
}

}  // namespace

v1::RunStatus MergeStatuses(absl::Span<const v1::RunStatus> statuses, const PartPlacement& placement, bool staged) {
  v1::RunStatus whole = statuses[0];
  if (whole.has_durability()) whole.mutable_durability()->clear_durable_step();
  std::vector<v1::RunPlan> plans;
  std::vector<v1::StepResult> results;
  std::map<uint64_t, size_t> snapshots;
  for (const v1::RunStatus& part : statuses) {
    plans.push_back(part.plan());
    if (part.has_last_result()) results.push_back(part.last_result());
    AddSteps(part.snapshot_steps(), &snapshots);
    if (&part != &statuses[0]) AddStatus(part, &whole);
  }
  *whole.mutable_plan() = MergePlans(plans);
  whole.clear_snapshot_steps();
  for (const auto& [step, parts] : snapshots) {
    if (parts == statuses.size()) whole.add_snapshot_steps(step);
  }
  const auto same_step = [&](const v1::StepResult& result) { return result.step() == results[0].step(); };
  whole.clear_last_result();
  if (results.size() == statuses.size() && std::all_of(results.begin(), results.end(), same_step)) {
    const std::vector<std::string> names(results.size());
    *whole.mutable_last_result() = MergeResults(results, placement, names, staged);
    whole.set_grad_norm(whole.last_result().grad_norm());
  }
  whole.clear_part();
  whole.clear_parts();
  if (whole.has_follow()) *whole.mutable_follow() = MergeFollow(statuses);
  return whole;
}

namespace {

// What another part says of the step; nullptr: it has no such step any more.
void AddRecord(const v1::StepRecord* part, int layers, bool staged, v1::StepRecord* whole) {
  if (part != nullptr && part->layer_rms_size() == layers) {
    whole->mutable_layer_rms()->MergeFrom(part->layer_rms());
  } else {
    for (int i = 0; i < layers; ++i) whole->add_layer_rms(std::nanf(""));
  }
  if (part == nullptr) return;
  if (part->outcome() != whole->outcome()) {
    whole->set_outcome(Merged({whole->outcome(), part->outcome()}));
    if (whole->reason().empty()) whole->set_reason(part->reason());
    if (whole->detail().empty()) whole->set_detail(part->detail());
  }
  whole->set_grad_norm(staged ? std::max(whole->grad_norm(), part->grad_norm())
                              : std::hypot(whole->grad_norm(), part->grad_norm()));
  whole->set_received_bytes(whole->received_bytes() + part->received_bytes());
  whole->set_sent_bytes(whole->sent_bytes() + part->sent_bytes());
  whole->set_seconds(std::max(whole->seconds(), part->seconds()));
  whole->set_update_seconds(std::max(whole->update_seconds(), part->update_seconds()));
  for (const v1::SpikeEvent& event : part->spikes()) AddSpike(event, whole->mutable_spikes());
}

}  // namespace

v1::GetHistoryResponse MergeHistories(absl::Span<const v1::GetHistoryResponse> histories, bool staged) {
  v1::GetHistoryResponse whole = histories[0];
  for (const v1::GetHistoryResponse& part : histories.subspan(1)) {
    std::map<uint64_t, const v1::StepRecord*> steps;  // the last of a number that came again
    for (const v1::StepRecord& step : part.steps()) steps[step.step()] = &step;
    for (v1::StepRecord& step : *whole.mutable_steps()) {
      const auto same = steps.find(step.step());
      AddRecord(same == steps.end() ? nullptr : same->second, part.layers_size(), staged, &step);
    }
    whole.mutable_layers()->MergeFrom(part.layers());
    whole.mutable_tensors()->MergeFrom(part.tensors());
  }
  return whole;
}

v1::GetServerResponse MergeServers(absl::Span<const v1::GetServerResponse> servers,
                                   absl::Span<const std::string> names) {
  v1::GetServerResponse whole = servers[0];
  whole.clear_devices();
  for (size_t part = 0; part < servers.size(); ++part) {
    for (const v1::DeviceStatus& device : servers[part].devices()) {
      v1::DeviceStatus* one = whole.add_devices();
      *one = device;
      one->set_device(absl::StrCat(names[part], " ", device.device()));
    }
  }
  for (const v1::GetServerResponse& part : servers.subspan(1)) {
    whole.set_memory_limit_bytes(whole.memory_limit_bytes() + part.memory_limit_bytes());
    whole.set_memory_reserved_bytes(whole.memory_reserved_bytes() + part.memory_reserved_bytes());
    whole.set_uptime_s(std::min(whole.uptime_s(), part.uptime_s()));
    whole.set_protocol_max(std::min(whole.protocol_max(), part.protocol_max()));
    if (part.device() != whole.device()) whole.set_device(absl::StrCat(whole.device(), "; ", part.device()));
    if (part.state() != "serving") whole.set_state(part.state());
  }
  return whole;
}

v1::ListCheckpointsResponse MergeCheckpoints(absl::Span<const v1::ListCheckpointsResponse> lists,
                                             absl::Span<const std::string> names) {
  const auto counts = [](const v1::StoredCheckpoint& c) { return c.state() == "newest" || c.state() == "kept"; };
  std::map<uint64_t, std::vector<std::string>> has;  // by step, the daemons
  std::map<uint64_t, uint64_t> bytes;                // likewise, of all
  for (size_t part = 0; part < lists.size(); ++part) {
    for (const v1::StoredCheckpoint& c : lists[part].checkpoints()) {
      if (!counts(c)) continue;
      has[c.step()].push_back(names[part]);
      bytes[c.step()] += c.bytes();
    }
  }
  v1::ListCheckpointsResponse whole;
  std::set<uint64_t> listed;
  for (const v1::ListCheckpointsResponse& list : lists) {
    for (const v1::StoredCheckpoint& c : list.checkpoints()) {
      if (counts(c) && !listed.insert(c.step()).second) continue;
      v1::StoredCheckpoint* one = whole.add_checkpoints();
      *one = c;
      if (counts(c)) one->set_bytes(bytes[c.step()]);
      if (!counts(c) || has[c.step()].size() == lists.size()) continue;
      one->set_state(absl::StrCat("damaged: only ", absl::StrJoin(has[c.step()], ", "), " ha",
                                  has[c.step()].size() == 1 ? "s" : "ve", " it"));
    }
  }
  return whole;
}

namespace {

void AddWarnings(const v1::StepResult& result, v1::StepResult* whole) {
  for (const v1::SpikeEvent& event : result.spikes()) AddSpike(event, whole->mutable_spikes());
  const auto& all = whole->warnings();
  for (const std::string& warning : result.warnings()) {
    if (std::find(all.begin(), all.end(), warning) == all.end()) whole->add_warnings(warning);
  }
}

// The part whose result says why the step was not applied: the first of the run's outcome, or else of another; none: all
// of those that count are applied.
std::optional<uint32_t> PartToBlame(absl::Span<const v1::StepResult> results, v1::StepOutcome outcome) {
  std::optional<uint32_t> blamed;
  for (uint32_t part = 0; part < results.size(); ++part) {
    if (results[part].outcome() == v1::STEP_OUTCOME_APPLIED) continue;
    if (results[part].outcome() == outcome) return part;
    if (!blamed) blamed = part;
  }
  return blamed;
}

v1::StepOutcome OutcomeOf(absl::Span<const v1::StepResult> results) {
  std::set<v1::StepOutcome> outcomes;
  for (const v1::StepResult& result : results) outcomes.insert(result.outcome());
  return Merged(outcomes);
}

bool AgreeOn(const v1::StepResult& why, absl::Span<const v1::StepResult> results) {
  return std::all_of(results.begin(), results.end(), [&](const v1::StepResult& result) {
    return result.outcome() == why.outcome() && result.reason() == why.reason();
  });
}

}  // namespace

v1::StepResult MergeResults(absl::Span<const v1::StepResult> results, const PartPlacement& placement,
                            absl::Span<const std::string> names, bool staged) {
  v1::StepResult whole;
  whole.set_step(results[0].step());
  whole.set_outcome(OutcomeOf(results));
  if (const auto part = PartToBlame(results, whole.outcome())) {
    const v1::StepResult& why = results[*part];
    const bool named = !AgreeOn(why, results) && !names[*part].empty();
    whole.set_reason(why.reason());
    whole.set_detail(named ? absl::StrCat(names[*part], ": ", why.detail()) : why.detail());
  }
  double squares = 0, norm = 0;
  whole.set_clip_coefficient(results[0].clip_coefficient());
  for (uint32_t part = 0; part < results.size(); ++part) {
    const v1::StepResult& result = results[part];
    const std::vector<uint32_t>& numbers = placement.numbers(part);
    for (const uint32_t tensor : result.tensors_not_applied()) {
      if (tensor < numbers.size()) whole.add_tensors_not_applied(numbers[tensor]);
    }
    whole.set_clip_coefficient(std::min(whole.clip_coefficient(), result.clip_coefficient()));
    whole.set_nonfinite_tensors(whole.nonfinite_tensors() + result.nonfinite_tensors());
    whole.set_rejected_blocks(whole.rejected_blocks() + result.rejected_blocks());
    squares += result.grad_norm() * result.grad_norm();
    norm = std::max(norm, result.grad_norm());  // 0 of a part without gradients, and of one that was not measured
    AddWarnings(result, &whole);
  }
  std::sort(whole.mutable_tensors_not_applied()->begin(), whole.mutable_tensors_not_applied()->end());
  whole.set_grad_norm(staged ? norm : std::sqrt(squares));
  return whole;
}

StepTiming MergeTimings(absl::Span<const StepResult> results) {
  StepTiming whole;
  for (const StepResult& result : results) {
    whole.pushed_bytes += result.timing.pushed_bytes;
    whole.pulled_bytes += result.timing.pulled_bytes;
    whole.pushed_bytes_in_backward += result.timing.pushed_bytes_in_backward;
    whole.pulled_bytes_in_backward += result.timing.pulled_bytes_in_backward;
    whole.buffered_bytes_most += result.timing.buffered_bytes_most;
    whole.backward_s = std::max(whole.backward_s, result.timing.backward_s);
    whole.wait_s = std::max(whole.wait_s, result.timing.wait_s);
  }
  return whole;
}

v1::WholeMeasure MergeMeasures(absl::Span<const MeasuredStep> measures, const PartPlacement& placement,
                               absl::Span<const std::string> tensor_names) {
  v1::WholeMeasure whole;
  double squares = 0;
  for (uint32_t tensor = 0; tensor < placement.tensors(); ++tensor) {
    const PartPlacement::Place& place = placement[tensor];
    const std::vector<double>& of_part = measures[place.part].squares;
    if (place.index < of_part.size() && !std::isnan(of_part[place.index])) squares += of_part[place.index];
  }
  whole.set_grad_norm(std::sqrt(squares));
  uint32_t first = std::numeric_limits<uint32_t>::max();
  for (uint32_t part = 0; part < measures.size(); ++part) {
    whole.set_nonfinite_tensors(whole.nonfinite_tensors() + measures[part].nonfinite_tensors);
    if (const auto mine = measures[part].first_nonfinite) first = std::min(first, placement.numbers(part)[*mine]);
  }
  if (whole.nonfinite_tensors() == 0 || first >= tensor_names.size()) return whole;
  whole.set_first_nonfinite(first);
  whole.set_first_name(tensor_names[first]);
  return whole;
}

}  // namespace ballast
