#include "server/run/gradient_pool.h"

#include <cstring>
#include <utility>

namespace ballast {

GradientPool::GradientPool(const RunSpec* spec, const Plan* plan, std::vector<DeviceBuffer> buffers)
    : spec_(spec), plan_(plan), buffers_(std::move(buffers)) {}

void GradientPool::Sum(const effect::Sum& sum, absl::FunctionRef<Payload(uint32_t rank)> take) {
  const TensorSpec& t = spec_->tensors[sum.id.tensor];
  const uint64_t begin = ChunkBegin(*spec_, sum.id.chunk), elements = ChunkEnd(*spec_, t, sum.id.chunk) - begin;
  const auto& format = kernels::WireFormats()[static_cast<size_t>(t.gradient_format)];
  std::byte* const to = At(sum.id.tensor, sum.slab) + begin * WireBytes(SlabFormat(*spec_, t));
  if (sum.ranks.empty()) std::memset(to, 0, elements * WireBytes(SlabFormat(*spec_, t)));
  bool first = sum.first;
  for (const uint32_t rank : sum.ranks) {
    const Payload payload = take(rank);
    if (SumsGradients(*spec_)) {
      format.accumulate(reinterpret_cast<float*>(to), payload.bytes().data(), elements, std::exchange(first, false));
    } else {
      std::memcpy(to, payload.bytes().data(), payload.size());
    }
  }
}

uint64_t GradientPool::bytes() const {
  uint64_t bytes = 0;
  for (const DeviceBuffer& buffer : buffers_) bytes += buffer.bytes();
  return bytes;
}

}  // namespace ballast
