#include "server/store/digest_job.h"

#include <functional>
#include <utility>

#include "absl/strings/str_cat.h"

#include "tests/server/store/store_fixture.h"

namespace ballast {
namespace {

using Digests = std::vector<uint64_t>;

template <typename Values>
absl::Span<const std::byte> ValueBytes(const Values& values) {
  return {reinterpret_cast<const std::byte*>(values.data()), values.size() * sizeof(*values.data())};
}

class DigestJobTest : public testing::StoreTest {
 protected:
  void SetUp() override {
    MakeStore(testing::MakeSpec("r1", {{"a", {40000}, "fp32"}, {"b", {300, 64}, "fp32"}, {"c", {5}, "fp32"}}));
    OnStrand([&] { job_ = std::make_unique<DigestJob>(&spec_, store_.get(), plan_); });
  }

  // What a job of its own finds.
  Digests Expected() {
    std::unique_ptr<DigestJob> other;
    OnStrand([&] { other = std::make_unique<DigestJob>(&spec_, store_.get(), plan_); });
    const Digests found = Ask(other.get());
    OnStrand([&] { other.reset(); });  // behind the answer, in which it may still be
    return found;
  }
  Digests Ask(DigestJob* job) {
    absl::Notification answered;
    Digests digests;
    OnStrand([&] {
      job->Start([&](absl::StatusOr<Digests> found) {
        digests = *std::move(found);
        answered.Notify();
      });
    });
    answered.WaitForNotification();
    return digests;
  }
  // On the strand: calls `between` once for every chunk or so that the job digests, as long as it says true.
  void EachChunk(std::function<bool()> between) {
    store_->EncodeWeights({2, 0, 5}, &piece_, [this, between = std::move(between)](const TaskResult&) mutable {
      if (between()) EachChunk(std::move(between));
    });
  }

  WeightPiece piece_;
  std::unique_ptr<DigestJob> job_;
};

TEST_F(DigestJobTest, OnlyChangedTensorsAreDigestedAgain) {
  const Digests first = Ask(job_.get());
  EXPECT_EQ(first, Expected());
  OnStrand([&] {
    bool answered = false;
    job_->Start([&](absl::StatusOr<Digests> again) {
      EXPECT_EQ(*again, first);
      answered = true;
    });
    EXPECT_TRUE(answered);  // nothing was encoded for it
    Change(1, 2);
  });
  const Digests after = Ask(job_.get());
  EXPECT_EQ(after, Expected());
  EXPECT_EQ(after[0], first[0]);
  EXPECT_NE(after[1], first[1]);
  EXPECT_EQ(after[2], first[2]);
}

TEST_F(DigestJobTest, EachOfManySmallTensorsHasTheDigestOfItsWeights) {
  for (const char* serving : {"fp32", "int8-row"}) {
    SCOPED_TRACE(serving);
    store_->WaitIdle();
    OnStrand([&] { job_.reset(); });
    v1::RunSpec wire = testing::MakeSpec("r1", {{"large", {64, 1000}, "fp32"}});
    wire.mutable_groups(0)->set_serving(serving);
    for (int i = 0; i < 100; ++i) {
      v1::TensorSpec* tensor = wire.add_tensors();
      *tensor = wire.tensors(0);
      tensor->set_name(absl::StrCat("small", i));
      tensor->clear_shape();
      tensor->add_shape(2);
      tensor->add_shape(3 + i);
    }
    wire.mutable_tensors()->SwapElements(0, 40);
    MakeStore(wire);
    OnStrand([&] { job_ = std::make_unique<DigestJob>(&spec_, store_.get(), plan_); });
    const Digests all = Ask(job_.get());
    for (uint32_t i = 0; i < all.size(); ++i) {
      if (i == 40) continue;
      absl::Notification encoded;
      OnStrand([&] {
        store_->EncodeWeights({i, 0, spec_.tensors[i].elements}, &piece_, [&](const TaskResult&) { encoded.Notify(); });
      });
      encoded.WaitForNotification();
      const uint64_t codes = WeightDigest(ValueBytes(piece_.data)), scales = WeightDigest(ValueBytes(piece_.scales));
      EXPECT_EQ(all[i], piece_.scales.empty() ? codes : WeightDigest(ValueBytes(std::vector{codes, scales}))) << i;
    }
    EXPECT_EQ(all, Expected());
    OnStrand([&] { Change(17, 5); });
    const Digests after = Ask(job_.get());
    for (uint32_t i = 0; i < all.size(); ++i) EXPECT_EQ(after[i] == all[i], i != 17) << i;
  }
}

TEST_F(DigestJobTest, ALaterRequestDoesNotDelayAnEarlierOne) {
  constexpr int kMost = 1000;
  absl::Notification all;
  int asked = 0, answered = 0, asked_at_first = 0;
  OnStrand([&] {
    job_->Start([&](const absl::StatusOr<Digests>&) { asked_at_first = asked; });
    EachChunk([&] {
      const bool more = ++asked < kMost;  // the answer may come at once, and end the test
      job_->Start([&](const absl::StatusOr<Digests>&) {
        if (++answered == kMost) all.Notify();
      });
      return more;
    });
  });
  all.WaitForNotification();
  EXPECT_LT(asked_at_first, kMost / 2);
}

TEST_F(DigestJobTest, ATensorThatChangesAllTheTimeDoesNotHoldItUp) {
  constexpr uint64_t kMost = 2000;
  const Digests before = Ask(job_.get());
  absl::Notification over, quiet;
  Digests meanwhile;
  uint64_t seed = 2, seed_then = 0;
  OnStrand([&] {
    Change(0, seed);
    job_->Start([&](absl::StatusOr<Digests> digests) {
      meanwhile = *std::move(digests);
      seed_then = seed;
      over.Notify();
    });
    EachChunk([&] {
      Change(0, ++seed);
      const bool more = !over.HasBeenNotified() && seed < kMost;
      if (!more) quiet.Notify();
      return more;
    });
  });
  over.WaitForNotification();
  quiet.WaitForNotification();
  EXPECT_LT(seed_then, kMost / 2);
  EXPECT_NE(meanwhile[0], before[0]);
  EXPECT_EQ(meanwhile[1], before[1]);
  EXPECT_EQ(Ask(job_.get()), Expected());  // what fits no weights is not kept
}

TEST_F(DigestJobTest, AnAbandonedRequestIsToldWhy) {
  std::vector<absl::Status> told;
  OnStrand([&] {
    for (int i = 0; i < 3; ++i) {
      job_->Start([&](absl::StatusOr<Digests> digests) { told.push_back(digests.status()); });
    }
    job_->Abandon(absl::NotFoundError("gone"));
  });
  EXPECT_EQ(told, std::vector<absl::Status>(3, absl::NotFoundError("gone")));
  EXPECT_EQ(Ask(job_.get()), Expected());
}

}  // namespace
}  // namespace ballast
