// What a run gives out in fp32 and takes back: which formats come back to the bit, and how near the others do.
#include <gtest/gtest.h>

#include <algorithm>
#include <bit>
#include <cmath>
#include <set>
#include <string>

#include "tests/kernels/decoded.h"
#include "tests/kernels/moment_values.h"
#include "tests/kernels/planes.h"

namespace ballast::kernels {
namespace {

// In mcf, mcf8, flash24 and flash32 two pairs of words may stand for one value; a zero loses its sign.
const std::set<std::string> kExactMasters = {"fp32", "bf16", "split24", "split32"};
// The others take their scale anew from the decoded values.
const std::set<std::string> kExactStates = {"fp32", "bf16"};

// All fp32 numbers whose low `bits` bits are 0 and that no format saturates.
std::vector<float> EveryPattern(int bits, uint32_t largest) {
  std::vector<float> values;
  for (uint64_t word = 0; word < uint64_t{1} << 32; word += uint64_t{1} << bits) {
    const auto pattern = static_cast<uint32_t>(word);
    if ((pattern & 0x7fffffffu) <= largest) values.push_back(std::bit_cast<float>(pattern));
  }
  return values;
}

bool ComesBack(const char* master, const std::vector<float>& values) {
  Weights first(master, values), again(master, first.Values());
  return first.planes().Bytes() == again.planes().Bytes();
}

TEST(ReloadTest, MastersComeBackToTheBit) {
  const std::vector<float> halves = EveryPattern(16, 0x7f7f0000u), three_bytes = EveryPattern(8, 0x7f7f7f00u);
  for (const MasterFormat& master : MasterFormats()) {
    SCOPED_TRACE(master.name);
    const bool exact = kExactMasters.contains(master.name);
    EXPECT_EQ(ComesBack(master.name, halves) && ComesBack(master.name, three_bytes), exact);
    // In all, what is taken back is the value that was given out.
    Weights first(master.name, MomentsOfEverySize(PlaneKind::kMomentum, 3 * kTile + 77));
    Weights again(master.name, first.Values());
    EXPECT_TRUE(!exact || first.planes().Bytes() == again.planes().Bytes());
    EXPECT_EQ(first.Values(), again.Values());
  }
}

bool ComesBack(Moment* moment) {
  const std::vector<std::byte> before = moment->planes().Bytes();
  return moment->Encode(moment->Decode()) && moment->planes().Bytes() == before;
}

TEST(ReloadTest, StatesComeBackToTheBitOrNearIt) {
  for (const MomentFormat& state : MomentFormats()) {
    for (const bool variance : {false, true}) {
      for (const bool stochastic : {false, true}) {
        SCOPED_TRACE(std::string(state.name) + (variance ? " v" : " m") + (stochastic ? ", stochastic" : ""));
        Moment moment(state.name, variance ? PlaneKind::kVariance : PlaneKind::kMomentum, 3 * kTile + 77);
        ASSERT_TRUE(
            moment.Encode(MomentsOfEverySize(variance ? PlaneKind::kVariance : PlaneKind::kMomentum, moment.size()),
                          /*random_key=*/7, stochastic));
        const std::vector<float> before = moment.Decode();
        const bool exact = ComesBack(&moment);
        EXPECT_TRUE(exact || !kExactStates.contains(state.name));
        const std::vector<float> after = moment.Decode();
        for (uint64_t block = 0; block < before.size(); block += kPad) {
          const auto end = std::min(before.size(), block + kPad);
          float most = 0;
          for (uint64_t i = block; i < end; ++i) most = std::max(most, std::abs(before[i]));
          for (uint64_t i = block; i < end; ++i) ASSERT_LE(std::abs(after[i] - before[i]), most / 64) << i;
        }
      }
    }
  }
}

// Every word that an update leaves in a bf16 state. The largest moments are rounded to numbers beyond those that a
// moment is taken from.
TEST(ReloadTest, EveryWordOfABf16StateComesBack) {
  for (const bool variance : {false, true}) {
    std::vector<float> words = EveryPattern(16, 0x7b000000u);
    if (variance) std::erase_if(words, [](float x) { return std::signbit(x); });
    Moment moment("bf16", variance ? PlaneKind::kVariance : PlaneKind::kMomentum, words.size());
    ASSERT_TRUE(moment.Encode(words));
    EXPECT_TRUE(ComesBack(&moment));
  }
}

}  // namespace
}  // namespace ballast::kernels
