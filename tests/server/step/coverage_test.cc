#include "server/step/coverage.h"

#include <gtest/gtest.h>

#include <random>

namespace ballast {
namespace {

// One tensor of two chunks of 10 elements.
ChunkSet SetOf(const std::vector<bool>& chunks, const std::vector<ChunkSet::Piece>& parts = {}) {
  ChunkSet set(std::make_shared<const std::vector<uint64_t>>(std::vector<uint64_t>{0, 2}));
  set.Assign(0, chunks, parts);
  return set;
}

std::optional<ChunkPart> Gap(const std::vector<ChunkSet>& sets, uint64_t chunk) {
  std::vector<const ChunkSet*> pointers;
  for (const ChunkSet& set : sets) pointers.push_back(&set);
  return GapOf(pointers, 0, chunk);
}

TEST(CoverageTest, ASetTellsWhatItHasOfAChunk) {
  const ChunkSet set = SetOf({true, true}, {{1, {2, 7, 10}}});
  EXPECT_FALSE(set.PartOf(0, 0));
  EXPECT_EQ(set.PartOf(0, 1), (ChunkPart{2, 7, 10}));
  EXPECT_EQ(PartIn(set, 0, 0, 10), (ChunkPart{0, 10, 10}));
  EXPECT_EQ(PartIn(set, 0, 1, 10), (ChunkPart{2, 7, 10}));
  EXPECT_EQ(PartIn(ChunkSet(), 0, 1, 10), (ChunkPart{0, 10, 10}));
  EXPECT_EQ(set.Count(0), 2u);
  EXPECT_EQ(NextIn(SetOf({false, true}), 0, 0, 2), 1u);
  EXPECT_EQ(NextIn(SetOf({true, false}), 0, 1, 2), std::nullopt);
}

TEST(CoverageTest, PartsOfSeveralTensorsAreFound) {
  ChunkSet set(std::make_shared<const std::vector<uint64_t>>(std::vector<uint64_t>{0, 1, 4, 6}));
  set.Assign(0, {true}, std::vector<ChunkSet::Piece>{{0, {1, 2, 3}}});
  set.Assign(2, {true, true}, std::vector<ChunkSet::Piece>{{0, {5, 10, 10}}, {1, {0, 3, 4}}});
  EXPECT_EQ(set.PartOf(0, 0), (ChunkPart{1, 2, 3}));
  EXPECT_FALSE(set.PartOf(1, 0));
  EXPECT_FALSE(set.PartOf(1, 2));
  EXPECT_EQ(set.PartOf(2, 0), (ChunkPart{5, 10, 10}));
  EXPECT_EQ(set.PartOf(2, 1), (ChunkPart{0, 3, 4}));
}

TEST(CoverageTest, AGapIsFoundByTheElement) {
  const ChunkSet left = SetOf({true, false}, {{0, {0, 4, 10}}}), right = SetOf({true, true}, {{0, {4, 10, 10}}});
  EXPECT_FALSE(Gap({left, right}, 0));
  EXPECT_FALSE(Gap({right, left}, 0));
  EXPECT_FALSE(Gap({left, right}, 1));
  EXPECT_EQ(Gap({left}, 0), (ChunkPart{4, 10, 10}));
  EXPECT_EQ(Gap({right}, 0), (ChunkPart{0, 4, 10}));
  EXPECT_EQ(Gap({left}, 1), ChunkPart{}) << "none has any of it";
  EXPECT_EQ(Gap({left, SetOf({true, false}, {{0, {5, 10, 10}}})}, 0), (ChunkPart{4, 5, 10}));
  EXPECT_FALSE(Gap({left, ChunkSet()}, 0)) << "has all";
  EXPECT_FALSE(Gap({left, SetOf({true, true})}, 0));
}

// Against bits.
TEST(CoverageTest, GapsOfDrawnPartsAreThoseOfTheirBits) {
  std::mt19937 engine(3);
  const auto random = [&] { return static_cast<uint32_t>(engine()); };
  int gaps = 0;
  for (int draw = 0; draw < 2000; ++draw) {
    const uint32_t of = 1 + random() % 12;
    std::vector<ChunkSet> sets;
    std::vector<bool> covered(of);
    for (uint32_t r = 0, ranks = 1 + random() % 5; r < ranks; ++r) {
      const uint32_t begin = random() % of, end = begin + 1 + random() % (of - begin);
      const bool whole = begin == 0 && end == of;
      sets.push_back(SetOf(
          {true, true}, whole ? std::vector<ChunkSet::Piece>() : std::vector<ChunkSet::Piece>{{0, {begin, end, of}}}));
      std::fill(covered.begin() + begin, covered.begin() + end, true);
    }
    const auto first = std::find(covered.begin(), covered.end(), false);
    const auto gap = Gap(sets, 0);
    ASSERT_EQ(gap.has_value(), first != covered.end());
    if (!gap) continue;
    ++gaps;
    EXPECT_EQ(gap->begin, first - covered.begin());
    EXPECT_EQ(gap->end, std::find(first, covered.end(), true) - covered.begin());
    EXPECT_EQ(gap->of, of);
  }
  EXPECT_GT(gaps, 100);
}

}  // namespace
}  // namespace ballast
