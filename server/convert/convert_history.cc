// What a run remembers, as it is shown.
#include "server/convert/convert.h"

namespace ballast {
v1::StepRecord FromRecord(const StepRecord& record, const RunSpec& spec) {
  v1::StepRecord out;
  out.set_step(record.step);
  out.set_outcome(FromOutcome(record.outcome));
  out.set_reason(record.reason);
  out.set_detail(record.detail);
  out.set_closed_at_s(record.closed_at_s);
  if (record.loss) out.set_loss(*record.loss);
  out.set_learning_rate(record.learning_rate);
  out.set_grad_norm(record.grad_norm);
  out.set_clip_coefficient(record.clip_coefficient);
  if (record.edq_ratio) out.set_edq_ratio(*record.edq_ratio);
  if (record.unchanged_ratio) out.set_unchanged_ratio(*record.unchanged_ratio);
  out.set_seconds(record.seconds);
  out.set_receive_seconds(record.receive_seconds);
  out.set_update_seconds(record.update_seconds);
  out.set_wait_seconds(record.wait_seconds);
  out.set_last_rank(record.last_rank);
  out.set_received_bytes(record.received_bytes);
  out.set_sent_bytes(record.sent_bytes);
  out.mutable_layer_rms()->Assign(record.layer_rms.begin(), record.layer_rms.end());
  if (record.curvature_ratio) out.set_curvature_ratio(*record.curvature_ratio);
  for (const SpikeEvent& event : record.spikes) *out.add_spikes() = FromSpike(event, spec);
  return out;
}

namespace {

v1::TensorRecord FromTensor(const TensorStatus& status, const Run& run) {
  v1::TensorRecord out;
  out.set_tensor(run.spec().tensors[status.tensor].name);
  out.set_layer(run.layers().names()[run.layers().group(status.tensor)]);
  if (status.rms_ratio) out.set_rms_ratio(*status.rms_ratio);
  out.set_gradient_norm(status.gradient_norm);
  out.set_gradient_absmax(status.gradient_absmax);
  out.set_update_norm(status.update_norm);
  out.set_nonfinite(status.nonfinite);
  return out;
}

}  // namespace

v1::GetHistoryResponse FromHistory(const Run& run, uint64_t after, size_t most) {
  v1::GetHistoryResponse out;
  for (const std::string& layer : run.layers().names()) out.add_layers(layer);
  for (const StepRecord& record : run.history().Since(after, most)) *out.add_steps() = FromRecord(record, run.spec());
  for (const TensorStatus& tensor : run.Status().tensors) *out.add_tensors() = FromTensor(tensor, run);
  return out;
}

}  // namespace ballast
