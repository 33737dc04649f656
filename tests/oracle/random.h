// The kernels' random bits once more, in integers, from kernels/NUMERICS.md, "Random bits", and checked against
// random_vectors.inc. Shares nothing with kernels/.
#pragma once

#include <cstdint>

namespace ballast::oracle {

struct RandomFields {
  uint32_t m, v, master;  // 16 bits each; split24 takes the upper 8 of the master's
};

inline uint64_t Mixed(uint64_t k) {
  for (const uint64_t factor : {0xff51afd7ed558ccdULL, 0xc4ceb9fe1a85ec53ULL}) k = (k ^ (k >> 33)) * factor;
  return k ^ (k >> 33);
}

inline RandomFields RandomAt(uint64_t tensor_key, uint64_t step, uint64_t element) {
  const uint64_t key = Mixed(tensor_key ^ Mixed(step)) + (element >> 32) * 0x9e3779b97f4a7c15ULL;
  const uint32_t low = static_cast<uint32_t>(key), high = static_cast<uint32_t>(key >> 32);
  uint32_t x = low + static_cast<uint32_t>(element) * 0x9e3779b9u;
  x = ((x ^ (x >> 16)) * 0x21f0aaadu) ^ high;
  x = (x ^ (x >> 15)) * 0xd35a2d97u;
  x ^= x >> 15;
  return {x & 0xffff, x >> 16, ((x ^ high) * 0x2c1b3c6du) >> 16};
}

}  // namespace ballast::oracle
