#include "client/cpp/parts/shared_checkpoint.h"

#include <gtest/gtest.h>

namespace ballast {
namespace {

TEST(SharedCheckpointTest, IsTheNewestThatAllHaveSaidToHave) {
  SharedCheckpoint shared(2);
  EXPECT_EQ(shared.newest(), 0u);
  shared.Note(0, 10);
  shared.Note(1, 0);
  EXPECT_EQ(shared.newest(), 0u) << "the other has none yet";
  shared.Note(0, 20);
  shared.Note(1, 10);
  EXPECT_EQ(shared.newest(), 10u);
  shared.Note(0, 30);
  shared.Note(1, 25);  // by itself, as at its stop
  EXPECT_EQ(shared.newest(), 10u);
  shared.Note(1, 30);
  EXPECT_EQ(shared.newest(), 30u);
}

TEST(SharedCheckpointTest, StaysWhileOneOfThemWritesNoneForLong) {
  SharedCheckpoint shared(2);
  shared.Note(0, 1);
  shared.Note(1, 1);
  for (uint64_t step = 2; step < 1000; ++step) shared.Note(0, step);
  EXPECT_EQ(shared.newest(), 1u);
  shared.Note(1, 999);
  EXPECT_EQ(shared.newest(), 999u);
}

}  // namespace
}  // namespace ballast
