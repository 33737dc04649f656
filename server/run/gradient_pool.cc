#include "server/run/gradient_pool.h"

#include <cstring>
#include <string>
#include <utility>

namespace ballast {
namespace {

// A term of the whole part of so many elements: what came, and around it what a sum has where no term is (sum_task.h): -0.0,
// to which adding is adding nothing, or 0 where nothing is added.
SumTask::Term Whole(SumTask::Term term, uint64_t elements, uint64_t element_bytes, bool adds) {
  if (term.first == 0 && term.last == elements) return term;
  std::string whole(elements * element_bytes, '\0');
  for (uint64_t i = 1; adds && i <= elements; ++i) whole[i * element_bytes - 1] = '\x80';  // the sign, little end first
  term.payload.Keep();
  const absl::Span<const std::byte> came = term.payload.bytes();
  std::memcpy(whole.data() + term.first * element_bytes, came.data(), came.size());
  return {.payload = Payload(std::move(whole)), .first = 0, .last = elements};
}

}  // namespace

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
               .first = sum.first,
               .on_device = on_device_};
  task.terms.reserve(sum.ranks.size());
  for (const uint32_t rank : sum.ranks) {
    const ChunkPart part = PartIn(covers(rank), sum.id.tensor, sum.id.chunk, elements);
    task.terms.push_back({.payload = take(rank), .first = part.begin, .last = part.end});
    if (on_device_)
      task.terms.back() = Whole(std::move(task.terms.back()), elements, WireBytes(t.gradient_format), task.adds);
  }
  return task;
}

uint64_t GradientPool::bytes() const {
  uint64_t bytes = 0;
  for (const DeviceBuffer& buffer : buffers_) bytes += buffer.bytes();
  return bytes;
}

}  // namespace ballast
