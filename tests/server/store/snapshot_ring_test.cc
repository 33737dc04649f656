#include "server/store/snapshot_ring.h"

#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include "tests/server/specs.h"
#include "tests/server/store/store_fixture.h"

namespace ballast {
namespace {

using ::testing::ElementsAre;
using ::testing::IsEmpty;
using enum SnapshotRing::OldestSnapshot;

// A store whose tensors are updated by gradients that depend on the step alone, and its ring.
class SnapshotRingTest : public testing::StoreTest {
 protected:
  explicit SnapshotRingTest(const std::string& serving = "") : StoreTest(/*threads=*/2) {
    v1::RunSpec wire = testing::SmallSpec();
    if (!serving.empty()) wire.mutable_groups(0)->set_serving(serving);
    wire.mutable_rewind()->set_snapshots(2);
    wire.mutable_rewind()->set_every(3);
    MakeEmptyStore(wire);
    gradient_ = device_.Allocate(4 * 30000, Place::kHost).value();
    OnStrand([&] { ring_ = SnapshotRing::Create(&spec_, store_.get()).value(); });
  }

  // Updates all tensors but `absent`.
  void Step(uint64_t step, std::optional<uint32_t> absent = std::nullopt) {
    for (uint32_t i = 0; i < spec_.tensors.size(); ++i) {
      if (i == absent) continue;
      store_->WaitIdle();  // the gradient is rewritten
      OnStrand([&] {
        auto* const g = reinterpret_cast<float*>(gradient_.data());
        for (uint64_t e = 0; e < spec_.tensors[i].elements; ++e)
          g[e] = static_cast<float>((step * 31 + i * 7 + e) % 13) - 6;
        ring_->BeforeUpdate(i);
        store_->Update(i,
                       {.step = step,
                        .hyper = spec_.groups[0].hyper,
                        .gradient = gradient_.data(),
                        .gradient_format = kernels::FindWireFormat("fp32")},
                       [](const TaskResult&) {});
      });
    }
    OnStrand([&] {
      ring_->Complete();
      if (ring_->Due(step)) ring_->Begin({.result = {.step = step}});
    });
  }

  // Every byte of weights and state, and the counts.
  struct Whole {
    std::vector<std::byte> bytes;
    std::vector<uint64_t> counts;
    bool operator==(const Whole&) const = default;
  };
  Whole Look() {
    StoreImage image;
    Whole whole;
    OnStrand([&] {
      image = store_->NewImage().value();
      for (uint32_t i = 0; i < spec_.tensors.size(); ++i) {
        store_->Save(i, &image, [](const TaskResult&) {});
        whole.counts.push_back(store_->count(i).updates);
        whole.counts.push_back(store_->count(i).step);
      }
    });
    store_->WaitIdle();
    whole.bytes.assign(image.shards[0].data(), image.shards[0].data() + image.shards[0].bytes());
    return whole;
  }
  std::vector<uint64_t> Steps() {
    std::vector<uint64_t> steps;
    OnStrand([&] { steps = ring_->steps(); });
    return steps;
  }
  void Restore(uint64_t step) {
    OnStrand([&] { EXPECT_EQ(ring_->Restore(step).result.step, step); });
  }

  DeviceBuffer gradient_;
  std::unique_ptr<SnapshotRing> ring_;
};

TEST_F(SnapshotRingTest, EveryByteAndCountComesBack) {
  for (uint64_t step = 1; step <= 3; ++step) Step(step);
  const Whole then = Look();
  Step(4);
  Step(5, /*absent=*/0);
  ASSERT_NE(Look(), then);
  Restore(3);
  EXPECT_EQ(Look(), then);
  Step(4);
  Step(5, /*absent=*/0);
  const Whole later = Look();
  Restore(3);
  Step(4);
  Step(5, /*absent=*/0);
  EXPECT_EQ(Look(), later);
}

TEST_F(SnapshotRingTest, TheRingKeepsTheLastSnapshots) {
  EXPECT_THAT(Steps(), IsEmpty());
  for (uint64_t step = 1; step <= 10; ++step) Step(step);
  EXPECT_THAT(Steps(), ElementsAre(6, 9));
  OnStrand([&] {
    EXPECT_EQ(ring_->NearestTo(100), 9u);
    EXPECT_EQ(ring_->NearestTo(8), 6u);
    EXPECT_EQ(ring_->NearestTo(5), std::nullopt);
  });
  Restore(6);
  EXPECT_THAT(Steps(), ElementsAre(6));
}

TEST_F(SnapshotRingTest, ATensorThatIsNotUpdatedIsOfItsSnapshotAllTheSame) {
  for (uint64_t step = 1; step <= 3; ++step) Step(step);
  const Whole then = Look();
  Step(4, /*absent=*/1);
  Step(5);
  Restore(3);
  EXPECT_EQ(Look(), then);
}

TEST_F(SnapshotRingTest, IdleTimeIsUsedForOneTensorAfterAnother) {
  for (uint64_t step = 1; step <= 3; ++step) Step(step);
  const Whole then = Look();
  int saved = 0;
  absl::Notification all;
  std::function<void()> next = [&] {
    if (++saved == 3) all.Notify();
    ring_->SaveNext(next);  // beyond the last: nothing
  };
  OnStrand([&] {
    ring_->SaveNext(next);
    ring_->SaveNext([] { FAIL() << "two at once"; });
  });
  all.WaitForNotification();
  Step(4);
  EXPECT_EQ(saved, 3);
  Restore(3);
  EXPECT_EQ(Look(), then);
}

// A ring with a place more, for what is being written.
class PinnedSnapshotTest : public SnapshotRingTest {
 protected:
  PinnedSnapshotTest() {
    OnStrand([&] {
      ring_.reset();
      spec_.checkpoints = CheckpointSettings();
      ring_ = SnapshotRing::Create(&spec_, store_.get()).value();
    });
  }
  double StallSeconds(uint64_t id) {
    double seconds = 0;
    store_->WaitIdle();
    OnStrand([&] { seconds = ring_->PinnedStallSeconds(id); });
    return seconds;
  }
  uint64_t PinLast() {
    uint64_t id = 0;
    OnStrand([&] {
      id = ring_->last_id();
      ring_->Pin(id);
    });
    return id;
  }
  std::vector<std::byte> PinnedBytes(uint64_t id) {
    store_->WaitIdle();
    const DeviceBuffer& image = ring_->PinnedImage(id)->shards[0];
    return {image.data(), image.data() + image.bytes()};
  }
};

TEST_F(PinnedSnapshotTest, ItsImageStaysHoweverManyComeAfterIt) {
  for (uint64_t step = 1; step <= 3; ++step) Step(step);
  const Whole then = Look();
  const uint64_t id = PinLast();
  for (uint64_t step = 4; step <= 12; ++step) Step(step);
  EXPECT_THAT(Steps(), ElementsAre(3, 9, 12));
  EXPECT_EQ(PinnedBytes(id), then.bytes);
  OnStrand([&] { ring_->Unpin(id); });
  Step(13);
  Step(14);
  Step(15);
  EXPECT_THAT(Steps(), ElementsAre(9, 12, 15));
}

TEST_F(PinnedSnapshotTest, CopiesThatUpdatesWaitForAreTimed) {
  for (uint64_t step = 1; step <= 3; ++step) Step(step);
  const uint64_t id = PinLast();
  EXPECT_EQ(StallSeconds(id), 0) << "nothing is copied yet";
  Step(4);
  EXPECT_GT(StallSeconds(id), 0);
}

TEST_F(PinnedSnapshotTest, CopiesInIdleTimeStallNothing) {
  for (uint64_t step = 1; step <= 3; ++step) Step(step);
  const uint64_t id = PinLast();
  absl::Notification whole;
  std::function<void()> next = [&] { ring_->SaveNext(next); };
  OnStrand([&] {
    ring_->WhenSaved(id, [&](bool saved) {
      EXPECT_TRUE(saved);
      whole.Notify();
    });
    ring_->SaveNext(next);
  });
  whole.WaitForNotification();
  Step(4);
  EXPECT_EQ(StallSeconds(id), 0);
}

TEST_F(PinnedSnapshotTest, ARewindDropsItAndLeavesTheImage) {
  for (uint64_t step = 1; step <= 6; ++step) Step(step);
  const Whole then = Look();
  const uint64_t id = PinLast();
  Step(7);
  bool told = false;
  OnStrand([&] { ring_->WhenSaved(id, [&](bool saved) { told = saved; }); });
  store_->WaitIdle();
  OnStrand([&] {});
  EXPECT_TRUE(told) << "it was whole before the rewind";
  Restore(3);
  EXPECT_THAT(Steps(), ElementsAre(3));
  EXPECT_EQ(PinnedBytes(id), then.bytes);
  OnStrand([&] { ring_->Unpin(id); });
}

TEST_F(PinnedSnapshotTest, OneThatIsDroppedBeforeItIsWholeIsNeverWhole) {
  for (uint64_t step = 1; step <= 6; ++step) Step(step);
  OnStrand([&] {
    std::optional<bool> told;
    ring_->Pin(ring_->last_id());
    ring_->WhenSaved(ring_->last_id(), [&](bool saved) { told = saved; });
    ring_->Restore(3);
    EXPECT_EQ(told, false);
  });
}

TEST_F(PinnedSnapshotTest, OneThatWasBroughtIsGoneBackTo) {
  for (uint64_t step = 1; step <= 3; ++step) Step(step);
  const Whole then = Look();
  std::vector<ParameterStore::UpdateCount> counts;
  OnStrand([&] {
    for (uint32_t i = 0; i < spec_.tensors.size(); ++i) counts.push_back(store_->count(i));
  });
  for (uint64_t step = 4; step <= 12; ++step) Step(step);
  EXPECT_THAT(Steps(), ElementsAre(6, 9, 12));
  OnStrand([&] {
    const uint64_t id = *ring_->BeginBringing(kMayGo);
    std::copy(then.bytes.begin(), then.bytes.end(), ring_->PinnedImage(id)->shards[0].data());
    ring_->Bring(id, {.result = {.step = 3}}, counts);
    ring_->Accept(id);
  });
  EXPECT_THAT(Steps(), ElementsAre(3, 9, 12)) << "it takes the place of the oldest";
  Restore(3);
  EXPECT_EQ(Look(), then);
  EXPECT_THAT(Steps(), ElementsAre(3));
}

TEST_F(PinnedSnapshotTest, WhatIsBroughtIsNoSnapshotBeforeItIsAccepted) {
  for (uint64_t step = 1; step <= 9; ++step) Step(step);
  EXPECT_THAT(Steps(), ElementsAre(3, 6, 9));
  OnStrand([&] {
    EXPECT_EQ(ring_->BeginBringing(kStays), std::nullopt);
    EXPECT_THAT(ring_->steps(), ElementsAre(3, 6, 9));
    const uint64_t refused = *ring_->BeginBringing(kMayGo);
    ring_->Bring(refused, {.result = {.step = 9}}, std::vector<ParameterStore::UpdateCount>(spec_.tensors.size()));
    EXPECT_THAT(ring_->steps(), ElementsAre(6, 9)) << "this 9 is the run's own";
    EXPECT_NE(ring_->IdOf(9), refused);
    ring_->Unpin(refused);
    EXPECT_THAT(ring_->steps(), ElementsAre(6, 9));
    const uint64_t accepted = ring_->BeginBringing(kStays).value();  // in the place that is free now
    ring_->Bring(accepted, {.result = {.step = 9}}, std::vector<ParameterStore::UpdateCount>(spec_.tensors.size()));
    ring_->Accept(accepted);
    EXPECT_THAT(ring_->steps(), ElementsAre(6, 9));
    EXPECT_EQ(ring_->IdOf(9), accepted);
  });
}

class Int8SnapshotTest : public SnapshotRingTest {
 protected:
  Int8SnapshotTest() : SnapshotRingTest("int8-row") {}
  // Tensor 0 as it is served, of the snapshot, or as it is now.
  WeightPiece Served(std::optional<uint64_t> id) {
    WeightPiece piece;
    absl::Notification encoded;
    OnStrand([&] {
      const StoreImage* const image = id ? ring_->ImageOf(*id, 0) : nullptr;
      store_->EncodeWeights(
          {0, 0, spec_.tensors[0].elements}, &piece, [&](const TaskResult&) { encoded.Notify(); }, image);
    });
    encoded.WaitForNotification();
    return piece;
  }
};

// It lies where another snapshot was, of which the scales were made last.
TEST_F(Int8SnapshotTest, OneThatWasBroughtIsServedWithItsOwnScales) {
  for (uint64_t step = 1; step <= 8; ++step) Step(step);
  const Whole now = Look();
  uint64_t oldest = 0, id = 0;
  OnStrand([&] { oldest = ring_->IdOf(3); });
  const WeightPiece before = Served(oldest);
  OnStrand([&] {
    std::vector<ParameterStore::UpdateCount> counts;
    for (uint32_t i = 0; i < spec_.tensors.size(); ++i) counts.push_back(store_->count(i));
    id = *ring_->BeginBringing(kMayGo);
    std::copy(now.bytes.begin(), now.bytes.end(), ring_->PinnedImage(id)->shards[0].data());
    ring_->Bring(id, {.result = {.step = 8}}, counts);
    ring_->Accept(id);
  });
  const WeightPiece brought = Served(id), wanted = Served(std::nullopt);
  EXPECT_NE(wanted.scales, before.scales);
  EXPECT_EQ(brought.scales, wanted.scales);
  EXPECT_EQ(brought.data, wanted.data);
}

TEST_F(SnapshotRingTest, TheImagesAreWhatThePlanCounts) {
  EXPECT_EQ(ring_->bytes(), plan_.bytes.snapshots);
  EXPECT_EQ(plan_.bytes.snapshots, 2 * plan_.bytes.stored());
}

}  // namespace
}  // namespace ballast
