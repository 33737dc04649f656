// Sums of chunks that ranks have in part, against sums element by element.
#include "server/run/gradient_pool.h"

#include <gtest/gtest.h>

#include <cmath>
#include <cstring>
#include <map>
#include <random>

#include "server/device/cpu_device.h"
#include "tests/server/specs.h"

namespace ballast {
namespace {

constexpr uint64_t kPoolChunk = 4096, kPoolElements = kPoolChunk + 1000;
constexpr uint32_t kContributors = 4;

class GradientPoolTest : public ::testing::Test {
 protected:
  static RunSpec Made(const std::string& dtype, uint32_t ranks) {
    v1::RunSpec wire = testing::MakeSpec("r1", {{"w", {kPoolElements}, dtype}});
    wire.set_ranks(ranks);
    wire.set_accumulation(3);
    Config::Limits limits;
    limits.chunk_bytes = kPoolChunk * sizeof(float);
    return ToRunSpec(wire, limits).value();
  }
  explicit GradientPoolTest(const std::string& dtype = "fp32")
      : spec_(Made(dtype, kContributors)), plan_(MakePlan(spec_)), pool_(&spec_, &plan_, Buffers()) {}

  std::vector<DeviceBuffer> Buffers() {
    std::vector<DeviceBuffer> buffers;
    buffers.push_back(device_.Allocate(plan_.shards[0].pool_bytes, Place::kHost).value());
    return buffers;
  }
  float* Values(uint64_t chunk) { return reinterpret_cast<float*>(pool_.At(0, slab_)) + chunk * kPoolChunk; }
  static uint64_t ElementsOf(uint64_t chunk) { return chunk == 0 ? kPoolChunk : kPoolElements - kPoolChunk; }

  CpuDevice device_{{.threads = 1}};
  const RunSpec spec_;
  const Plan plan_;
  GradientPool pool_;
  Slab slab_{.offset = 0, .bytes = SlabBytes(spec_, spec_.tensors[0])};
};

uint32_t Bits(float value) {
  uint32_t bits = 0;
  std::memcpy(&bits, &value, sizeof(bits));
  return bits;
}

// A rank's payload of a part of a chunk.
struct Sent {
  ChunkPart part;
  std::vector<float> values;
  Payload payload() const {
    return Payload(std::string(reinterpret_cast<const char*>(values.data()), values.size() * sizeof(float)));
  }
};

Sent Draw(std::mt19937* random, ChunkPart part) {
  Sent sent{.part = part, .values = {}};
  std::normal_distribution<float> normal;
  for (uint32_t e = part.begin; e < part.end; ++e) {
    const auto kind = (*random)() % 8;
    sent.values.push_back(kind == 0 ? -0.0f : kind == 1 ? 0.0f : normal(*random));
  }
  return sent;
}

// The element as the ranks that have it would make it one after another; none: nobody has it.
void Add(const Sent& sent, std::vector<std::optional<float>>* sums) {
  for (uint32_t e = sent.part.begin; e < sent.part.end; ++e) {
    std::optional<float>& sum = (*sums)[e];
    const float value = sent.values[e - sent.part.begin];
    sum = sum ? *sum + value : value;
  }
}

TEST_F(GradientPoolTest, AnElementIsTheSumOfThoseWhoHaveItToTheBit) {
  std::mt19937 random(5);
  uint64_t somebodys = 0, nobodys = 0, draws = 0;
  for (int draw = 0; draw < 200; ++draw) {
    pool_.SumOnDevice(draw % 2 == 1);  // whose terms are whole, with the same sum
    const uint64_t chunk = random() % 2;
    const auto of = static_cast<uint32_t>(ElementsOf(chunk));
    std::vector<ChunkSet> covers;
    std::vector<ChunkPart> parts;
    for (uint32_t r = 0; r < kContributors; ++r) {
      const auto begin = static_cast<uint32_t>(random() % 3 == 0 ? 0 : random() % of);
      const auto end = static_cast<uint32_t>(random() % 3 == 0 ? of : begin + 1 + random() % (of - begin));
      parts.push_back({begin, end, of});
      ChunkSet& set = covers.emplace_back(std::make_shared<const std::vector<uint64_t>>(std::vector<uint64_t>{0, 2}));
      const bool whole = end - begin == of;
      set.Assign(0, {true, true},
                 whole ? std::vector<ChunkSet::Piece>() : std::vector<ChunkSet::Piece>{{chunk, parts[r]}});
    }
    std::vector<std::optional<float>> wanted(of);
    std::fill_n(Values(chunk), of, std::nanf(""));  // what an earlier step left
    bool first = true;
    for (uint32_t micro = 0; micro < 3; ++micro) {
      std::map<uint32_t, Sent> sent;
      effect::Sum sum{.id = {micro, 0, chunk}, .slab = slab_, .ranks = {}, .first = first};
      for (uint32_t r = 0; r < kContributors; ++r) {
        if (random() % 3 == 0) continue;  // it has listed the tensor absent
        sum.ranks.push_back(r);
        sent[r] = Draw(&random, parts[r]);
        Add(sent[r], &wanted);
      }
      if (sum.ranks.empty()) continue;
      const SumTask task = pool_.TaskOf(
          sum, [&](uint32_t r) { return sent[r].payload(); }, [&](uint32_t r) -> const ChunkSet& { return covers[r]; });
      ASSERT_EQ(task.on_device, draw % 2 == 1);
      for (const SumTask::Term& term : task.terms) ASSERT_TRUE(!task.on_device || term.last - term.first == of);
      const uint64_t cut = random() % (of + 1);  // by two threads
      RunSum(task, cut, of);
      RunSum(task, 0, cut);
      first = false;
    }
    for (uint32_t e = 0; e < of && !first; ++e) {
      wanted[e] ? ++somebodys : ++nobodys;
      ASSERT_EQ(Bits(Values(chunk)[e]), Bits(wanted[e].value_or(-0.0f))) << "element " << e << " of draw " << draw;
    }
    draws += first ? 0 : 1;
  }
  EXPECT_GT(somebodys, 100'000u);
  EXPECT_GT(nobodys, 1000u);
  EXPECT_GT(draws, 100u);
}

TEST_F(GradientPoolTest, AChunkThatNobodySentChangesNothingThatIsAdded) {
  std::fill_n(Values(1), ElementsOf(1), 3.0f);
  const ChunkSet all;
  const auto covers = [&](uint32_t) -> const ChunkSet& { return all; };
  RunSum(pool_.TaskOf(
             {.id = {0, 0, 1}, .slab = slab_, .ranks = {}, .first = true}, [](uint32_t) { return Payload(); }, covers),
         0, ElementsOf(1));
  for (uint64_t e = 0; e < ElementsOf(1); ++e) ASSERT_EQ(Bits(Values(1)[e]), Bits(-0.0f));
}

}  // namespace
}  // namespace ballast
