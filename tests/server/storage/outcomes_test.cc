#include "tests/server/storage/outcomes.h"

#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include <set>
#include <string>
#include <vector>

#include "absl/strings/str_cat.h"

#include "tests/server/storage/model_files.h"

namespace ballast {
namespace {

using ::testing::IsEmpty;
using testing::Put;
using testing::RootOf;
using testing::RootsAfterCut;
using ::testing::SizeIs;

TEST(OutcomesTest, AreAllOfThemWhereTheyAreFew) {
  ModelFs fs;
  ASSERT_TRUE(Put(&fs, "/a", "one").ok());
  ASSERT_TRUE(Put(&fs, "/b", "two").ok());
  // Of each: no name, or a name and nothing, or all.
  Outcomes outcomes(fs, 9);
  EXPECT_TRUE(outcomes.are_all());
  EXPECT_EQ(outcomes.size(), 9u);
  EXPECT_THAT(RootsAfterCut(fs), SizeIs(9));
  for (uint64_t i = 0; i < outcomes.size(); ++i) EXPECT_NE(outcomes.Next(), nullptr);
  EXPECT_EQ(outcomes.Next(), nullptr);
  const ModelFs empty;
  EXPECT_EQ(Outcomes(empty, 9).size(), 1u) << "nothing was to be lost";
}

std::vector<std::string> DrawnRoots(const ModelFs& fs, uint64_t limit, uint64_t seed) {
  Outcomes outcomes(fs, limit, seed);
  EXPECT_FALSE(outcomes.are_all());
  EXPECT_EQ(outcomes.size(), limit);
  std::vector<std::string> roots;
  while (const auto left = outcomes.Next()) roots.push_back(RootOf(left.get()));
  return roots;
}

TEST(OutcomesTest, AreDrawnWhereTheyAreMany) {
  ModelFs fs;
  for (int i = 0; i < 10; ++i) {
    ASSERT_TRUE(Put(&fs, absl::StrCat("/", i), std::string(2000, 'x')).ok());
  }
  const std::vector<std::string> drawn = DrawnRoots(fs, 300, 1);
  ASSERT_THAT(drawn, SizeIs(300));
  EXPECT_THAT(drawn[0], IsEmpty());
  EXPECT_EQ(drawn[1], RootOf(&fs));
  EXPECT_GT(std::set<std::string>(drawn.begin(), drawn.end()).size(), 150u);
  EXPECT_EQ(drawn, DrawnRoots(fs, 300, 1));
  EXPECT_NE(drawn, DrawnRoots(fs, 300, 2));
}

// What is drawn must come upon states in which a single change is lost, or is there: those are what bugs are made of.
TEST(OutcomesTest, ThatAreDrawnHaveOneChangeLostOrThereAlone) {
  ModelFs fs;
  constexpr int kFiles = 8;
  for (int i = 0; i < kFiles; ++i) ASSERT_TRUE(fs.Create(absl::StrCat("/", i)).ok());
  std::set<std::string> lost, alone;
  for (const std::string& root : DrawnRoots(fs, 250, 3)) {
    if (root.size() == 3 * (kFiles - 1) - 1) lost.insert(root);
    if (root.size() == 2) alone.insert(root);
  }
  EXPECT_THAT(lost, SizeIs(kFiles));
  EXPECT_THAT(alone, SizeIs(kFiles));
}

}  // namespace
}  // namespace ballast
