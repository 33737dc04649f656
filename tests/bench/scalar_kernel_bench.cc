// AdamW on one thread with gradients in bf16, beside memcpy of the same bytes.
//
// Bytes moved a parameter, each plane read once and written once, the gradient read once:
//   split24+companded8: reads 2 hi, 1 lo, 1 m, 1 v, 2 * 2/32 scales, 2 gradient; writes all but the gradient: 12.25
//   fp32+fp32:          reads 4 + 4 + 4, 2 gradient; writes 4 + 4 + 4: 26
// memcpy reads as many bytes as it writes, and both are counted. `items` are parameters.
#include <benchmark/benchmark.h>

#include <cmath>
#include <cstring>
#include <memory>
#include <string>
#include <vector>

#include "kernels/registry.h"

namespace ballast::kernels {
namespace {

constexpr uint64_t kElements = 1 << 22;  // 25 MB of traffic at least: more than a core's caches
constexpr uint64_t kGradientBytes = 2;

struct Case {
  const char *master, *state;
  bool stochastic, full;
};
constexpr Case kCases[] = {
    {"split24", "companded8", true, false},  {"split24", "companded8", true, true},
    {"split24", "companded8", false, false}, {"split24", "companded8", false, true},
    {"fp32", "fp32", false, false},          {"fp32", "fp32", false, true},
};

// 64-byte aligned and touched.
class Buffer {
 public:
  explicit Buffer(uint64_t bytes) : bytes_(new (std::align_val_t{64}) std::byte[bytes]) {
    std::memset(bytes_.get(), 0, bytes);
  }
  std::byte* data() const { return bytes_.get(); }

 private:
  struct Free {
    void operator()(std::byte* p) const { ::operator delete[](p, std::align_val_t{64}); }
  };
  std::unique_ptr<std::byte[], Free> bytes_;
};

uint64_t StoredBytes(const Kernel& kernel) {
  uint64_t bytes = 0;
  for (const Plane& plane : kernel.planes) bytes += PlaneBytes(plane, kElements);
  return bytes;
}
uint64_t MovedBytes(const Kernel& kernel) { return 2 * StoredBytes(kernel) + kElements * kGradientBytes; }

// About normal, with a deviation of `scale`: what matters is that no two blocks are alike.
std::vector<float> Values(uint64_t seed, float scale) {
  std::vector<float> values(kElements);
  uint64_t word = seed;
  for (float& x : values) {
    word = word * 6364136223846793005u + 1442695040888963407u;
    int sum = 0;
    for (int shift = 32; shift < 64; shift += 8) sum += static_cast<int>(word >> shift & 0xff);
    x = scale * (static_cast<float>(sum) - 510.0f) / 148.0f;
  }
  return values;
}

void AdamW(benchmark::State& state, const Case& c) {
  const Kernel& kernel = *FindKernel("adamw", c.master, c.state);
  std::vector<Buffer> planes;
  Update update{};
  for (const Plane& plane : kernel.planes) planes.emplace_back(PlaneBytes(plane, kElements));
  for (size_t p = 0; p < planes.size(); ++p) update.planes[p] = planes[p].data();
  FindMaster(c.master)->load(update.planes, FindWireFormat("fp32"), Values(1, 0.02f).data(), 0, kElements);
  const Buffer gradient(kElements * kGradientBytes), wide(kElements * 4);
  std::byte* wide_planes[] = {wide.data()};
  FindMaster("fp32")->load(wide_planes, FindWireFormat("fp32"), Values(2, 1e-3f).data(), 0, kElements);
  FindMaster("fp32")->serve(wide_planes, FindWireFormat("bf16"), gradient.data(), 0, kElements);
  update.grad = gradient.data();
  update.grad_format = FindWireFormat("bf16");
  update.n = kElements;
  update.grad_scale = 1;
  update.stochastic = c.stochastic;
  update.full_statistics = c.full;
  std::vector<double> hyper;
  for (const Hyper& h : kernel.hypers) hyper.push_back(h.value);
  std::vector<TileStatistics> statistics(kElements / kTile);
  uint64_t t = 0;
  for (auto _ : state) {
    update.random_key = RandomKey(42, ++t);
    kernel.prepare(hyper, t, update.constants);
    kernel.update(update, 0, statistics.size(), statistics.data());
    benchmark::ClobberMemory();
  }
  if (Combine(statistics, c.full).rejected > 0) state.SkipWithError("a block was rejected");
  state.SetBytesProcessed(state.iterations() * static_cast<int64_t>(MovedBytes(kernel)));
  state.SetItemsProcessed(state.iterations() * static_cast<int64_t>(kElements));
}

void Memcpy(benchmark::State& state, const Kernel& kernel) {
  const uint64_t bytes = MovedBytes(kernel) / 2;
  const Buffer from(bytes), to(bytes);
  for (auto _ : state) {
    std::memcpy(to.data(), from.data(), bytes);
    benchmark::ClobberMemory();
  }
  state.SetBytesProcessed(state.iterations() * static_cast<int64_t>(2 * bytes));
}

void Register() {
  const Kernel& usual = *FindKernel("adamw", "split24", "companded8");
  benchmark::RegisterBenchmark("memcpy of split24+companded8's bytes", Memcpy, usual);
  for (const Case& c : kCases) {
    const std::string name = std::string("adamw ") + c.master + "+" + c.state;
    const std::string form = std::string(c.stochastic ? " stochastic" : " nearest") + (c.full ? " full" : " core");
    benchmark::RegisterBenchmark((name + form).c_str(), AdamW, c);
  }
  benchmark::AddCustomContext("lane", LaneName());
}

}  // namespace
}  // namespace ballast::kernels

int main(int argc, char** argv) {
  benchmark::Initialize(&argc, argv);
  if (benchmark::ReportUnrecognizedArguments(argc, argv)) return 1;
  ballast::kernels::Register();
  benchmark::RunSpecifiedBenchmarks();
  return 0;
}
