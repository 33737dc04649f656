// Neither the optimiser nor the processor changes a bit: every kernel of every lane this machine can run against the
// same text compiled without optimisation.
#include <gtest/gtest.h>

#include <bit>
#include <set>

#include "tests/kernels/tensor.h"
#include "tests/kernels/unoptimized_kernels.h"

namespace ballast::kernels {
namespace {

constexpr uint64_t kElements = 3 * kTile + 1000;

// Finite patterns of every size up to 2^100, zeros, subnormals and ties. One block in sixteen gets any pattern at all.
std::vector<float> Adversarial(uint64_t seed, uint64_t n) {
  Normals random(seed);
  std::vector<float> values(n);
  for (uint64_t i = 0; i < n; ++i) {
    const uint32_t word = static_cast<uint32_t>(random.Word());
    // Each block has an exponent of its own, and its elements reach 24 powers of two below.
    const uint32_t largest = 2 + static_cast<uint32_t>((i / kBlock + seed) * 0x9E3779B97F4A7C15ull >> 33) % 180;
    const uint32_t exponent = largest - std::min(largest, word >> 3 & 0x1f);
    uint32_t bits = (word & 0x80000000u) | exponent << 23 | (word >> 8 & 0x7fffff);
    if (word % 16 == 0) bits &= 0xff808000;  // few digits: ties
    if (word % 19 == 0) bits &= 0x80000000;
    if (i / kBlock % 16 == 5) bits = static_cast<uint32_t>(random.Word());
    values[i] = std::bit_cast<float>(bits);
  }
  return values;
}

struct Outcome {
  uint64_t blocks = 0, rejected = 0;
};

// Two compilations of one kernel.
struct Pair {
  const Kernel *fast, *slow;
  std::string name;
};
std::vector<Pair> Pairs() {
  std::vector<Pair> pairs;
  const std::span<const Kernel> slow = UnoptimizedTables().kernels;
  for (const LaneTables* lane : UsableLanes()) {
    for (size_t i = 0; i < lane->kernels.size(); ++i) {
      pairs.push_back({&lane->kernels[i], &slow[i], NameOf(slow[i]) + ", lane " + lane->name});
    }
  }
  return pairs;
}

// Runs both kernels side by side, with the gradients that `gradient(t)` gives.
template <class Gradient>
Outcome ExpectSameBits(const Pair& pair, bool stochastic, double weight_scale, Gradient gradient) {
  Tensor a(*pair.fast, kElements);
  a.SetWeights(Normals(1).Vector(kElements, weight_scale));
  Tensor b(*pair.slow, kElements);
  b.SetWeights(a.Weights());
  Outcome outcome;
  for (uint64_t t = 1; t <= 5; ++t) {
    const Payload grad = gradient(t);
    const StepOptions options{.t = t, .stochastic = stochastic};
    const std::vector<TileStatistics> wanted = a.Step(grad, options), got = b.Step(grad, options);
    EXPECT_EQ(std::memcmp(wanted.data(), got.data(), got.size() * sizeof got[0]), 0) << "statistics, step " << t;
    EXPECT_TRUE(a.Bytes() == b.Bytes()) << "planes, step " << t;
    outcome.blocks += (kElements + kBlock - 1) / kBlock;
    for (const TileStatistics& s : got) outcome.rejected += s.rejected;
  }
  return outcome;
}

TEST(IdentityTest, NoTwoLanesShareAFunction) {
  std::set<void (*)(const Update&, uint64_t, uint64_t, TileStatistics*)> updates;
  size_t count = 0;
  for (const Pair& pair : Pairs()) {
    EXPECT_EQ(NameOf(*pair.fast), NameOf(*pair.slow));
    EXPECT_NE(pair.fast->update, pair.slow->update) << pair.name;
    EXPECT_NE(pair.fast->prepare, pair.slow->prepare) << pair.name;
    updates.insert(pair.fast->update);
    ++count;
  }
  EXPECT_EQ(updates.size(), count);
  EXPECT_EQ(count, Kernels().size() * UsableLanes().size());
  EXPECT_EQ(Kernels().data(), UsableLanes().back()->kernels.data());
}

TEST(IdentityTest, OrdinaryGradientsGiveTheSameBits) {
  for (const Pair& pair : Pairs()) {
    for (const WireFormat& wire : WireFormats()) {
      for (const bool stochastic : {false, true}) {
        SCOPED_TRACE(pair.name + " " + wire.name);
        const auto gradient = [&](uint64_t t) {
          return Encoded(FindWireFormat(wire.name), Normals(t).Vector(kElements, 1e-3));
        };
        EXPECT_EQ(ExpectSameBits(pair, stochastic, 0.02, gradient).rejected, 0u);
      }
    }
  }
}

TEST(IdentityTest, AdversarialGradientsGiveTheSameBits) {
  for (const Pair& pair : Pairs()) {
    for (const bool stochastic : {false, true}) {
      SCOPED_TRACE(pair.name);
      const auto gradient = [](uint64_t t) { return Encoded(0, Adversarial(t, kElements)); };
      const Outcome outcome = ExpectSameBits(pair, stochastic, 1, gradient);
      EXPECT_GT(outcome.rejected, 0u);
      EXPECT_LT(outcome.rejected * 5, outcome.blocks) << "most blocks must take the ordinary path";
    }
  }
}

// Loads `values` and serves them in every format: all that the master's codec writes, one after the other.
std::vector<std::byte> LoadedAndServed(const Master& master, const std::vector<float>& values) {
  const uint64_t n = values.size();
  std::vector<std::byte> planes[2], all;
  std::byte* at[2] = {};
  for (size_t p = 0; p < master.planes.size(); ++p) {
    planes[p].resize(PlaneBytes(master.planes[p], n));
    at[p] = planes[p].data();
  }
  EXPECT_TRUE(master.load(at, FindWireFormat("fp32"), values.data(), 0, n));
  for (const auto& plane : planes) all.insert(all.end(), plane.begin(), plane.end());
  for (size_t wire = 0; wire < WireFormats().size(); ++wire) {
    std::vector<std::byte> served(n * WireFormats()[wire].bytes);
    master.serve(at, static_cast<WireIndex>(wire), served.data(), 0, n);
    all.insert(all.end(), served.begin(), served.end());
  }
  return all;
}

TEST(IdentityTest, LoadingAndServingGiveTheSameBits) {
  std::vector<float> values = Adversarial(9, kElements);
  for (float& x : values) x = std::isfinite(x) ? x : 0.0f;
  for (const LaneTables* lane : UsableLanes()) {
    for (size_t i = 0; i < lane->masters.size(); ++i) {
      const Master &fast = lane->masters[i], &slow = UnoptimizedTables().masters[i];
      EXPECT_NE(fast.load, slow.load);
      EXPECT_TRUE(LoadedAndServed(fast, values) == LoadedAndServed(slow, values)) << fast.name << " " << lane->name;
    }
  }
}

}  // namespace
}  // namespace ballast::kernels
