// Which elements a version has changed, as a reader is told: put over the version before they make it, and there are no
// more than came.
#include "client/cpp/follow/changed_elements.h"

#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include <cstring>

#include "tests/client/follow/reader.h"

namespace ballast {
namespace {

using ::testing::ElementsAre;
using ::testing::HasSubstr;
using ::testing::IsEmpty;
using ::testing::IsSupersetOf;

struct Patch {
  std::vector<int64_t> places;
  std::vector<std::byte> values;
};

// Holds what it has read of all versions, in the tensors' dtypes, and what each has changed.
class Patched {
 public:
  explicit Patched(const Subscriber& subscriber) : subscriber_(subscriber) {
    for (const v1::TensorSpec& tensor : subscriber.spec().tensors()) {
      uint64_t elements = 1;
      for (const int64_t extent : tensor.shape()) elements *= static_cast<uint64_t>(extent);
      widths_.push_back(FormatBytes(tensor.dtype()));
      tensors_.emplace_back(elements * widths_.back());
    }
  }

  Patch ReadPatch(uint32_t tensor) const {
    const auto count = subscriber_.CountChanged(tensor);
    EXPECT_TRUE(count.ok()) << count.status();
    Patch patch{std::vector<int64_t>(*count), std::vector<std::byte>(*count * widths_[tensor])};
    EXPECT_EQ(subscriber_.ReadChanged(tensor, absl::MakeSpan(patch.places), absl::MakeSpan(patch.values)),
              absl::OkStatus());
    return patch;
  }
  // Puts the patches in place, which must give what is there now.
  void Take() {
    for (uint32_t i = 0; i < tensors_.size(); ++i) {
      const Patch patch = ReadPatch(i);
      const uint64_t width = widths_[i];
      for (size_t n = 0; n < patch.places.size(); ++n) {
        std::memcpy(&tensors_[i][static_cast<uint64_t>(patch.places[n]) * width], &patch.values[n * width], width);
      }
      std::vector<std::byte> now(tensors_[i].size());
      ASSERT_EQ(subscriber_.Read(i, absl::MakeSpan(now)), absl::OkStatus());
      EXPECT_EQ(tensors_[i], now) << i;
    }
  }
  std::vector<int64_t> PlacesOf(uint32_t tensor) const { return ReadPatch(tensor).places; }

 private:
  const Subscriber& subscriber_;
  std::vector<uint64_t> widths_;
  std::vector<std::vector<std::byte>> tensors_;
};

class ChangedElementsTest : public ::testing::Test {
 protected:
  void Listen(uint64_t every = 0) {
    reader_ = std::make_unique<Reader>(daemon_.address(), 10, every, /*marks_changed=*/true);
    patched_ = std::make_unique<Patched>(*reader_->subscriber);
  }
  void Take(uint64_t step) {
    EXPECT_EQ(reader_->Next().step, step);
    patched_->Take();
  }

  FakeFollowService daemon_;
  std::unique_ptr<Reader> reader_;
  std::unique_ptr<Patched> patched_;
};

TEST_F(ChangedElementsTest, PatchesMakeEachVersionOfTheOneBefore) {
  Listen();
  FollowedRun run(kFollowedSpec, 1);
  daemon_.Say(run.Whole());
  Take(1);
  EXPECT_EQ(patched_->PlacesOf(0).size(), 10u) << "it came whole";
  for (uint64_t step = 2; step < 40; ++step) {
    const FollowedRun before = run;
    run = run.Next();
    daemon_.Say(run.ChangesOf(before));
    Take(step);
    EXPECT_THAT(patched_->PlacesOf(0), ElementsAre(static_cast<int64_t>(step % 40 / 4)));
  }
}

TEST_F(ChangedElementsTest, ThoseOfVersionsOnTheWayAreThereOnceAndInOrder) {
  Listen(/*every=*/3);
  const FollowedRun first(kFollowedSpec, 1);
  daemon_.Say(first.Whole());
  Take(1);
  FollowedRun before = first;
  for (const size_t byte : {29, 5, 6}) {  // of elements 7, 1 and 1 of the first tensor
    FollowedRun run = before;
    ++run.step;
    run.codes[0][byte] ^= 1;
    daemon_.Say(run.ChangesOf(before));
    before = run;
  }
  Take(4);
  EXPECT_THAT(patched_->PlacesOf(0), ElementsAre(1, 7));
  EXPECT_THAT(patched_->PlacesOf(1), IsEmpty());
}

TEST_F(ChangedElementsTest, WithItsScaleAnElementIsAnother) {
  Listen();
  const FollowedRun first(kFollowedSpec, 1);
  FollowedRun second = first;
  second.step = 2;
  second.scales[4][1] = 0.25f;  // of elements 5 to 9, and no code
  daemon_.Say(first.Whole());
  Take(1);
  daemon_.Say(second.ChangesOf(first));
  Take(2);
  EXPECT_THAT(patched_->PlacesOf(4), IsSupersetOf({5, 6, 7, 8, 9}));
}

TEST_F(ChangedElementsTest, AVersionThatChangesNothingHasNone) {
  Listen();
  const FollowedRun first(kFollowedSpec, 1);
  FollowedRun second = first;
  second.step = 2;
  daemon_.Say(first.Whole());
  Take(1);
  daemon_.Say(second.ChangesOf(first));
  Take(2);
  for (uint32_t i = 0; i < 6; ++i) EXPECT_THAT(patched_->PlacesOf(i), IsEmpty());
}

TEST_F(ChangedElementsTest, ADamagedVersionIsMadeGoodByTheNextOne) {
  Listen();
  const FollowedRun first(kFollowedSpec, 1), second = first.Next();
  daemon_.Say(first.Whole());
  Take(1);
  VersionParts damaged = second.ChangesOf(first);
  for (v1::VersionPart& part : damaged) {
    if (part.chunk().last() && part.chunk().tensor() == 3) part.mutable_chunk()->set_digest(1);
  }
  daemon_.Say(damaged);
  daemon_.AwaitSaid();
  EXPECT_FALSE(reader_->subscriber->Next(0.2).value().has_value());
  daemon_.AwaitRequests(2);
  daemon_.Say(second.Whole());
  Take(2);
}

TEST_F(ChangedElementsTest, WhoDoesNotAskForThemIsToldSo) {
  Reader reader(daemon_.address());
  daemon_.Say(FollowedRun(kFollowedSpec, 1).Whole());
  reader.Next();
  const absl::Status unmarked = reader.subscriber->CountChanged(0).status();
  EXPECT_EQ(unmarked.code(), absl::StatusCode::kFailedPrecondition);
  EXPECT_THAT(std::string(unmarked.message()), HasSubstr("open it with marks_changed"));
}

TEST_F(ChangedElementsTest, RoomOfAnotherSizeIsRefused) {
  Listen();
  daemon_.Say(FollowedRun(kFollowedSpec, 1).Whole());
  reader_->Next();
  std::vector<int64_t> places(9);
  std::vector<std::byte> values(40);
  const absl::Status small = reader_->subscriber->ReadChanged(0, absl::MakeSpan(places), absl::MakeSpan(values));
  EXPECT_EQ(small.code(), absl::StatusCode::kInvalidArgument);
  EXPECT_THAT(std::string(small.message()),
              HasSubstr("got room for 9 places and 40 bytes of values, wanted 10 and 40"));
}

}  // namespace
}  // namespace ballast
