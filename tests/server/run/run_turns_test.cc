#include "server/run/run_turns.h"

#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include <string>
#include <vector>

namespace ballast {
namespace {

using ::testing::ElementsAre;

class RunTurnsTest : public ::testing::Test {
 protected:
  void Take(const std::string& run_id, const std::string& what) {
    turns_.Take(run_id, [this, what] { done_.push_back(what); });
  }

  RunTurns turns_;
  std::vector<std::string> done_;
};

TEST_F(RunTurnsTest, WhatIsUnderWayHoldsUpItsRunAlone) {
  Take("a", "first");
  turns_.Begin("a");
  Take("a", "second");
  Take("b", "another's");
  EXPECT_THAT(done_, ElementsAre("first", "another's"));
  EXPECT_TRUE(turns_.under_way("a"));
  EXPECT_FALSE(turns_.under_way("b"));
  turns_.End("a");
  EXPECT_THAT(done_, ElementsAre("first", "another's", "second"));
  EXPECT_FALSE(turns_.under_way("a"));
}

TEST_F(RunTurnsTest, WhatWaitsKeepsItsOrderWhenOneOfItBeginsSomething) {
  turns_.Begin("a");
  Take("a", "1");
  turns_.Take("a", [this] {
    done_.push_back("2");
    turns_.Begin("a");
  });
  Take("a", "3");
  Take("a", "4");
  turns_.End("a");
  EXPECT_THAT(done_, ElementsAre("1", "2"));
  Take("a", "5");
  turns_.End("a");
  EXPECT_THAT(done_, ElementsAre("1", "2", "3", "4", "5"));
}

}  // namespace
}  // namespace ballast
