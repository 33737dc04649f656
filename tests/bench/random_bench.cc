// The random bits of kernels/math/random.h against fmix64(c + e * golden), the plain 64-bit form they were chosen over:
// an element's words to memory, as one block of the kernel wants them. Compiled once for each RANDOM_FORM; time is for
// kCount elements, items are elements.
#include <benchmark/benchmark.h>

#include <string_view>

#include "kernels/math/random.h"

namespace ballast::kernels {
namespace {

constexpr uint64_t kCount = 4096;
alignas(64) uint32_t state_words[kCount], master_words[kCount];

// Also lets the arrays be seen from outside, so that no store is dropped.
bool CanRun(benchmark::State& state) {
  benchmark::DoNotOptimize(+state_words);
  benchmark::DoNotOptimize(+master_words);
  const bool can = RANDOM_FORM != std::string_view("avx2") || __builtin_cpu_supports("avx2");
  if (!can) state.SkipWithError("this processor has no AVX2");
  return can;
}

void Form32(benchmark::State& state) {
  if (!CanRun(state)) return;
  uint64_t key = 42;
  for (auto _ : state) {
    const RandomStream<ScalarVector> stream(key, 0);
    for (uint64_t e = 0; e < kCount; ++e) {
      const uint32_t x = stream.At(e);
      state_words[e] = x;
      master_words[e] = stream.ForMaster(x);
    }
    ++key;
    benchmark::ClobberMemory();
  }
  state.SetItemsProcessed(state.iterations() * static_cast<int64_t>(kCount));
}

void Form64(benchmark::State& state) {
  if (!CanRun(state)) return;
  uint64_t key = 42;
  for (auto _ : state) {
    for (uint64_t e = 0; e < kCount; ++e) {
      const uint64_t h = Fmix64(key + e * 0x9E3779B97F4A7C15u);
      state_words[e] = static_cast<uint32_t>(h);
      master_words[e] = static_cast<uint32_t>(h >> 32);
    }
    ++key;
    benchmark::ClobberMemory();
  }
  state.SetItemsProcessed(state.iterations() * static_cast<int64_t>(kCount));
}

BENCHMARK(Form32)->Name("32-bit " RANDOM_FORM);
BENCHMARK(Form64)->Name("64-bit " RANDOM_FORM);

}  // namespace
}  // namespace ballast::kernels
