// What the divider alone allows: three divisions and one square root an element, as AdamW with companded8 takes, on
// values in the first-level cache. port_pressure.py compiles it with a isa's options, with BALLAST_VECTOR naming the
// isa and its header included. Prints nanoseconds an element, and the clock in GHz by a chain of additions of one
// cycle each.
#include <algorithm>
#include <chrono>
#include <cstdio>

#include "kernels/simd/vector.h"

namespace ballast::kernels {
namespace {

using V = BALLAST_VECTOR;
constexpr int kElements = 1024;
constexpr int kPasses = 4000;
alignas(64) float a[kElements], b[kElements], c[kElements], out[kElements];

double Now() { return std::chrono::duration<double>(std::chrono::steady_clock::now().time_since_epoch()).count(); }

double DividerNanoseconds() {
  for (int i = 0; i < kElements; ++i) {
    a[i] = 1.0f + 0.001f * static_cast<float>(i);
    b[i] = 3.0f - a[i] * 0.3f;
    c[i] = a[i] * b[i];
  }
  const double started = Now();
  for (int pass = 0; pass < kPasses; ++pass) {
    for (int i = 0; i < kElements; i += V::kWidth) {
      const auto x = V::Load(a + i), y = V::Load(b + i), z = V::Load(c + i);
      const auto sum = V::Add(V::Add(V::Div(x, y), V::Div(y, z)), V::Add(V::Div(z, x), V::Sqrt(z)));
      V::Store(out + i, sum);
    }
    asm volatile("" ::: "memory");
  }
  return 1e9 * (Now() - started) / (double{kElements} * kPasses);
}

double Gigahertz() {
  constexpr int kChain = 4'000'000;
  uint64_t x = 0;
  const double started = Now();
  for (int i = 0; i < kChain; ++i) {
    asm volatile("add $1, %0\n add $1, %0\n add $1, %0\n add $1, %0\n add $1, %0\n add $1, %0\n add $1, %0\n add $1, %0"
                 : "+r"(x));
  }
  return 8e-9 * kChain / (Now() - started);
}

}  // namespace
}  // namespace ballast::kernels

// The best of many: whatever else runs can only make these worse.
int main() {
  double nanoseconds = 1e9, gigahertz = 0;
  for (int i = 0; i < 15; ++i) {
    nanoseconds = std::min(nanoseconds, ballast::kernels::DividerNanoseconds());
    gigahertz = std::max(gigahertz, ballast::kernels::Gigahertz());
  }
  std::printf("%.4f %.3f\n", nanoseconds, gigahertz);
}
