#include "server/run/machine_options.h"

namespace ballast {

StepMachineOptions MachineOptions(const RunSpec& spec, const Plan& plan) {
  StepMachineOptions options;
  options.lease_s = spec.lease_s;
  options.rank_timeout_s = spec.rank_timeout_s;
  options.step_timeout_s = spec.step_timeout_s;
  options.leaves_out_lost = spec.leaves_out_lost;
  options.is_part = spec.part.has_value();
  options.commit = spec.staged ? Commit::kStaged : Commit::kRelease;
  options.chunk_elements = spec.chunk_elements;
  options.most_micros = options.reduction.micros = spec.accumulation;
  options.reduction.pool_of = plan.placement.shard_of;
  for (const ShardPlan& shard : plan.shards) options.reduction.pool_bytes.push_back(shard.pool_bytes);
  for (const TensorSpec& t : spec.tensors) {
    options.tensor_names.push_back(t.name);
    options.reduction.chunks.push_back(ChunkCount(spec, t));
    options.reduction.slab_bytes.push_back(SlabBytes(spec, t));
  }
  return options;
}

}  // namespace ballast
