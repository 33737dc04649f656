#include "server/run/gradient_pool.h"

#include <utility>

namespace ballast {

GradientPool::GradientPool(const RunSpec* spec, const Plan* plan, std::vector<DeviceBuffer> buffers)
    : spec_(spec), plan_(plan), buffers_(std::move(buffers)) {}

SumTask GradientPool::TaskOf(const effect::Sum& sum, absl::FunctionRef<Payload(uint32_t rank)> take,
                             absl::FunctionRef<const ChunkSet&(uint32_t rank)> covers) {
  const TensorSpec& t = spec_->tensors[sum.id.tensor];
  const uint64_t begin = ChunkBegin(*spec_, sum.id.chunk), elements = ChunkEnd(*spec_, t, sum.id.chunk) - begin;
  SumTask task{.to = At(sum.id.tensor, sum.slab) + begin * WireBytes(SlabFormat(*spec_, t)),
               .elements = elements,
               .format = t.gradient_format,
               .adds = SumsGradients(*spec_),
               .first = sum.first};
  task.terms.reserve(sum.ranks.size());
  for (const uint32_t rank : sum.ranks) {
    const ChunkPart part = PartIn(covers(rank), sum.id.tensor, sum.id.chunk, elements);
    task.terms.push_back({.payload = take(rank), .first = part.begin, .last = part.end});
  }
  return task;
}

uint64_t GradientPool::bytes() const {
  uint64_t bytes = 0;
  for (const DeviceBuffer& buffer : buffers_) bytes += buffer.bytes();
  return bytes;
}

}  // namespace ballast
