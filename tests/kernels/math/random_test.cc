// The random bits: against vectors from an independent program, and their quality.
#include "kernels/math/random.h"

#include <gtest/gtest.h>

#include <cmath>
#include <vector>

#include "kernels/registry.h"
#include "tests/oracle/random.h"

namespace ballast::kernels {
namespace {

struct Fields {
  uint32_t m, v, master;  // 16, 16 and 16 bits
};
constexpr int kFieldCount = 3;
uint32_t Field(const Fields& f, int i) { return i == 0 ? f.m : i == 1 ? f.v : f.master; }

struct RandomWords {
  uint32_t state, master;
};
RandomWords WordsAt(uint64_t tensor_key, uint64_t step, uint64_t element) {
  const RandomStream<ScalarVector> stream(RandomKey(tensor_key, step), element);
  const uint32_t x = stream.At(element);
  return {x, stream.ForMaster(x)};
}

Fields At(uint64_t tensor_key, uint64_t step, uint64_t element) {
  const RandomWords w = WordsAt(tensor_key, step, element);
  return {w.state & 0xffff, w.state >> 16, w.master >> 16};
}

TEST(RandomTest, WordsAreThoseOfTheIndependentProgram) {
  struct Vector {
    uint64_t tensor_key, step, element;
    uint32_t state, master;
  };
  constexpr Vector kVectors[] = {
#include "tests/oracle/random_vectors.inc"
  };
  static_assert(std::size(kVectors) == 64);
  for (const Vector& v : kVectors) {
    SCOPED_TRACE(testing::Message() << v.tensor_key << " " << v.step << " " << v.element);
    const RandomWords w = WordsAt(v.tensor_key, v.step, v.element);
    EXPECT_EQ(w.state, v.state);
    EXPECT_EQ(w.master, v.master);
    const oracle::RandomFields oracle = oracle::RandomAt(v.tensor_key, v.step, v.element);
    EXPECT_EQ(oracle.m | oracle.v << 16, v.state);
    EXPECT_EQ(oracle.master, v.master >> 16);
  }
}

TEST(RandomTest, ManyWordsAreThoseOfEachElement) {
  const RandomStream<ScalarVector> stream(RandomKey(7, 3), (1ull << 32) + 4096);
  uint32_t words[64];
  stream.Fill((1ull << 32) + 4096, 64, words);
  for (uint64_t i = 0; i < 64; ++i) EXPECT_EQ(words[i], stream.At((1ull << 32) + 4096 + i)) << i;
}

TEST(RandomTest, UniformIsInsideZeroAndOneAndExact) {
  for (uint32_t bits = 0; bits < 65536; ++bits) {
    ASSERT_EQ(static_cast<double>(Dither<ScalarVector>(bits)), 128 + bits / 65536.0);
    const double u = static_cast<double>(Uniform<ScalarVector>(bits));
    ASSERT_EQ(u, (bits + 0.5) / 65536);
  }
}

// Chi-square of 65536 cells, as a standard score: beyond 5 is no chance.
double ChiSquareScore(const std::vector<uint32_t>& counts, double expected) {
  double chi = 0;
  for (const uint32_t c : counts) chi += (c - expected) * (c - expected) / expected;
  const double degrees = static_cast<double>(counts.size()) - 1;
  return (chi - degrees) / std::sqrt(2 * degrees);
}

TEST(RandomTest, EachFieldIsUniformOverItsValues) {
  constexpr uint64_t kSamples = 1 << 21;
  for (const uint64_t step : {1, 2, 977}) {
    for (int field = 0; field < kFieldCount; ++field) {
      std::vector<uint32_t> counts(65536);
      for (uint64_t e = 0; e < kSamples; ++e) ++counts[Field(At(7, step, e), field)];
      EXPECT_LT(std::abs(ChiSquareScore(counts, kSamples / 65536.0)), 5) << "field " << field << " step " << step;
    }
  }
}

TEST(RandomTest, OneElementIsUniformOverSteps) {
  for (int field = 0; field < kFieldCount; ++field) {
    std::vector<uint32_t> counts(4096);
    for (uint64_t step = 1; step <= 1 << 18; ++step) ++counts[Field(At(7, step, 5), field) >> 4];
    EXPECT_LT(std::abs(ChiSquareScore(counts, 64)), 5) << "field " << field;
  }
}

// Correlation of two streams of fields, times sqrt(samples): a standard score.
template <class First, class Second>
double CorrelationScore(First first, Second second, uint64_t samples) {
  double sum = 0;
  const double variance = (65536.0 * 65536.0 - 1) / 12;
  for (uint64_t i = 0; i < samples; ++i) sum += (first(i) - 32767.5) * (second(i) - 32767.5) / variance;
  return sum / std::sqrt(static_cast<double>(samples));
}

TEST(RandomTest, NeighboursDoNotCorrelate) {
  constexpr uint64_t kSamples = 1 << 20;
  for (int a = 0; a < kFieldCount; ++a) {
    for (int b = 0; b < kFieldCount; ++b) {
      const auto field = [](int i, uint64_t key, uint64_t step, uint64_t e) { return Field(At(key, step, e), i); };
      const auto here = [&](uint64_t e) { return field(a, 3, 10, e); };
      const auto score = [&](auto other) { return std::abs(CorrelationScore(here, other, kSamples)); };
      SCOPED_TRACE(testing::Message() << "fields " << a << " and " << b);
      if (a != b) {
        EXPECT_LT(score([&](uint64_t e) { return field(b, 3, 10, e); }), 5) << "same element";
      }
      EXPECT_LT(score([&](uint64_t e) { return field(b, 3, 10, e + 1); }), 5) << "next element";
      EXPECT_LT(score([&](uint64_t e) { return field(b, 3, 10, e + 32); }), 5) << "next block";
      EXPECT_LT(score([&](uint64_t e) { return field(b, 3, 11, e); }), 5) << "next step";
      EXPECT_LT(score([&](uint64_t e) { return field(b, 2, 10, e); }), 5) << "next tensor key";
      EXPECT_LT(score([&](uint64_t e) { return field(b, 3, 10, e + (1ull << 32)); }), 5) << "2^32 elements on";
    }
  }
}

// Steps and tensor keys pick one of 2^64 sequences and not places in one: no step repeats another's words, shifted.
TEST(RandomTest, StepsAreNotShiftsOfOneSequence) {
  const auto state = [](uint64_t step, uint64_t e) { return WordsAt(1, step, e).state; };
  for (uint64_t shift = 0; shift < 4096; ++shift) {
    int equal = 0;
    for (uint64_t e = 0; e < 8; ++e) equal += state(2, e + shift) == state(1, e) ? 1 : 0;
    ASSERT_LT(equal, 2) << shift;
  }
}

}  // namespace
}  // namespace ballast::kernels
