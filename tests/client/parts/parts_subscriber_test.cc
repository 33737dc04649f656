// A reader of a run on several daemons, whose parts are played: what is handed out when, and what may be read meanwhile.
#include "client/cpp/parts/parts_subscriber.h"

#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include <thread>

#include "tests/client/parts/fake_part.h"

namespace ballast {
namespace {

using ::testing::ElementsAre;
using ::testing::HasSubstr;
using ::testing::IsEmpty;

constexpr double kPartsLongS = 60;  // for what is there soon

class PartsSubscriberTest : public ::testing::Test {
 protected:
  PartsSubscriberTest() { Open(absl::InfiniteDuration()); }
  void Open(absl::Duration patience) {
    reader_.reset();
    parts_.clear();
    std::vector<std::unique_ptr<HeldSubscriber>> parts;
    for (uint32_t p = 0; p < 2; ++p) {
      auto part = std::make_unique<FakePart>(p, 2, changes_);
      parts_.push_back(part.get());
      parts.push_back(std::move(part));
    }
    reader_ = PartsSubscriber::Of(std::move(parts), {"a:1", "b:2"}, /*every=*/0, changes_, patience).value();
  }
  FollowedVersion Next() {
    const auto version = reader_->Next(kPartsLongS);
    EXPECT_TRUE(version.ok() && *version) << version.status();
    return version.ok() && *version ? **version : FollowedVersion();
  }
  // All parts come to step `step` for the first time.
  FollowedVersion Begin(uint64_t step) {
    for (FakePart* part : parts_) part->Arrive(PartVersionId(step));
    return Next();
  }
  // By tensor: the step that its weights are of.
  std::vector<float> Steps() {
    std::vector<float> steps;
    for (uint32_t i = 0; i < 2; ++i) {
      float values[2] = {};
      const absl::Status read = reader_->Read(i, absl::MakeSpan(reinterpret_cast<std::byte*>(values), sizeof(values)));
      EXPECT_TRUE(read.ok()) << read;
      steps.push_back(values[0]);
    }
    return steps;
  }
  bool HasNone() {
    const auto version = reader_->Next(0);
    EXPECT_TRUE(version.ok()) << version.status();
    return version.ok() && !version->has_value();
  }

  const std::shared_ptr<ChangeSignal> changes_ = std::make_shared<ChangeSignal>();
  std::vector<FakePart*> parts_;
  std::unique_ptr<PartsSubscriber> reader_;
};

TEST_F(PartsSubscriberTest, AVersionIsHandedOutOnceAllPartsHaveIt) {
  EXPECT_FALSE(reader_->readable());
  parts_[0]->Arrive(PartVersionId(3));
  EXPECT_TRUE(reader_->Await(kPartsLongS));
  EXPECT_TRUE(HasNone());
  EXPECT_FALSE(reader_->readable());
  EXPECT_EQ(reader_->Served(0).status().code(), absl::StatusCode::kFailedPrecondition);
  parts_[1]->Arrive(PartVersionId(3));
  const FollowedVersion version = Next();
  EXPECT_EQ(version.step, 3u);
  EXPECT_FALSE(version.base_step);
  EXPECT_THAT(version.changed, ElementsAre(0, 1));
  EXPECT_EQ(version.elements, 4u);
  EXPECT_EQ(version.changed_elements, 4u);
  EXPECT_EQ(version.whole_bytes, 16u);
  EXPECT_TRUE(reader_->readable());
  EXPECT_THAT(Steps(), ElementsAre(3, 3));
  EXPECT_EQ(reader_->spec().tensors(0).name(), "w1") << "it is on the second daemon";
  EXPECT_EQ(reader_->Served(2).status().code(), absl::StatusCode::kInvalidArgument);
}

TEST_F(PartsSubscriberTest, WhatIsHereBeforeItIsAgreedOnIsTold) {
  for (FakePart* part : parts_) part->Arrive(PartVersionId(3));
  while (reader_->Await(kPartsLongS)) {
    const auto version = reader_->Next(0);
    ASSERT_TRUE(version.ok()) << version.status();
    if (*version) return;
  }
  FAIL() << "nothing is told";
}

TEST_F(PartsSubscriberTest, WeightsStayUntilAllPartsHaveTheNext) {
  Begin(3);
  parts_[0]->Offer(PartVersionId(4));
  EXPECT_TRUE(HasNone());
  EXPECT_THAT(Steps(), ElementsAre(3, 3));
  parts_[1]->Offer(PartVersionId(4));
  EXPECT_TRUE(reader_->Await(kPartsLongS));
  EXPECT_THAT(Steps(), ElementsAre(3, 3)) << "Await changes nothing";
  const FollowedVersion version = Next();
  EXPECT_EQ(version.step, 4u);
  EXPECT_EQ(version.base_step, 3u);
  EXPECT_EQ(version.changed_elements, 2u);
  EXPECT_EQ(version.closed_unix_s, 4);
  EXPECT_THAT(Steps(), ElementsAre(4, 4));
}

TEST_F(PartsSubscriberTest, WhoIsBehindIsSentOn) {
  Begin(3);
  parts_[0]->Offer(PartVersionId(4));
  parts_[1]->Offer(PartVersionId(6));
  const FakePart::Sought sought = parts_[0]->AwaitSought();
  EXPECT_EQ(sought.from, 6u);
  EXPECT_TRUE(HasNone());
  EXPECT_THAT(Steps(), ElementsAre(3, 3));
  parts_[0]->Offer(PartVersionId(6));
  EXPECT_EQ(Next().step, 6u);
  EXPECT_THAT(Steps(), ElementsAre(6, 6));
  EXPECT_EQ(parts_[0]->AwaitSought().from, std::nullopt) << "each version again";
}

TEST_F(PartsSubscriberTest, PartsThatBeganAtDifferentStepsMeet) {
  parts_[0]->Arrive(PartVersionId(3));
  parts_[1]->Arrive(PartVersionId(5));
  EXPECT_TRUE(HasNone());
  parts_[0]->Offer(PartVersionId(4));
  EXPECT_EQ(parts_[0]->AwaitSought().from, 5u);
  parts_[0]->Offer(PartVersionId(5));
  const FollowedVersion version = Next();
  EXPECT_EQ(version.step, 5u);
  EXPECT_FALSE(version.base_step) << "what was before was never handed out";
  EXPECT_EQ(version.received_bytes, 24u);
  EXPECT_THAT(Steps(), ElementsAre(5, 5));
}

TEST_F(PartsSubscriberTest, WhoWaitsInVainGoesOnToWhatThereIs) {
  Open(absl::ZeroDuration());
  parts_[0]->Arrive(PartVersionId(3));
  parts_[0]->Offer(PartVersionId(4));
  EXPECT_EQ(parts_[0]->AwaitSought().from, std::nullopt);
}

TEST_F(PartsSubscriberTest, WhatARewindHasUndoneIsNotMixedWithWhatCameAfterIt) {
  Begin(3);
  parts_[0]->Offer(PartVersionId(4));
  for (FakePart* part : parts_) part->Rewind(2);
  parts_[1]->Offer(PartVersionId(4, 2));
  EXPECT_EQ(parts_[0]->AwaitSought().from, std::nullopt);
  EXPECT_TRUE(HasNone());
  EXPECT_THAT(Steps(), ElementsAre(3, 3));
  parts_[0]->Offer(PartVersionId(4, 2));
  const FollowedVersion version = Next();
  EXPECT_EQ(version.step, 4u);
  EXPECT_EQ(version.generation, 3u) << "another one whenever a daemon's is";
}

TEST_F(PartsSubscriberTest, AReaderGoesBackWithTheRun) {
  Begin(7);
  for (FakePart* part : parts_) part->Rewind(2);
  parts_[1]->Offer(PartVersionId(2, 2));
  EXPECT_TRUE(HasNone());
  parts_[0]->Offer(PartVersionId(2, 2));
  EXPECT_EQ(Next().step, 2u);
  EXPECT_THAT(Steps(), ElementsAre(2, 2));
}

TEST_F(PartsSubscriberTest, AWholePartIsWrittenAsItComesOnceAllAreAboutToHaveIt) {
  Begin(3);
  parts_[0]->OfferWhole(PartVersionId(8));
  EXPECT_TRUE(HasNone());
  EXPECT_TRUE(reader_->readable());
  parts_[1]->Offer(PartVersionId(8));
  EXPECT_TRUE(reader_->Await(kPartsLongS));
  EXPECT_TRUE(reader_->readable());
  EXPECT_TRUE(HasNone());
  EXPECT_FALSE(reader_->readable());
  parts_[0]->Arrive(PartVersionId(8));
  const FollowedVersion version = Next();
  EXPECT_EQ(version.step, 8u);
  EXPECT_FALSE(version.base_step);
  EXPECT_THAT(Steps(), ElementsAre(8, 8));
}

// Its connection is lost, and made again, while the other part is written already.
TEST_F(PartsSubscriberTest, AWholePartThatIsLostOnTheWayIsWaitedForAtAnotherStep) {
  Begin(3);
  parts_[0]->OfferWhole(PartVersionId(8));
  parts_[1]->Offer(PartVersionId(8));
  EXPECT_TRUE(reader_->Await(kPartsLongS));
  EXPECT_TRUE(HasNone());
  parts_[0]->Arrive(PartVersionId(11));
  EXPECT_TRUE(HasNone());
  EXPECT_FALSE(reader_->readable());
  parts_[1]->Offer(PartVersionId(9));
  EXPECT_EQ(parts_[1]->AwaitSought().from, 11u);
  parts_[1]->Offer(PartVersionId(11));
  EXPECT_EQ(Next().step, 11u);
  EXPECT_THAT(Steps(), ElementsAre(11, 11));
}

TEST_F(PartsSubscriberTest, AnAmendedRunIsHandedOutOnceAllPartsAre) {
  Begin(3);
  parts_[0]->Amend();
  EXPECT_TRUE(reader_->Await(kPartsLongS));
  EXPECT_TRUE(HasNone());
  for (FakePart* part : parts_) part->Rewind(2);
  parts_[0]->Arrive(PartVersionId(3, 2));
  EXPECT_TRUE(HasNone());
  EXPECT_FALSE(reader_->readable());
  parts_[1]->Amend();
  EXPECT_TRUE(reader_->Await(kPartsLongS));
  EXPECT_TRUE(HasNone());
  parts_[1]->Arrive(PartVersionId(3, 2));
  const FollowedVersion version = Next();
  EXPECT_TRUE(version.respecified);
  EXPECT_FALSE(version.base_step);
  EXPECT_EQ(reader_->spec().tensors(0).name(), "w0");
}

TEST_F(PartsSubscriberTest, WhatHasChangedIsReadWhereItIs) {
  Begin(3);
  for (FakePart* part : parts_) part->Offer(PartVersionId(4));
  EXPECT_EQ(Next().step, 4u);
  EXPECT_EQ(reader_->CountChanged(1).value(), 1u);
  int64_t place = -1;
  float value = 0;
  ASSERT_TRUE(reader_
                  ->ReadChanged(1, absl::MakeSpan(&place, 1),
                                absl::MakeSpan(reinterpret_cast<std::byte*>(&value), sizeof(value)))
                  .ok());
  EXPECT_EQ(place, 0);
  EXPECT_EQ(value, 4);
}

TEST_F(PartsSubscriberTest, APartThatFailsIsNamedAgainAndAgain) {
  Begin(3);
  parts_[1]->Fail(absl::NotFoundError("it was deleted"));
  for (int i = 0; i < 2; ++i) {
    const absl::Status failure = reader_->Next(kPartsLongS).status();
    EXPECT_EQ(failure.code(), absl::StatusCode::kNotFound);
    EXPECT_THAT(std::string(failure.message()), HasSubstr("b:2: it was deleted"));
  }
  EXPECT_THAT(Steps(), ElementsAre(3, 3));
}

TEST_F(PartsSubscriberTest, CloseEndsANextThatWaits) {
  Begin(3);
  std::thread closes([&] { reader_->Close(); });
  EXPECT_EQ(reader_->Next(kPartsLongS).status().code(), absl::StatusCode::kCancelled);
  closes.join();
  EXPECT_TRUE(reader_->Await(0));
}

TEST_F(PartsSubscriberTest, AListThatNamesADaemonTwiceIsRefused) {
  EXPECT_THAT(std::string(Subscriber::Open({.server = "a:1,a:1"}, {.run_id = "r"}).status().message()),
              HasSubstr("named twice"));
}

TEST_F(PartsSubscriberTest, ANamedVersionIsHandedOutAndStaysUntilResume) {
  Begin(3);
  EXPECT_EQ(reader_->Rollback("good").code(), absl::StatusCode::kNotFound);
  for (FakePart* part : parts_) part->Name("good", PartVersionId(2), /*mark=*/7);
  ASSERT_EQ(reader_->Rollback("good"), absl::OkStatus());
  for (FakePart* part : parts_) EXPECT_EQ(part->sought_tag(), "good");
  parts_[0]->OfferWhole(PartVersionId(2));
  parts_[1]->OfferWhole(PartVersionId(2));
  EXPECT_TRUE(HasNone());  // it lets them write
  EXPECT_FALSE(reader_->readable());
  for (FakePart* part : parts_) part->Arrive(PartVersionId(2));
  const FollowedVersion version = Next();
  EXPECT_EQ(version.tag, "good");
  EXPECT_EQ(version.step, 2u);
  EXPECT_THAT(Steps(), ElementsAre(2, 2));
  EXPECT_TRUE(HasNone());
  reader_->Resume();
  for (FakePart* part : parts_) EXPECT_FALSE(part->AwaitSought().from);
  for (FakePart* part : parts_) part->Offer(PartVersionId(4));
  const FollowedVersion newest = Next();
  EXPECT_EQ(newest.step, 4u);
  EXPECT_THAT(newest.tag, IsEmpty());
}

TEST_F(PartsSubscriberTest, ANameThatIsGivenToAnotherVersionMeanwhileIsThatOne) {
  Begin(3);
  for (FakePart* part : parts_) part->Name("good", PartVersionId(2), /*mark=*/7);
  ASSERT_EQ(reader_->Rollback("good"), absl::OkStatus());
  for (FakePart* part : parts_) part->Name("good", PartVersionId(4), /*mark=*/8);
  for (FakePart* part : parts_) part->Offer(PartVersionId(4));
  const FollowedVersion version = Next();
  EXPECT_EQ(version.tag, "good");
  EXPECT_EQ(version.step, 4u);
}

TEST_F(PartsSubscriberTest, ResumeAtAnyMomentOfAVersionWithAName) {
  uint64_t step = 3;
  Begin(step);
  for (int round = 0; round < 200; ++round) {
    for (FakePart* part : parts_) part->Name("good", PartVersionId(step), /*mark=*/7);
    ASSERT_EQ(reader_->Rollback("good"), absl::OkStatus());
    std::thread resumes([this] { reader_->Resume(); });
    for (FakePart* part : parts_) part->Arrive(PartVersionId(step));
    const auto named = reader_->Next(0);
    resumes.join();
    ASSERT_TRUE(named.ok()) << named.status();
    ++step;
    for (FakePart* part : parts_) part->Arrive(PartVersionId(step));
    while (Next().step != step && !HasFailure()) continue;
  }
}

TEST_F(PartsSubscriberTest, WhatWasNamedByHalvesIsRefused) {
  Begin(3);
  parts_[0]->Name("good", PartVersionId(2), /*mark=*/7);
  parts_[1]->Name("good", PartVersionId(2), /*mark=*/8);
  const absl::Status refused = reader_->Rollback("good");
  EXPECT_EQ(refused.code(), absl::StatusCode::kFailedPrecondition);
  EXPECT_THAT(std::string(refused.message()), HasSubstr("b:2 another"));
  for (FakePart* part : parts_) part->Offer(PartVersionId(4));
  EXPECT_EQ(Next().step, 4u);
}

}  // namespace
}  // namespace ballast
