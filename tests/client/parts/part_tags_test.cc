// Names of versions of a run on several daemons, from what each of them says.
#include "client/cpp/parts/part_tags.h"

#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include "tests/client/parts/fake_part.h"

namespace ballast {
namespace {

using ::testing::HasSubstr;
using ::testing::IsEmpty;

class PartTagsTest : public ::testing::Test {
 protected:
  PartTagsTest() {
    for (uint64_t part = 0; part < 2; ++part) {
      *lists_[part].mutable_current() = PartVersionId(5, /*generation=*/part + 1);
      lists_[part].set_most_tags(3 + static_cast<uint32_t>(part));
    }
  }
  v1::TaggedVersion* Name(size_t part, const std::string& name, uint64_t step, uint64_t mark) {
    v1::TaggedVersion* const tag = lists_[part].add_tags();
    tag->set_name(name);
    tag->set_mark(mark);
    tag->set_bytes(10 + part);
    *tag->mutable_id() = PartVersionId(step, part + 1);
    return tag;
  }
  absl::StatusOr<std::vector<v1::TagVersionRequest>> Orders(uint64_t ahead = 0) {
    return OrdersOfTag(lists_, names_, request_, ahead);
  }

  std::vector<v1::ListVersionsResponse> lists_{2};
  const std::vector<std::string> names_ = {"a:1", "b:2"};
  v1::TagVersionRequest request_;
};

TEST_F(PartTagsTest, WhatAllHaveWithOneMarkIsOneVersion) {
  Name(0, "good", 4, 7);
  Name(1, "good", 4, 7);
  const v1::ListVersionsResponse merged = MergeVersions(lists_, names_);
  ASSERT_EQ(merged.tags_size(), 1);
  EXPECT_EQ(merged.tags(0).id().step(), 4u);
  EXPECT_EQ(merged.tags(0).bytes(), 21u);
  EXPECT_THAT(merged.tags(0).unreadable(), IsEmpty());
  EXPECT_EQ(merged.most_tags(), 3u);
  EXPECT_FALSE(merged.has_newest());
  EXPECT_EQ(merged.current().step(), 5u);
  const auto ids = FindTag(lists_, names_, "good");
  ASSERT_TRUE(ids.ok()) << ids.status();
  EXPECT_EQ((*ids)[1].generation(), 2u);
}

TEST_F(PartTagsTest, WhatSomeLackOrHaveOtherwiseCannotBeRead) {
  Name(0, "half", 4, 7);
  Name(0, "torn", 4, 7);
  Name(1, "torn", 4, 8);
  Name(0, "unmarked", 4, 0);
  Name(1, "unmarked", 4, 0);
  Name(0, "damaged", 4, 7);
  Name(1, "damaged", 0, 0)->set_unreadable("its file is damaged");  // it has no mark that is known
  for (const auto& [name, why] : {std::pair("half", "b:2 none"),
                                  {"torn", "b:2 another"},
                                  {"unmarked", "a:1 none"},
                                  {"damaged", "b:2: its file is damaged"}}) {
    const absl::Status refused = FindTag(lists_, names_, name).status();
    EXPECT_EQ(refused.code(), absl::StatusCode::kFailedPrecondition) << name;
    EXPECT_THAT(std::string(refused.message()), HasSubstr(why)) << name;
  }
  const v1::ListVersionsResponse merged = MergeVersions(lists_, names_);
  for (const v1::TaggedVersion& tag : merged.tags()) EXPECT_NE(tag.unreadable(), "") << tag.name();
  EXPECT_THAT(std::string(FindTag(lists_, names_, "gone").status().message()),
              HasSubstr("no version of the name 'gone'; names: 'damaged', 'half', 'torn', 'unmarked'"));
}

TEST_F(PartTagsTest, AllAreAskedForTheSameStepWithOneMark) {
  const auto now = Orders(), later = Orders(/*ahead=*/2);
  ASSERT_TRUE(now.ok() && later.ok());
  EXPECT_EQ((*now)[0].mark(), (*now)[1].mark());
  EXPECT_NE((*now)[0].mark(), (*later)[0].mark());
  EXPECT_EQ((*now)[1].only().SerializeAsString(), lists_[1].current().SerializeAsString());
  EXPECT_EQ((*later)[1].only().step(), 7u);
  lists_[0].mutable_current()->set_step(6);
  EXPECT_EQ((*Orders())[1].only().step(), 6u);
  lists_[0].mutable_current()->set_step(5);
  lists_[1].mutable_current()->set_epoch(10);
  EXPECT_NE((*Orders())[0].mark(), (*now)[0].mark());
}

TEST_F(PartTagsTest, WhatWasTakenBackMeanwhileIsSeen) {
  const auto orders = Orders();
  ASSERT_TRUE(orders.ok()) << orders.status();
  EXPECT_TRUE(AreOfNow(lists_, *orders));
  lists_[0].mutable_current()->set_step(9);
  EXPECT_TRUE(AreOfNow(lists_, *orders)) << "the run has gone on";
  lists_[1].mutable_current()->set_generation(7);
  EXPECT_FALSE(AreOfNow(lists_, *orders)) << "a daemon was taken back";
  *lists_[1].mutable_current() = (*orders)[1].only();
  lists_[0].mutable_current()->set_epoch(10);
  EXPECT_FALSE(AreOfNow(lists_, *orders)) << "its weights are others";
}

TEST_F(PartTagsTest, AVersionIsChosenByItsName) {
  Name(0, "good", 4, 7);
  request_.mutable_version()->set_tag("good");
  EXPECT_EQ(Orders().status().code(), absl::StatusCode::kFailedPrecondition);
  Name(1, "good", 4, 7);
  ASSERT_TRUE(Orders().ok());
  EXPECT_EQ((*Orders(/*ahead=*/2))[1].only().SerializeAsString(), PartVersionId(4, 2).SerializeAsString());
  request_.mutable_version()->mutable_id()->set_step(4);
  EXPECT_EQ(Orders().status().code(), absl::StatusCode::kUnimplemented);
}

TEST_F(PartTagsTest, AnOlderDaemonIsNamed) {
  lists_[1].clear_current();
  EXPECT_THAT(std::string(Orders().status().message()), HasSubstr("the daemon at b:2 is older than this client"));
}

}  // namespace
}  // namespace ballast
