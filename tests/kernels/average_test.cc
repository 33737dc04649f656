// Running averages of weights: the formula, element by element, against an oracle in wider numbers; the same bits in every
// instruction set, on a GPU's driver, and in pieces; and that an average does not stand still where one rounded to nearest does.
#include <gtest/gtest.h>

#include <bit>
#include <cmath>
#include <iostream>
#include <limits>

#include "kernels/cpu/tables.h"
#include "tests/kernels/adversarial.h"
#include "tests/kernels/cuda/lockstep_kernels.h"
#include "tests/kernels/planes.h"
#include "tests/kernels/tensor.h"
#include "tests/oracle/random.h"

namespace ballast::kernels {
namespace {

constexpr uint64_t kElements = 2 * kTile + 1000;
constexpr uint64_t kTensorKey = 42;

// Weights in a master format, and an average of them.
class Averaged {
 public:
  Averaged(const char* master, uint64_t n, double decay)
      : n_(n), decay_(decay), weights_(master, n), average_(AverageMaster().name, n) {}

  Average Step(uint64_t step, bool begins = false) {
    Average a{};
    for (size_t p = 0; p < weights_.planes().count(); ++p) a.weights[p] = weights_.planes()[p];
    for (size_t p = 0; p < 2; ++p) a.planes[p] = average_.planes()[p];
    a.n = n_;
    a.pull = static_cast<float>(1 - decay_);
    a.random_key = RandomKey(AverageKey(kTensorKey, decay_), step);
    a.begins = begins;
    return a;
  }
  void Move(uint64_t step, bool begins = false) { weights_.master().average(Step(step, begins), 0, TilesOf(n_)); }
  Weights& weights() { return weights_; }
  Weights& average() { return average_; }

 private:
  uint64_t n_;
  double decay_;
  Weights weights_, average_;
};

std::vector<float> Finite(std::vector<float> values) {
  for (float& x : values) x = std::isfinite(x) ? x : 1.0f;
  return values;
}

// --- the formula ------------------------------------------------------------------------------------------------------

// In 113 bits: what is exact there is exact.
using Wide = __float128;

uint64_t KeyOfAverage(uint64_t tensor_key, double decay) {
  return oracle::Mixed(tensor_key ^ oracle::Mixed(std::bit_cast<uint64_t>(decay)));
}

float OracleMoved(float a, float w, double decay, uint64_t step, uint64_t element) {
  const float pull = static_cast<float>(1 - decay), off = w - a, move = pull * off;
  const Wide exact = static_cast<Wide>(a) + static_cast<Wide>(move);
  const auto sum = static_cast<float>(exact);
  const auto lost = static_cast<double>(exact - static_cast<Wide>(sum));
  const oracle::RandomFields random = oracle::RandomAt(KeyOfAverage(kTensorKey, decay), step, element);
  const float up = std::numeric_limits<float>::infinity();
  const float next = std::nextafter(sum, lost < 0 ? -up : up);
  const double chance = (static_cast<double>(random.m) + 0.5) / 65536, gap = std::fabs(static_cast<double>(next) - sum);
  const float rounded = chance * gap < std::fabs(lost) ? next : sum;
  const auto bits = std::bit_cast<uint32_t>(rounded);
  return std::bit_cast<float>((bits + (random.master >> 8)) >> 8 << 8);
}

TEST(AverageTest, MovesByTheFormula) {
  const std::vector<float> from = Normals(1).Vector(kElements, 0.1), to = Normals(2).Vector(kElements, 0.1);
  for (const double decay : {0.5, 0.9, 0.999, 0.99999}) {
    Averaged averaged("fp32", kElements, decay);
    averaged.weights().Load(from);
    averaged.Move(1, /*begins=*/true);
    std::vector<float> before = averaged.average().Values();
    averaged.weights().Load(to);
    for (uint64_t step = 2; step < 6; ++step) {
      averaged.Move(step);
      const std::vector<float> got = averaged.average().Values();
      for (uint64_t e = 0; e < kElements; ++e) {
        ASSERT_EQ(got[e], OracleMoved(before[e], to[e], decay, step, e)) << decay << ", element " << e;
      }
      before = got;
    }
  }
}

TEST(AverageTest, BeginsAsACopyOfTheWeights) {
  const std::vector<float> weights = Normals(3).Vector(kElements, 0.1);
  Averaged averaged("split24", kElements, 0.999);
  averaged.weights().Load(weights);
  averaged.Move(1, /*begins=*/true);
  EXPECT_EQ(averaged.average().Values(), averaged.weights().Values());
  averaged.Move(2);  // of equal weights: nothing is lost, and nothing moves
  EXPECT_EQ(averaged.average().Values(), averaged.weights().Values());
}

TEST(AverageTest, LeavesTheWeightsAloneAndThePaddingZero) {
  Averaged averaged("split24", kPad + 7, 0.9);
  averaged.weights().Load(Normals(3).Vector(kPad + 7, 0.1));
  const auto weights = averaged.weights().planes().Bytes();
  for (uint64_t step = 1; step < 4; ++step) averaged.Move(step, step == 1);
  EXPECT_TRUE(averaged.weights().planes().Bytes() == weights);
  for (uint64_t e = kPad + 7; e < 2 * kPad; ++e) {
    ASSERT_EQ(averaged.average().planes()[1][e], std::byte{0});
    ASSERT_EQ(averaged.average().planes()[0][2 * e], std::byte{0});
  }
}

TEST(AverageTest, IsHeldToTheLargestThatItsFormatHas) {
  Averaged averaged("fp32", kPad, 0.9);
  averaged.weights().Load(std::vector<float>(kPad, -std::numeric_limits<float>::max()));
  averaged.Move(1, /*begins=*/true);
  averaged.weights().Load(std::vector<float>(kPad, std::numeric_limits<float>::max()));
  for (uint64_t step = 2; step < 5; ++step) averaged.Move(step);
  for (const float x : averaged.average().Values()) ASSERT_TRUE(std::isfinite(x));
}

TEST(AverageTest, HasRandomBitsOfItsOwn) {
  EXPECT_NE(AverageKey(kTensorKey, 0.999), kTensorKey);
  EXPECT_NE(AverageKey(kTensorKey, 0.999), AverageKey(kTensorKey, 0.9999));
  EXPECT_EQ(AverageKey(kTensorKey, 0.999), KeyOfAverage(kTensorKey, 0.999));
}

// --- the same bits ----------------------------------------------------------------------------------------------------

// Of every master, `moved` by some steps.
template <class Move>
std::vector<std::byte> BytesOf(size_t master, uint64_t n, bool adversarial, Move move) {
  Averaged averaged(MasterFormats()[master].name, n, 0.999);
  for (uint64_t step = 1; step < 5; ++step) {
    averaged.weights().Load(adversarial ? Finite(Adversarial(step, n)) : Normals(step).Vector(n, 0.1));
    move(averaged.Step(step, step == 1));
  }
  return averaged.average().planes().Bytes();
}

void ExpectSameBits(size_t m, uint64_t n, bool adversarial) {
  SCOPED_TRACE(std::string(MasterFormats()[m].name) + ", " + std::to_string(n) + " elements");
  const uint64_t tiles = TilesOf(n);
  const auto wanted =
      BytesOf(m, n, adversarial, [&](const Average& a) { ScalarTables().masters[m].average(a, 0, tiles); });
  for (const IsaTables* isa : UsableIsas()) {
    EXPECT_TRUE(BytesOf(m, n, adversarial, [&](const Average& a) { isa->masters[m].average(a, 0, tiles); }) == wanted)
        << isa->name;
  }
  const auto in_pieces = [&](const Average& a) {
    for (uint64_t tile = tiles; tile-- > 0;) MasterFormats()[m].average(a, tile, tile + 1);
  };
  EXPECT_TRUE(BytesOf(m, n, adversarial, in_pieces) == wanted) << "tile by tile, from the last on";
  const auto on_gpu = [&](const Average& a) { LockstepMasters()[m].average(a, 0, tiles); };
  EXPECT_TRUE(BytesOf(m, n, adversarial, on_gpu) == wanted) << "the GPU's driver";
}

TEST(AverageTest, TheBitsAreTheSameEverywhere) {
  for (size_t m = 0; m < MasterFormats().size(); ++m) {
    for (const bool adversarial : {false, true}) ExpectSameBits(m, kElements, adversarial);
  }
}

TEST(AverageTest, EveryLengthOfTheLastRowGivesTheSameBits) {
  const auto split24 = static_cast<size_t>(FindMasterFormat("split24") - MasterFormats().data());
  for (uint64_t n = 1; n <= kPad + 1; ++n) ExpectSameBits(split24, n, false);
}

// --- accuracy ---------------------------------------------------------------------------------------------------------

struct Errors {
  double rms = 0, bias = 0;  // of the elements, and of their mean, to the weights' size
};

Errors ErrorsOf(const std::vector<double>& got, double wanted) {
  Errors errors;
  for (const double x : got) {
    errors.bias += (x - wanted) / wanted;
    errors.rms += std::pow((x - wanted) / wanted, 2);
  }
  const auto n = static_cast<double>(got.size());
  return {std::sqrt(errors.rms / n), errors.bias / n};
}

// All weights go from 1.5 to 1.5 (1 + jump) at once, and the average follows for `steps`. An average in fp32, rounded to
// nearest, and one in bf16, rounded to nearest, go beside.
TEST(AverageTest, FollowsAStepThatIsTooSmallForRoundingToNearest) {
  constexpr uint64_t kSteps = 30000;
  constexpr double kDecay = 0.9999, kJump = 2e-4, kFrom = 1.5;
  const auto to = static_cast<float>(kFrom * (1 + kJump));
  Averaged averaged("fp32", 4 * kPad, kDecay);
  averaged.weights().Load(std::vector<float>(4 * kPad, static_cast<float>(kFrom)));
  averaged.Move(1, /*begins=*/true);
  averaged.weights().Load(std::vector<float>(4 * kPad, to));
  double exact = kFrom;
  auto fp32 = static_cast<float>(kFrom);
  const auto pull = static_cast<float>(1 - kDecay);
  for (uint64_t step = 2; step < 2 + kSteps; ++step) {
    averaged.Move(step);
    exact += (1 - kDecay) * (static_cast<double>(to) - exact);
    fp32 += pull * (to - fp32);
  }
  std::vector<double> got;
  for (const float x : averaged.average().Values()) got.push_back(x);
  const Errors errors = ErrorsOf(got, exact);
  const double stalled = std::fabs(static_cast<double>(fp32) - exact) / exact;
  // Of what is lost and rounded by chance: |move| times the last place, 2^-15 of a power of two, is a step's variance at
  // most, and (1 - d) of it is forgotten at each.
  const double bound = std::sqrt(kJump * 0x1p-15 / 2);
  std::cout << "d " << kDecay << ", a jump of " << kJump << ", " << kSteps << " steps: rms error " << errors.rms
            << " of bound " << bound << ", bias " << errors.bias << "; fp32, nearest: " << stalled << "\n";
  EXPECT_EQ(fp32, static_cast<float>(kFrom)) << "else this says nothing";
  EXPECT_LT(errors.rms, bound);
  EXPECT_LT(std::fabs(errors.bias), 4 * bound / std::sqrt(got.size()));
}

}  // namespace
}  // namespace ballast::kernels
