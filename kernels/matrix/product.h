// Products of fp32 matrices, by the fastest library that this machine has: OpenBLAS (package libopenblas0-pthread) where
// it is found when the first is asked for, else plain loops, which take some ten times as long.
//
// A product's bits are the library's: the same every time on one machine, not on every machine.
#pragma once

#include <cstdint>

namespace ballast::kernels {

// C = op(A) op(B), row after row: C is m x n, op(A) m x k, op(B) k x n; op transposes where it is asked to. `stride`s are
// between rows, as stored. No two of the three overlap. Takes one thread; thread-safe.
struct MatrixProduct {
  struct Operand {
    const float* data;
    uint64_t stride;
    bool transposed = false;
  };
  void (*multiply)(Operand a, Operand b, uint64_t m, uint64_t n, uint64_t k, float* c, uint64_t stride);
  const char* library;  // its name, version and the processor's kind that it has chosen: what the bits depend on
};

const MatrixProduct& FastestProduct();
// What there is without a library.
const MatrixProduct& PlainProduct();

}  // namespace ballast::kernels
