#include "server/plan/credit.h"

#include <algorithm>

#include "server/base/saturating.h"

namespace ballast {

uint64_t CreditBytes(const RunSpec& spec, uint64_t limit_bytes) {
  uint64_t push_bytes = 0;
  for (const TensorSpec& t : spec.tensors) Add(&push_bytes, GradientBytes(t));
  const uint64_t chunk_bytes = spec.chunk_elements * sizeof(float);
  return std::min(limit_bytes, std::max({kLeastCredit, chunk_bytes, push_bytes / kCreditShare}));
}

}  // namespace ballast
