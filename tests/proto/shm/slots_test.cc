#include "proto/shm/slots.h"

#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include <random>
#include <set>

#include "tests/proto/shm/pair.h"

namespace ballast {
namespace {

using ::testing::HasSubstr;
using testing::ShmPair;

class ShmSlotsTest : public ::testing::Test {
 protected:
  uint32_t Lend() {
    const auto slot = lender_.Take();
    EXPECT_TRUE(slot.has_value());
    lender_.Lend(slot.value_or(0));
    return slot.value_or(0);
  }

  ShmPair pair_;
  ShmLender lender_{GradientSlots(*pair_.trainer)};
  ShmBorrower borrower_{GradientSlots(*pair_.daemon)};
};

TEST_F(ShmSlotsTest, SlotsComeBackInAnyOrder) {
  std::mt19937 random(3);
  std::set<uint32_t> out;
  for (int i = 0; i < 1000; ++i) {
    EXPECT_EQ(lender_.free(), 4 - out.size());
    EXPECT_EQ(borrower_.borrowed(), out.size());
    if (random() % 2 == 0 && out.size() < 4) {
      const uint32_t slot = Lend();
      EXPECT_TRUE(out.insert(slot).second);
      lender_.at(slot)[5] = static_cast<std::byte>(i);
      const auto bytes = borrower_.Borrow(slot, 6);
      ASSERT_TRUE(bytes.ok()) << bytes.status();
      EXPECT_EQ((*bytes)[5], static_cast<std::byte>(i));
    } else if (!out.empty()) {
      const auto some = std::next(out.begin(), static_cast<ptrdiff_t>(random() % out.size()));
      borrower_.GiveBack(*some);
      out.erase(some);
    }
  }
}

TEST_F(ShmSlotsTest, NoneIsLeftWhenAllAreOut) {
  for (int i = 0; i < 4; ++i) ASSERT_TRUE(borrower_.Borrow(Lend(), 1).ok());
  EXPECT_EQ(lender_.Take(), std::nullopt);
  EXPECT_EQ(lender_.free(), 0u);
  borrower_.GiveBack(2);
  EXPECT_EQ(lender_.Take(), 2u);
}

TEST_F(ShmSlotsTest, ASlotPutBackIsFreeAgain) {
  EXPECT_EQ(lender_.Take(), 0u);
  EXPECT_EQ(lender_.Take(), 1u);
  lender_.PutBack(0);
  EXPECT_EQ(lender_.Take(), 0u);
}

TEST_F(ShmSlotsTest, ReturnedSlotsAreUsedBeforeUnusedOnes) {
  for (int i = 0; i < 3; ++i) ASSERT_TRUE(borrower_.Borrow(Lend(), 1).ok());
  borrower_.GiveBack(1);
  borrower_.GiveBack(0);
  EXPECT_EQ(lender_.Take(), 0u) << "lent longest, so that giving back in order is found at the first look";
  EXPECT_EQ(lender_.Take(), 1u);
  EXPECT_EQ(lender_.Take(), 3u) << "never used";
  EXPECT_EQ(lender_.Take(), std::nullopt) << "2 is out, the others are being filled";
  borrower_.GiveBack(2);
  EXPECT_EQ(lender_.Take(), 2u);
}

TEST_F(ShmSlotsTest, AKeptSlotIsNotTakenBeforeItIsReleased) {
  for (int i = 0; i < 4; ++i) ASSERT_TRUE(borrower_.Borrow(Lend(), 1).ok());
  lender_.Keep(0);
  lender_.Keep(3);
  for (uint32_t slot = 0; slot < 4; ++slot) borrower_.GiveBack(slot);
  EXPECT_EQ(lender_.free(), 2u);
  EXPECT_EQ(lender_.Take(), 1u);
  EXPECT_EQ(lender_.Take(), 2u);
  EXPECT_EQ(lender_.Take(), std::nullopt);
  lender_.Release(3);
  EXPECT_EQ(lender_.Take(), 3u);
  lender_.Release(0);
  EXPECT_EQ(lender_.Take(), 0u);
  EXPECT_EQ(lender_.free(), 4u) << "none of them is lent";
}

TEST_F(ShmSlotsTest, ABorrowerRefusesWhatIsNoSlotTooLongOrOutAlready) {
  EXPECT_THAT(std::string(borrower_.Borrow(4, 1).status().message()), HasSubstr("slot 4"));
  EXPECT_THAT(std::string(borrower_.Borrow(~0u, 1).status().message()), HasSubstr("which has 4 slots"));
  EXPECT_THAT(std::string(borrower_.Borrow(0, 257).status().message()), HasSubstr("payload of 257 bytes"));
  EXPECT_TRUE(borrower_.Borrow(0, 256).ok());
  EXPECT_THAT(std::string(borrower_.Borrow(0, 1).status().message()), HasSubstr("before it was given back"));
  borrower_.GiveBack(0);
  EXPECT_TRUE(borrower_.Borrow(0, 1).ok());
}

// For weights the trainer is the borrower, and may write any mark and count.
TEST_F(ShmSlotsTest, ForgedMarksNeverHandOutMoreThanThereIs) {
  ShmLender daemon(WeightSlots(*pair_.daemon));
  const auto first = daemon.Take();
  daemon.Lend(*first);
  pair_.trainer->weight_marks()[1] = 77;
  pair_.trainer->control().weights_returned.value = ~uint64_t{0};
  EXPECT_LE(daemon.free(), 2u);
  EXPECT_EQ(daemon.Take(), 1u);            // was never lent, whatever its mark
  EXPECT_EQ(daemon.Take(), std::nullopt);  // one lent, one being filled
  pair_.trainer->weight_marks()[0] = 1;    // said to be read: it is the trainer's own loss if not
  EXPECT_EQ(daemon.Take(), 0u);
  EXPECT_EQ(daemon.Take(), std::nullopt);
  pair_.trainer->weight_marks()[0] = 2;
  EXPECT_EQ(daemon.Take(), std::nullopt);  // being filled: no mark counts
}

}  // namespace
}  // namespace ballast
