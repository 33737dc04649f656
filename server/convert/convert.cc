#include "server/convert/convert.h"

#include <algorithm>

#include "absl/strings/str_cat.h"
#include "proto/bitmap.h"
#include "proto/checksum.h"

#include "server/base/clock.h"
#include "server/base/status_macros.h"
#include "server/spec/spike_text.h"

namespace ballast {
namespace {

v1::ByteCounts FromBytes(const PlanBytes& b) {
  v1::ByteCounts counts;
  counts.set_weights(b.weights);
  counts.set_momentum(b.momentum);
  counts.set_variance(b.variance);
  counts.set_gradients(b.gradients);
  counts.set_staging(b.staging);
  counts.set_padding(b.padding);
  counts.set_snapshots(b.snapshots);
  counts.set_client_state(b.client_state);
  counts.set_following(b.following);
  counts.set_averages(b.averages);
  return counts;
}

std::string NameOf(const kernels::Kernel& kernel) {
  return absl::StrCat(kernel.rule, "/", kernel.master, "/", kernel.state);
}

v1::RunState FromState(RunState state) {
  constexpr v1::RunState kStates[] = {v1::RUN_STATE_WAITING, v1::RUN_STATE_TRAINING, v1::RUN_STATE_IDLE,
                                      v1::RUN_STATE_FINISHED, v1::RUN_STATE_FAILED};
  return kStates[static_cast<size_t>(state)];
}

std::string DescribeRank(size_t rank, const RankStatus& status) {
  if (status.connected)
    return absl::StrCat("rank ", rank, ": ", status.peer, ", connected, transport ", status.transport);
  const auto gone_s = static_cast<int64_t>(MonotonicSeconds() - status.disconnected_at_s);
  return absl::StrCat("rank ", rank, ": ", status.peer, ", not connected for ", gone_s, " s");
}

void AddLayers(const Run& run, const RunStatus& status, v1::RunStatus* out) {
  const std::vector<std::string>& names = run.layers().names();
  for (size_t i = 0; i < std::min(names.size(), status.layers.size()); ++i) {
    const StepRecord::Layer& layer = status.layers[i];
    v1::LayerStatistics* l = out->add_layers();
    l->set_layer(names[i]);
    if (layer.rms_ratio) l->set_rms_ratio(*layer.rms_ratio);
    l->set_gradient_norm(layer.gradient_norm);
    l->set_update_to_weight_ratio(layer.update_to_weight_ratio.value_or(0));
    l->set_edq_ratio(layer.edq_ratio.value_or(0));
    l->set_unchanged_ratio(layer.unchanged_ratio.value_or(0));
    if (layer.hi_edq_ratio) l->set_hi_edq_ratio(*layer.hi_edq_ratio);
    if (layer.hi_unchanged_ratio) l->set_hi_unchanged_ratio(*layer.hi_unchanged_ratio);
  }
}

}  // namespace

v1::StepOutcome FromOutcome(Outcome outcome) {
  constexpr v1::StepOutcome kOutcomes[] = {v1::STEP_OUTCOME_APPLIED, v1::STEP_OUTCOME_SKIPPED, v1::STEP_OUTCOME_ABORTED,
                                           v1::STEP_OUTCOME_PARTIAL};
  return kOutcomes[static_cast<size_t>(outcome)];
}

v1::SpikeEvent FromSpike(const SpikeEvent& event, const RunSpec& spec) {
  v1::SpikeEvent out;
  out.set_kind(static_cast<v1::SpikeKind>(static_cast<int>(event.kind) + 1));
  if (event.layer) out.set_layer(spec.layers[*event.layer].name);
  if (event.tensor) out.set_tensor(spec.tensors[*event.tensor].name);
  out.set_value(event.value);
  out.set_threshold(event.threshold);
  out.set_since_step(event.since);
  out.set_text(SpikeText(event, spec));
  return out;
}

absl::StatusOr<std::vector<bool>> ToBits(absl::string_view bytes, size_t count, absl::string_view field) {
  if (const auto past = FirstBitPast(bytes, count)) {
    return absl::InvalidArgumentError(
        absl::StrCat(field, " has bit ", *past, " set, but the run has ", count, " tensors"));
  }
  return UnpackBits(bytes, count);
}

absl::StatusOr<message::MicroEnd> ToMicroEnd(const v1::MicroEnd& end, const RunSpec& spec) {
  message::MicroEnd made{.micro = end.micro()};
  ASSIGN_OR_RETURN(made.absent, ToBits(end.absent(), spec.tensors.size(), "MicroEnd.absent"));
  if (end.has_loss()) made.loss = end.loss();
  return made;
}

void FillWeights(const WeightsChunk& chunk, const RunSpec& spec, WeightPiece* piece, v1::Weights* weights) {
  const bool served = chunk.slot == StateSlot::kWeights, counts = chunk.slot == StateSlot::kUpdates;
  const kernels::WireIndex serving = spec.tensors[chunk.tensor].serving_format;
  weights->set_step(chunk.step);
  weights->set_tensor(chunk.tensor);
  weights->set_chunk(chunk.chunk);
  weights->set_last(chunk.last);
  weights->set_slot(served ? "" : NameOf(chunk.slot));
  weights->set_updates(counts ? chunk.updates : 0);
  weights->set_average(chunk.series.average ? spec.averages[*chunk.series.average] : 0);
  weights->set_format(served ? kernels::WireFormats()[static_cast<size_t>(serving)].name : counts ? "" : "fp32");
  weights->mutable_scales()->Assign(piece->scales.begin(), piece->scales.end());
  weights->set_crc32c(piece->crc32c);
  if (piece->place == nullptr) weights->mutable_data()->swap(piece->data);
}

v1::Credit FromCredit(const output::Credit& credit) {
  v1::Credit out;
  out.set_bytes(credit.bytes);
  out.set_acknowledged(credit.acknowledged);
  if (!credit.wanted) return out;
  out.mutable_wanted()->set_micro(credit.wanted->micro);
  out.mutable_wanted()->set_tensor(credit.wanted->tensor);
  out.mutable_wanted()->set_chunk(credit.wanted->chunk);
  return out;
}

v1::StepMeasured FromMeasured(const output::Measured& measured) {
  v1::StepMeasured out;
  out.set_step(measured.step);
  out.set_grad_norm(measured.grad_norm);
  out.set_nonfinite_tensors(measured.nonfinite_tensors);
  out.set_discarded(measured.discarded);
  out.mutable_squares()->Add(measured.squares.begin(), measured.squares.end());
  if (measured.first_nonfinite) out.set_first_nonfinite(*measured.first_nonfinite);
  return out;
}

v1::StepResult FromResult(const StepRecord& closed, const RunSpec& spec) {
  v1::StepResult result;
  result.set_step(closed.step);
  result.set_outcome(FromOutcome(closed.outcome));
  result.set_reason(closed.reason);
  result.set_detail(closed.detail);
  for (const uint32_t tensor : closed.not_applied) result.add_tensors_not_applied(tensor);
  for (const uint32_t rank : closed.left_out) result.add_ranks_left_out(rank);
  result.set_grad_norm(closed.grad_norm);
  result.set_clip_coefficient(closed.clip_coefficient);
  result.set_nonfinite_tensors(closed.nonfinite_tensors);
  result.set_rejected_blocks(closed.rejected_blocks);
  result.set_durable_step(closed.durable_step);
  result.set_checkpoint_step(closed.checkpoint_step);
  if (closed.rejected_blocks > 0) {
    const auto counted = [](uint64_t n, const char* what) { return absl::StrCat(n, what, n == 1 ? "" : "s"); };
    const uint64_t tensors = closed.rejected_tensors;
    result.add_warnings(absl::StrCat(counted(closed.rejected_blocks, " block"), " of 32 elements",
                                     tensors > 0 ? absl::StrCat(" in ", counted(tensors, " tensor")) : "",
                                     " kept the old contents: the gradient there was not finite or too large"));
  }
  for (const SpikeEvent& event : closed.spikes) {
    *result.add_spikes() = FromSpike(event, spec);
    // Of a healthy training's steps one in some thousands is one: it is counted, and nobody is warned.
    if (event.kind == SpikeKind::kGradientNorm) continue;
    // The step's warning already counts the blocks that were rejected for it.
    if (event.kind == SpikeKind::kNonfinite && closed.rejected_blocks > 0) continue;
    result.add_warnings(result.spikes().rbegin()->text());
  }
  return result;
}

v1::RunPlan FromPlan(const Plan& plan, const std::vector<std::string>& devices, uint64_t memory_free_bytes) {
  v1::RunPlan out;
  out.set_parameters(plan.parameters);
  out.set_tensors(plan.tensors);
  *out.mutable_server() = FromBytes(plan.bytes);
  out.set_wire_push_bytes(plan.push_bytes);
  out.set_journal_bytes(plan.journal_bytes);
  out.set_wire_pull_bytes(plan.pull_bytes);
  out.set_trainer_weight_bytes(plan.trainer_weight_bytes);
  out.set_trainer_buffer_bytes(plan.push_bytes);
  out.set_memory_free_bytes(memory_free_bytes);
  out.set_chunk_elements(plan.chunk_elements);
  for (const std::string& device : devices) out.add_devices(device);
  for (const GroupPlan& group : plan.groups) {
    v1::GroupPlan* g = out.add_groups();
    g->set_optimizer(NameOf(*group.kernel));
    g->set_parameters(group.parameters);
  }
  return out;
}

v1::DeviceStatus FromDevice(const DevicePool::State& state) {
  v1::DeviceStatus out;
  out.set_device(state.label);
  out.set_memory_limit_bytes(state.limit_bytes);
  out.set_memory_reserved_bytes(state.reserved_bytes());
  out.set_failure(std::string(state.failure.message()));
  return out;
}

v1::RunStatus FromRun(const Run& run, uint64_t memory_free_bytes) {
  const RunStatus status = run.Status();
  v1::RunStatus out;
  out.set_run_id(run.spec().run_id);
  if (run.spec().part) {
    out.set_part(run.spec().part->index);
    out.set_parts(run.spec().part->count);
  }
  out.set_state(FromState(status.state));
  if (const auto since_s = status.unattended_since_s) {
    out.set_idle_seconds(MonotonicSeconds() - std::min(*since_s, status.left_before_s.value_or(*since_s)));
  }
  if (status.last_result) out.set_since_step_seconds(std::max(0.0, UnixSeconds() - status.last_result->closed_at_s));
  if (status.rms_ratio_max) out.set_rms_ratio_max(*status.rms_ratio_max);
  out.set_parameters(run.plan().parameters);
  *out.mutable_bytes() = FromBytes(status.bytes);
  *out.mutable_plan() = FromPlan(run.plan(), run.devices(), memory_free_bytes);
  AddLayers(run, status, &out);
  for (size_t rank = 0; rank < status.ranks.size(); ++rank) {
    if (!status.ranks[rank].peer.empty()) out.add_ranks(DescribeRank(rank, status.ranks[rank]));
  }
  for (const AwaitedRank& rank : status.awaited) {
    v1::AwaitedRank* awaited = out.add_awaited();
    awaited->set_rank(rank.rank);
    awaited->set_what(rank.what);
    awaited->set_seconds(rank.seconds);
    awaited->set_connected(rank.connected);
  }
  if (status.last_result) {
    out.set_step(status.last_result->step);
    if (status.last_result->loss) out.set_loss(*status.last_result->loss);
    out.set_grad_norm(status.last_result->grad_norm);
    *out.mutable_last_result() = FromResult(*status.last_result, run.spec());
  }
  out.set_step_seconds(status.step_s);
  out.set_steps_applied(status.applied);
  out.set_steps_skipped(status.skipped);
  out.set_steps_partial(status.partial);
  out.set_steps_aborted(status.aborted);
  out.set_optimizer(NameOf(*run.spec().groups[run.spec().tensors[0].group].kernel));
  out.set_received_bytes(status.received_bytes);
  out.set_sent_bytes(status.sent_bytes);
  out.set_failure(status.failure);
  out.set_weights_loaded(status.weights_loaded);
  out.set_generation(status.generation);
  out.mutable_snapshot_steps()->Add(status.snapshots.begin(), status.snapshots.end());
  out.set_rewinds(status.rewinds);
  if (status.follow) *out.mutable_follow() = FromFollow(*status.follow);
  if (status.durability) *out.mutable_durability() = FromDurability(*status.durability);
  return out;
}

namespace {

void FillHeld(const Held& held, v1::AttachResponse* out) {
  if (held.whole_micros > 0) out->add_held()->set_whole_micros(held.whole_micros);
  if (std::find(held.whole_tensors.begin(), held.whole_tensors.end(), true) != held.whole_tensors.end()) {
    v1::ChunksHeld* h = out->add_held();
    h->set_micro(held.whole_micros);
    h->set_whole_tensors(PackBits(held.whole_tensors));
  }
  for (const HeldChunks& of_tensor : held.chunks) {
    v1::ChunksHeld* h = out->add_held();
    h->set_micro(of_tensor.micro);
    h->set_tensor(of_tensor.tensor);
    h->set_chunks(PackBits(of_tensor.chunks));
  }
}

}  // namespace

v1::AttachResponse FromAttachReply(const Run::AttachReply& reply, const RunSpec& spec) {
  v1::AttachResponse out;
  out.set_generation(reply.generation);
  out.set_resume_step(reply.resume_step);
  out.set_chunk_elements(spec.chunk_elements);
  out.set_credit_bytes(spec.credit_bytes);
  out.add_lanes("grpc");
  out.set_weights_loaded(reply.weights_loaded);
  out.set_loaded_here(reply.loaded_here);
  for (const uint64_t digest : reply.digests) out.add_digests(digest);
  if (reply.last_result) *out.mutable_last_result() = FromResult(*reply.last_result, spec);
  out.set_step_open(reply.step_open);
  FillHeld(reply.held, &out);
  if (reply.step_open) out.set_tensors_applied(PackBits(reply.applied));
  out.set_lease_s(spec.lease_s);
  out.set_measures_steps(true);
  out.set_takes_partial_chunks(true);
  out.set_credit_held(reply.credit_held);
  if (reply.client_state) {
    out.set_client_state(reply.client_state->bytes);
    out.set_client_state_step(reply.client_state->step);
  }
  return out;
}

}  // namespace ballast
