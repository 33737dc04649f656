#include "server/run/gradient_pool.h"

#include <algorithm>
#include <cstring>
#include <utility>

namespace ballast {

GradientPool::GradientPool(const RunSpec* spec, const Plan* plan, std::vector<DeviceBuffer> buffers)
    : spec_(spec), plan_(plan), buffers_(std::move(buffers)) {}

void GradientPool::Sum(const effect::Sum& sum, absl::FunctionRef<Payload(uint32_t rank)> take,
                       absl::FunctionRef<const ChunkSet&(uint32_t rank)> covers) {
  const TensorSpec& t = spec_->tensors[sum.id.tensor];
  const uint64_t begin = ChunkBegin(*spec_, sum.id.chunk), elements = ChunkEnd(*spec_, t, sum.id.chunk) - begin;
  const auto& format = kernels::WireFormats()[static_cast<size_t>(t.gradient_format)];
  std::byte* const to = At(sum.id.tensor, sum.slab) + begin * WireBytes(SlabFormat(*spec_, t));
  if (!SumsGradients(*spec_)) {  // one rank, which contributes to all
    if (sum.ranks.empty()) std::memset(to, 0, elements * WireBytes(SlabFormat(*spec_, t)));
    for (const uint32_t rank : sum.ranks) {
      const Payload payload = take(rank);
      std::memcpy(to, payload.bytes().data(), payload.size());
    }
    return;
  }
  auto* const values = reinterpret_cast<float*>(to);
  const auto in_part = [&](uint32_t r) { return covers(r).PartOf(sum.id.tensor, sum.id.chunk).has_value(); };
  bool first = sum.first;
  if (sum.ranks.empty() || (first && std::any_of(sum.ranks.begin(), sum.ranks.end(), in_part))) {
    std::fill_n(values, elements, -0.0f);
    first = false;
  }
  for (const uint32_t rank : sum.ranks) {
    const ChunkPart part = PartIn(covers(rank), sum.id.tensor, sum.id.chunk, elements);
    const Payload payload = take(rank);
    format.accumulate(values + part.begin, payload.bytes().data(), part.end - part.begin, std::exchange(first, false));
  }
}

uint64_t GradientPool::bytes() const {
  uint64_t bytes = 0;
  for (const DeviceBuffer& buffer : buffers_) bytes += buffer.bytes();
  return bytes;
}

}  // namespace ballast
