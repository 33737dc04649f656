// Where a kernel's time goes: AdamW with split24 and companded8 on 2^16 parameters, which stay in the second-level
// cache, on one thread. kernel_parts.py compiles it with an isa's options, with BALLAST_VECTOR naming the isa's vector
// type and its header included. Prints a line for each part, tab-separated: its name, nanoseconds a parameter; and
// last the clock in GHz, by a chain of additions of one cycle each.
//
// A part is what an update takes longer than one without it: nothing inside of the kernels is timed.
#include <algorithm>
#include <chrono>
#include <cstdio>
#include <cstring>
#include <memory>
#include <vector>

#include "kernels/cpu/cpu_tables.h"

namespace ballast::kernels {
inline namespace BALLAST_UNIT {
namespace {

using V = BALLAST_VECTOR;
using Entry = KernelEntry<V, AdamW, Split24, Companded8State>;
constexpr uint64_t kElements = 1 << 16;
constexpr int kRepetitions = 400;

double Now() { return std::chrono::duration<double>(std::chrono::steady_clock::now().time_since_epoch()).count(); }

// Nanoseconds a parameter, the best of many: whatever else runs can only make these worse.
template <class Act>
double Nanoseconds(const Act& act) {
  double best = 1e9;
  for (int i = 0; i < kRepetitions; ++i) {
    const double started = Now();
    act();
    asm volatile("" ::: "memory");
    best = std::min(best, Now() - started);
  }
  return 1e9 * best / static_cast<double>(kElements);
}

class Tensor {
 public:
  Tensor() : grad_(kElements), statistics_(TilesOf(kElements)) {
    constexpr auto kPlanes = kPlanesOf<AdamW, Split24, Companded8State>;
    std::vector<float> values(kElements);
    uint32_t word = 1;
    for (float& x : values) {
      word = word * 1664525 + 1013904223;
      x = 0.01f * (static_cast<float>(word >> 8) * 0x1p-23f - 1);
    }
    for (uint64_t i = 0; i < kElements; ++i) grad_[i] = static_cast<uint16_t>(std::bit_cast<uint32_t>(values[i]) >> 16);
    for (size_t i = 0; i < kPlanes.size(); ++i) {
      const uint64_t bytes = PlaneBytes(kPlanes[i], kElements);
      planes_.emplace_back(new (std::align_val_t{4096}) std::byte[bytes]);
      std::memset(planes_.back().get(), 0, bytes);
      update_.planes[i] = planes_.back().get();
    }
    MasterCodec<V, Split24, WireList>::Load(update_.planes, 0, values.data(), 0, kElements);
    update_.grad = grad_.data();
    update_.grad_format = 1;
    update_.n = kElements;
    update_.grad_scale = update_.clip = 1;
    const double hyper[] = {1e-3, 1e-2, 0.9, 0.999, 1e-8, 0};
    AdamW::Prepare(hyper, 1000, update_.constants);
  }
  double Update(StatisticsLevel level, bool dry, bool stochastic) {
    update_.statistics = level;
    update_.dry = dry;
    update_.stochastic = stochastic;
    return Nanoseconds([this] { Entry::RunUpdate(update_, 0, TilesOf(kElements), statistics_.data()); });
  }
  double Gradients() {
    return Nanoseconds([this] {
      for (uint64_t e = 0; e < kElements; e += kRow) {
        DecodePayload<V, WireBf16>(reinterpret_cast<const std::byte*>(grad_.data()), e, kRow, 1, row_);
      }
    });
  }
  double RandomWords() {
    const RandomStream<V> stream(12345, 0);
    return Nanoseconds([&] {
      for (uint64_t e = 0; e < kElements; e += kRow) stream.Fill(e, kRow, words_);
    });
  }
  // Three divisions and a root, which every parameter takes.
  double Divider() {
    for (uint64_t i = 0; i < kRow; ++i) row_[i] = 1 + 0.001f * static_cast<float>(i);
    return Nanoseconds([this] {
      for (uint64_t e = 0; e < kElements; e += V::kWidth) {
        const auto x = V::Load(row_ + e % kRow), y = V::Add(x, x);
        V::Store(out_ + e % kRow, V::Add(V::Add(V::Div(x, y), V::Div(y, x)), V::Add(V::Div(y, y), V::Sqrt(x))));
      }
    });
  }

 private:
  struct Free {
    void operator()(std::byte* p) const { ::operator delete[](p, std::align_val_t{4096}); }
  };
  std::vector<uint16_t> grad_;
  std::vector<TileStatistics> statistics_;
  std::vector<std::unique_ptr<std::byte[], Free>> planes_;
  kernels::Update update_{};
  alignas(64) float row_[kRow], out_[kRow];
  alignas(64) uint32_t words_[kRow];
};

double Gigahertz() {
  constexpr int kChain = 1'000'000;
  uint64_t x = 0;
  double best = 0;
  for (int i = 0; i < 20; ++i) {
    const double started = Now();
    for (int n = 0; n < kChain; ++n) asm volatile("add $1, %0\n add $1, %0\n add $1, %0\n add $1, %0" : "+r"(x));
    best = std::max(best, 4e-9 * kChain / (Now() - started));
  }
  return best;
}

void Print() {
  constexpr auto kOff = StatisticsLevel::kOff, kCore = StatisticsLevel::kCore, kFull = StatisticsLevel::kFull;
  Tensor tensor;
  const double gradients = tensor.Gradients(), applied = tensor.Update(kOff, true, false);
  const double nearest = tensor.Update(kOff, false, false), stochastic = tensor.Update(kOff, false, true);
  const double core = tensor.Update(kCore, false, true), full = tensor.Update(kFull, false, true);
  const std::pair<const char*, double> parts[] = {{"gradients, from bf16", gradients},
                                                  {"decode and rule", applied - gradients},
                                                  {"encode, nearest", nearest - applied},
                                                  {"stochastic rounding", stochastic - nearest},
                                                  {"of it random words", tensor.RandomWords()},
                                                  {"core statistics", core - stochastic},
                                                  {"whole default update", core},
                                                  {"full statistics, more", full - core},
                                                  {"3 divisions and a root alone", tensor.Divider()}};
  for (const auto& [name, nanoseconds] : parts) std::printf("%s\t%.4f\n", name, nanoseconds);
  std::printf("GHz\t%.3f\n", Gigahertz());
}

}  // namespace
}  // namespace BALLAST_UNIT
}  // namespace ballast::kernels

int main() { ballast::kernels::Print(); }
