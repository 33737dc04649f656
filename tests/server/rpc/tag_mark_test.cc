// Names that one daemon of several is asked for: with a mark, and of one version and no other.
#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include <future>

#include "tests/server/rpc/tag_fixture.h"

namespace ballast::testing {
namespace {

using ::testing::HasSubstr;

class TagMarkTest : public TagFixture {
 protected:
  // So many steps further than the last that has closed.
  v1::TagVersionRequest Order(uint64_t mark, uint64_t ahead = 0) {
    v1::TagVersionRequest request;
    request.set_run_id("r1");
    request.set_name("good");
    request.set_mark(mark);
    *request.mutable_only() = Versions().current();
    request.mutable_only()->set_step(request.only().step() + ahead);
    return request;
  }
  grpc::Status Tag(const v1::TagVersionRequest& request, v1::TagVersionResponse* answer) {
    grpc::ClientContext context;
    return follow_->TagVersion(&context, request, answer);
  }

  v1::TagVersionResponse answer_;
};

TEST_F(TagMarkTest, AMarkIsKeptWithTheName) {
  for (const bool stored : {false, true}) {
    SCOPED_TRACE(stored);
    stored ? StartWithStorage() : Start(DefaultConfig());
    Trainer t = StartTrainer(Tagged());
    Step(&t, 1);
    ASSERT_TRUE(Tag(Order(7), &answer_).ok());
    EXPECT_TRUE(answer_.created());
    EXPECT_EQ(answer_.tag().mark(), 7u);
    EXPECT_EQ(answer_.tag().id().SerializeAsString(), Versions().current().SerializeAsString());
    ASSERT_TRUE(Tag(Order(7), &answer_).ok());
    EXPECT_FALSE(answer_.created());
    v1::TagVersionRequest other = Order(8);
    EXPECT_THAT(Refused(Tag(other, &answer_), grpc::ALREADY_EXISTS),
                HasSubstr("'good' is the name of another version"));
    other.set_replace(true);
    ASSERT_TRUE(Tag(other, &answer_).ok());
    EXPECT_EQ(Versions().tags(0).mark(), 8u);
    // By the name that it has, another one with a mark of its own.
    other.set_name("again");
    other.set_mark(9);
    other.mutable_version()->set_tag("good");
    ASSERT_TRUE(Tag(other, &answer_).ok());
    EXPECT_EQ(answer_.tag().mark(), 9u);
    if (!stored) continue;
    StartAnew(&t);
    ASSERT_EQ(Versions().tags_size(), 2);
    EXPECT_EQ(Versions().tags(0).mark(), 9u);
    EXPECT_EQ(Versions().tags(1).mark(), 8u);
  }
}

TEST_F(TagMarkTest, OneThatIsOverIsNotNamed) {
  Trainer t = StartTrainer(Tagged());
  Step(&t, 1);
  const v1::TagVersionRequest late = Order(7);
  Step(&t, 2);
  EXPECT_THAT(Refused(Tag(late, &answer_), grpc::ABORTED), HasSubstr("of step 2, generation 1, and the one to name"));
  v1::TagVersionRequest elsewhere = Order(7);
  elsewhere.mutable_only()->set_epoch(elsewhere.only().epoch() + 1);
  EXPECT_THAT(Refused(Tag(elsewhere, &answer_), grpc::ABORTED), HasSubstr("ask again"));
  EXPECT_EQ(Versions().tags_size(), 0);
}

TEST_F(TagMarkTest, OneThatIsToComeIsWaitedFor) {
  Trainer t = StartTrainer(Tagged());
  uint64_t step = 0;
  grpc::Status status(grpc::ABORTED, "");
  v1::TagVersionRequest order;
  for (int tries = 0; status.error_code() == grpc::ABORTED && tries < 20; ++tries) {  // it may come too late
    Step(&t, ++step);
    order = Order(7, /*ahead=*/3);
    auto asked = std::async(std::launch::async, [&] { return Tag(order, &answer_); });
    while (asked.wait_for(std::chrono::milliseconds(0)) != std::future_status::ready) Step(&t, ++step);
    status = asked.get();
  }
  ASSERT_TRUE(status.ok()) << status.error_message();
  EXPECT_EQ(answer_.tag().id().SerializeAsString(), order.only().SerializeAsString());
  EXPECT_GE(step, order.only().step());
}

}  // namespace
}  // namespace ballast::testing
