// Makes a matrix nearly orthogonal: what Muon (kernels/rules/muon.h) does with its direction. Five steps of the quintic
// iteration of https://kellerjordan.github.io/posts/muon/, which leaves the singular vectors and brings the singular
// values near 1, to between .68 and 1.13 or so:
//
//   X = bf16(U / max(|U|, least norm)), |U| the root of the sum of squares
//   five times, for a matrix that is not taller than wide:
//     G = bf16(X X^T);  B = bf16(RN(b G) + RN(c (G G)));  X = bf16(RN(a X) + B X)
//   with a = 3.4445, b = -4.7750, c = 2.0315; a taller one likewise, from X^T X and X B
//
// Products are fp32's, of numbers that bf16 has. The bits are those of the library of products, and do not depend on
// the number of threads.
#pragma once

#include <algorithm>
#include <cstdint>
#include <functional>

#include "kernels/matrix/product.h"

namespace ballast::kernels {

inline constexpr int kNewtonSchulzSteps = 5;  // odd: the last one's result is where U was
inline constexpr float kOfX = 3.4445f, kOfGram = -4.7750f, kOfSquare = 2.0315f;  // a, b, c

// How many numbers OrthogonalizeMatrix needs as room: up to three times those of the matrix. A GPU, which keeps them in bf16,
// needs fewer, and some to align its parts.
constexpr uint64_t kRoomToAlign = 256;
constexpr uint64_t OrthogonalizingRoom(uint64_t rows, uint64_t columns) {
  const uint64_t side = std::min(rows, columns);
  return rows * columns + 2 * side * side + kRoomToAlign;
}

// Has act(i) done once for each i < count, by as many threads as there are.
using ShareWork = std::function<void(uint64_t count, const std::function<void(uint64_t i)>& act)>;
// By the caller alone.
inline void WorkAlone(uint64_t count, const std::function<void(uint64_t i)>& act) {
  for (uint64_t i = 0; i < count; ++i) act(i);
}

// `matrix` is U, row after row, finite, and becomes O. squares: the sum of U's squares; infinite where it overflows, and
// then O is 0. `room`: numbers of the caller's.
void OrthogonalizeMatrix(const MatrixProduct& product, uint64_t rows, uint64_t columns, double squares,
                         float least_norm, float* matrix, float* room, const ShareWork& share);
// Likewise, with the fastest product, by this thread alone and in room of its own.
void OrthogonalizeAlone(uint64_t rows, uint64_t columns, double squares, float least_norm, float* matrix);

}  // namespace ballast::kernels
