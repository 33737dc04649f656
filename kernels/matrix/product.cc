#include "kernels/matrix/product.h"

#include <dlfcn.h>

#include <algorithm>

namespace ballast::kernels {
namespace {

using Operand = MatrixProduct::Operand;

// Sums of so many terms each, side by side, of which a compiler makes vectors.
constexpr uint64_t kLanes = 16;

float Dot(const float* a, const float* b, uint64_t n) {
  float lanes[kLanes] = {};
  uint64_t i = 0;
  for (; i + kLanes <= n; i += kLanes) {
    for (uint64_t l = 0; l < kLanes; ++l) lanes[l] += a[i + l] * b[i + l];
  }
  for (uint64_t l = 0; i < n; ++i, ++l) lanes[l] += a[i] * b[i];
  float sum = 0;
  for (const float lane : lanes) sum += lane;
  return sum;
}

void MultiplyPlainly(Operand a, Operand b, uint64_t m, uint64_t n, uint64_t k, float* c, uint64_t stride) {
  for (uint64_t i = 0; i < m; ++i) {
    float* const row = c + i * stride;
    if (b.transposed && !a.transposed) {
      for (uint64_t j = 0; j < n; ++j) row[j] = Dot(a.data + i * a.stride, b.data + j * b.stride, k);
      continue;
    }
    std::fill_n(row, n, 0.0f);
    for (uint64_t p = 0; p < k; ++p) {
      const float factor = a.transposed ? a.data[p * a.stride + i] : a.data[i * a.stride + p];
      for (uint64_t j = 0; j < n; ++j)
        row[j] += factor * (b.transposed ? b.data[j * b.stride + p] : b.data[p * b.stride + j]);
    }
  }
}

// As CBLAS has them.
constexpr int kRowMajor = 101, kAsIs = 111, kTransposed = 112;
using Sgemm = void(int order, int of_a, int of_b, int m, int n, int k, float alpha, const float* a, int a_stride,
                   const float* b, int b_stride, float beta, float* c, int c_stride);
Sgemm* openblas_sgemm = nullptr;  // set before the first product

void MultiplyByOpenBlas(Operand a, Operand b, uint64_t m, uint64_t n, uint64_t k, float* c, uint64_t stride) {
  openblas_sgemm(kRowMajor, a.transposed ? kTransposed : kAsIs, b.transposed ? kTransposed : kAsIs, static_cast<int>(m),
                 static_cast<int>(n), static_cast<int>(k), 1, a.data, static_cast<int>(a.stride), b.data,
                 static_cast<int>(b.stride), 0, c, static_cast<int>(stride));
}

template <class Function>
Function* Found(void* library, const char* name) {
  return reinterpret_cast<Function*>(dlsym(library, name));
}

// Threads are the caller's: the library is to have none, unless somebody else in this process has it already. nullptr: it is
// not there, or makes threads that cannot be held back.
const char* LoadOpenBlas() {
  constexpr const char* kName = "libopenblas.so.0";
  const bool is_others = dlopen(kName, RTLD_NOW | RTLD_NOLOAD) != nullptr;
  void* const library = dlopen(kName, RTLD_NOW | RTLD_LOCAL);
  if (library == nullptr) return nullptr;
  const auto parallel = Found<int()>(library, "openblas_get_parallel");
  const auto config = Found<char*()>(library, "openblas_get_config");
  const auto set_threads = Found<void(int)>(library, "openblas_set_num_threads");
  openblas_sgemm = Found<Sgemm>(library, "cblas_sgemm");
  constexpr int kOpenMp = 2;
  if (!parallel || !config || !set_threads || !openblas_sgemm || parallel() == kOpenMp) return nullptr;
  if (!is_others) set_threads(1);
  return config();
}

}  // namespace

const MatrixProduct& PlainProduct() {
  static constexpr MatrixProduct kPlain{&MultiplyPlainly, "plain loops"};
  return kPlain;
}

const MatrixProduct& FastestProduct() {
  static const char* const kOpenBlas = LoadOpenBlas();
  static const MatrixProduct kFastest =
      kOpenBlas == nullptr ? PlainProduct() : MatrixProduct{&MultiplyByOpenBlas, kOpenBlas};
  return kFastest;
}

}  // namespace ballast::kernels
