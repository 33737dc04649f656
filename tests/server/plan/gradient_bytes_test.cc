// What gradients take on their way to their update: pool, credit and windows.
#include <gtest/gtest.h>

#include <algorithm>
#include <random>
#include <string>
#include <vector>

#include "absl/strings/str_cat.h"

#include "server/convert/convert.h"
#include "server/plan/credit.h"
#include "server/plan/plan.h"
#include "tests/model_shapes.h"
#include "tests/server/specs.h"

namespace ballast {
namespace {

using testing::Made;
using testing::MakeSpec;

// One gradient comes while another is read, and these two are neighbours.
TEST(GradientBytesTest, ThePoolHoldsTheLargestWithItsNeighboursNotTwice) {
  RunSpec spec = Made(MakeSpec("r1", {{"embed", {1000000}}, {"a", {1000}}, {"b", {2000}}, {"c", {3000}}}));
  spec.credit_bytes = 64;
  EXPECT_EQ(MakePlan(spec).shards[0].pool_bytes, AlignUp(2000000) + AlignUp(2000) + AlignUp(4000));
  std::rotate(spec.tensors.begin(), spec.tensors.begin() + 2, spec.tensors.end());  // b, c, embed, a
  EXPECT_EQ(MakePlan(spec).shards[0].pool_bytes, AlignUp(2000000) + AlignUp(4000) + AlignUp(6000));
  spec.tensors.push_back(spec.tensors[2]);  // and a head as large, right behind: as for three of a size
  spec.tensors.push_back(spec.tensors[2]);
  EXPECT_EQ(MakePlan(spec).shards[0].pool_bytes, 2 * AlignUp(2000000));
}

// Less, and the step that has it would never end.
TEST(GradientBytesTest, EveryPoolHasRoomForItsLargestTensorWhateverTheirOrder) {
  std::mt19937_64 random(1);
  for (int drawn = 0; drawn < 500; ++drawn) {
    v1::RunSpec wire = MakeSpec("r1", {});
    for (uint64_t i = 1 + random() % 8; i > 0; --i) {
      v1::TensorSpec* t = wire.add_tensors();
      t->set_name(absl::StrCat("w", i));
      t->add_shape(static_cast<int64_t>(1 + random() % (random() % 3 == 0 ? 1000000 : 100)));
      t->set_dtype(random() % 2 == 0 ? "bf16" : "fp32");
    }
    wire.set_ranks(static_cast<uint32_t>(1 + random() % 8));
    RunSpec spec = Made(wire);
    spec.credit_bytes = 1 + random() % 1000;
    Placement placement{.devices = {0, 1}};
    for (size_t i = 0; i < spec.tensors.size(); ++i) placement.shard_of.push_back(static_cast<uint32_t>(random() % 2));
    const Plan plan = MakePlan(spec, placement);
    for (size_t i = 0; i < spec.tensors.size(); ++i) {
      ASSERT_GE(plan.shards[placement.shard_of[i]].pool_bytes, SlabBytes(spec, spec.tensors[i]));
    }
  }
}

TEST(GradientBytesTest, SeveralMicroBatchesAndVerdictsHaveRoomForEveryTensor) {
  v1::RunSpec wire = MakeSpec("r1", {{"embed", {1000000}}, {"a", {1000}}, {"b", {2000}}, {"c", {3000}}});
  const auto pool_bytes = [&] {
    RunSpec spec = Made(wire);
    spec.credit_bytes = 64;
    return MakePlan(spec).shards[0].pool_bytes;
  };
  const auto all = [](uint64_t of_element) {
    uint64_t bytes = 0;
    for (const uint64_t elements : {1000000, 1000, 2000, 3000}) bytes += AlignUp(elements * of_element);
    return bytes;
  };
  EXPECT_LT(pool_bytes(), all(2));
  wire.set_commit(v1::COMMIT_MODE_STAGED);
  EXPECT_EQ(pool_bytes(), all(2));
  wire.set_accumulation(2);
  EXPECT_EQ(pool_bytes(), all(4));
  wire.set_commit(v1::COMMIT_MODE_RELEASE);
  EXPECT_EQ(pool_bytes(), all(4));
}

TEST(GradientBytesTest, CreditIsAShareOfTheGradientsWithinItsLimits) {
  const auto credit = [](int64_t elements, uint64_t limit) {
    Config::Limits limits;
    limits.credit_bytes = limit;
    return ToRunSpec(MakeSpec("r1", {{"w", {elements}}, {"v", {elements}}}), limits).value().credit_bytes;
  };
  EXPECT_EQ(credit(1000, 64 << 20), kLeastCredit);
  EXPECT_EQ(credit(1000, 1 << 20), 1u << 20);
  EXPECT_EQ(credit(50'000'000, 64 << 20), 200'000'000u / 16);
  EXPECT_EQ(credit(50'000'000, 8 << 20), 8u << 20);
  EXPECT_EQ(credit(5'000'000'000, 64 << 20), 64u << 20);
}

// One that is smaller would let a single chunk go at a time.
TEST(GradientBytesTest, CreditHoldsAChunkHoweverLargeThatIs) {
  Config::Limits limits;
  limits.chunk_bytes = 8 << 20;
  limits.message_bytes = 9 << 20;
  const v1::RunSpec wire = MakeSpec("r1", {{"w", {1000}}});
  EXPECT_EQ(ToRunSpec(wire, limits).value().credit_bytes, limits.chunk_bytes);
}

// Each under the name of its number.
v1::RunSpec SpecOf(const std::vector<testing::Shape>& shapes) {
  v1::RunSpec spec = MakeSpec("r1", {});
  for (const testing::Shape& shape : shapes) {
    v1::TensorSpec* t = spec.add_tensors();
    t->set_name(absl::StrCat(spec.tensors_size()));
    t->mutable_shape()->Add(shape.begin(), shape.end());
    t->set_dtype("fp32");
  }
  return spec;
}

// The figures of server/README.md, "Memory".
v1::RunSpec MiniLm() { return SpecOf(testing::MiniLmShapes()); }
v1::RunSpec Llama() { return SpecOf(testing::ShapesOf(testing::kLlama1B)); }

TEST(GradientBytesTest, GradientsUnderWayOfASmallTransformerWithALargeEmbedding) {
  v1::RunSpec wire = MiniLm();
  const auto bytes_each = [&] {
    const Plan plan = MakePlan(Made(wire));
    return static_cast<double>(plan.bytes.gradients) / static_cast<double>(plan.parameters);
  };
  const Plan one = MakePlan(Made(wire));
  EXPECT_EQ(one.parameters, 22'565'376u);
  EXPECT_EQ(one.shards[0].pool_bytes, 4 * 384u * (30522 + 512 + 2));
  EXPECT_EQ(one.window_bytes, 4 * one.parameters / 16 + (2 << 20));
  EXPECT_NEAR(bytes_each(), 2.46, 0.005);
  wire.mutable_groups(0)->set_gradient("bf16");
  EXPECT_NEAR(bytes_each(), 1.34, 0.005);
  wire.set_commit(v1::COMMIT_MODE_STAGED);
  EXPECT_NEAR(bytes_each(), 2.28, 0.005);
  wire = MiniLm();
  wire.set_ranks(8);
  EXPECT_NEAR(bytes_each(), 4.86, 0.005);
  wire.set_commit(v1::COMMIT_MODE_STAGED);
  EXPECT_NEAR(bytes_each(), 6.74, 0.005);
}

TEST(GradientBytesTest, TheReadmesTable) {
  struct Row {
    std::string gradients;
    uint32_t ranks;
    double release, staged, accumulated;
  };
  const auto check = [](const v1::RunSpec& model, const Row& row) {
    const auto bytes_each = [&](v1::CommitMode commit, uint32_t accumulation) {
      v1::RunSpec wire = model;
      wire.mutable_groups(0)->set_gradient(row.gradients);
      wire.set_ranks(row.ranks);
      wire.set_commit(commit);
      wire.set_accumulation(accumulation);
      const Plan plan = MakePlan(Made(wire));
      return static_cast<double>(plan.bytes.gradients) / static_cast<double>(plan.parameters);
    };
    const std::string which = absl::StrCat(row.gradients, ", ", row.ranks);
    EXPECT_NEAR(bytes_each(v1::COMMIT_MODE_RELEASE, 1), row.release, 0.0051) << which;
    EXPECT_NEAR(bytes_each(v1::COMMIT_MODE_STAGED, 1), row.staged, 0.0051) << which;
    EXPECT_NEAR(bytes_each(v1::COMMIT_MODE_RELEASE, 4), row.accumulated, 0.0051) << which;
  };
  for (const Row& row : {Row{"fp32", 1, 2.46, 4.34, 4.34}, Row{"fp32", 8, 4.86, 6.74, 6.74},
                         Row{"bf16", 1, 1.34, 2.28, 4.28}, Row{"bf16", 8, 4.34, 6.23, 6.23}}) {
    check(MiniLm(), row);
  }
  for (const Row& row : {Row{"fp32", 1, 0.92, 4.06, 4.06}, Row{"fp32", 8, 1.32, 4.45, 4.45},
                         Row{"bf16", 1, 0.49, 2.06, 4.06}, Row{"bf16", 8, 1.32, 4.45, 4.45}}) {
    check(Llama(), row);
  }
}

}  // namespace
}  // namespace ballast
