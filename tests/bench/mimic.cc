// A unit of its own because it is compiled with AVX2 where the kernels are; nothing here may be shared with other
// units.
#include "tests/bench/mimic.h"

namespace ballast::bench {
namespace {

using Vector [[gnu::vector_size(32), gnu::may_alias, gnu::aligned(4)]] = uint64_t;
using Word [[gnu::may_alias]] = uint32_t;

void Touch(std::byte* data, uint64_t bytes, uint64_t key) {
  const Vector keys = {key, key, key, key};
  for (; bytes >= 64; bytes -= 64, data += 64) {
    auto* p = reinterpret_cast<Vector*>(data);
    const Vector low = p[0] ^ keys, high = p[1] ^ keys;
    p[0] = low;
    p[1] = high;
  }
  for (; bytes >= 4; bytes -= 4, data += 4) *reinterpret_cast<Word*>(data) ^= static_cast<uint32_t>(key);
}

}  // namespace

uint64_t Mimic(const Stream* planes, int count, const Stream& gradient, uint64_t first_row, uint64_t last_row,
               uint64_t key) {
  Vector sum[2] = {};
  for (uint64_t row = first_row; row < last_row; ++row) {
    const std::byte* g = gradient.data + row * gradient.row_bytes;
    for (uint64_t at = 0; at < gradient.row_bytes; at += 64) {
      const auto* p = reinterpret_cast<const Vector*>(g + at);
      sum[0] ^= p[0];
      sum[1] ^= p[1];
    }
    for (int p = 0; p < count; ++p) Touch(planes[p].data + row * planes[p].row_bytes, planes[p].row_bytes, key);
  }
  const Vector all = sum[0] ^ sum[1];
  return all[0] ^ all[1] ^ all[2] ^ all[3];
}

}  // namespace ballast::bench
