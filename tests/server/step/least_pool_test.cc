// Steps that update each tensor as it completes end with a pool that has room for the largest of them alone, and ranks
// without credit: the proof is in server/step/reduction_tracker.h.
#include <gtest/gtest.h>

#include <algorithm>
#include <deque>
#include <map>
#include <random>
#include <utility>
#include <vector>

#include "absl/strings/str_cat.h"

#include "server/step/reduction_tracker.h"
#include "tests/server/step/chunk_sets.h"

namespace ballast {
namespace {

// Ranks that send one chunk while none of theirs waits, and beside that only what is wanted, in orders of their own.
// What is absent is said when nothing else moves, and the device answers after that.
class Starved {
 public:
  using Options = ReductionTracker::Options;

  Starved(Options options, uint32_t ranks, uint64_t seed)
      : options_(std::move(options)), random_(seed), reduction_(options_), ranks_(ranks) {
    reduction_.Begin(ranks);
  }

  // What the rank will send of the step, the last first, but nothing of the tensors that are absent. To be called once.
  void Plan(uint32_t rank, std::vector<bool> absent, ChunkSet covers = {}) {
    Rank& r = ranks_[rank];
    for (uint32_t i = 0; i < options_.chunks.size(); ++i) {
      for (uint64_t c = 0; !absent[i] && c < options_.chunks[i]; ++c) {
        if (Contains(covers, i, c)) r.to_send.push_back({0, i, c});
      }
    }
    std::shuffle(r.to_send.begin(), r.to_send.end(), random_);
    for (size_t at = 0; at < r.to_send.size(); ++at) r.place[r.to_send[at]] = at;
    r.absent = std::move(absent);
    reduction_.Cover(rank, std::move(covers));
    Restart(rank);
  }

  // Begins the micro-batch, perhaps once more: what was sent will be sent again.
  void Restart(uint32_t rank) {
    Rank& r = ranks_[rank];
    r.is_sent.assign(r.to_send.size(), false);
    r.next = r.to_send.size();
    r.ended = false;
    r.waiting.clear();
    reduction_.BeginMicro(rank, /*last=*/true);
  }

  // Until all is complete (true), or nothing moves any more. Ranks that are asleep say nothing.
  bool Run() {
    while (!reduction_.all_complete()) {
      if (!AnySends() && !AnyEnds() && !DeviceAnswers()) return false;
    }
    while (DeviceAnswers()) continue;
    return true;
  }

  bool Send(uint32_t rank) {
    Rank& r = ranks_[rank];
    const auto wanted = reduction_.Wanted(rank);
    if (wanted) {
      const auto at = r.place.find(*wanted);
      if (at != r.place.end() && !r.is_sent[at->second]) return Deliver(rank, at->second);
    }
    while (r.next > 0 && r.is_sent[r.next - 1]) --r.next;
    return r.waiting.empty() && r.next > 0 && Deliver(rank, r.next - 1);
  }

  ReductionTracker& reduction() { return reduction_; }
  void Sleep(uint32_t rank, bool asleep) { ranks_[rank].asleep = asleep; }
  size_t waiting(uint32_t rank) const { return ranks_[rank].waiting.size(); }
  size_t most_waiting() const { return most_waiting_; }
  size_t summed() const { return summed_; }

 private:
  struct Rank {
    std::vector<ChunkId> to_send;
    std::map<ChunkId, size_t> place;  // in to_send
    std::vector<bool> is_sent;
    size_t next = 0;  // everything from here on is sent
    std::vector<bool> absent;
    std::vector<ChunkId> waiting;  // to be summed
    bool ended = false, asleep = false;
  };

  bool Deliver(uint32_t rank, size_t at) {
    Rank& r = ranks_[rank];
    r.is_sent[at] = true;
    r.waiting.push_back(r.to_send[at]);
    most_waiting_ = std::max(most_waiting_, r.waiting.size());
    EXPECT_EQ(reduction_.Deliver(rank, r.to_send[at], 7), ReductionTracker::Arrival::kNew);
    Take(reduction_.Advance());
    return true;
  }

  bool AnySends() {
    bool any = false;
    for (uint32_t rank = 0; rank < ranks_.size(); ++rank) any |= !ranks_[rank].asleep && Send(rank);
    return any;
  }

  bool AnyEnds() {
    for (uint32_t rank = 0; rank < ranks_.size(); ++rank) {
      if (ranks_[rank].ended || ranks_[rank].asleep) continue;
      ranks_[rank].ended = true;
      reduction_.EndMicro(rank, ranks_[rank].absent);
      Take(reduction_.Advance());
      return true;
    }
    return false;
  }

  bool DeviceAnswers() {
    if (updating_.empty()) return false;
    const auto [tensor, slab] = updating_.front();
    updating_.pop_front();
    reduction_.Release(tensor, slab);
    Take(reduction_.Advance());
    return true;
  }

  void Take(const ReductionTracker::Progress& progress) {
    for (const ReductionTracker::Sum& sum : progress.sums) {
      summed_ += sum.ranks.size();
      EXPECT_LE(sum.slab.offset + sum.slab.bytes, options_.pool_bytes[options_.pool_of[sum.id.tensor]]);
      for (const uint32_t rank : sum.ranks) std::erase(ranks_[rank].waiting, sum.id);
    }
    for (const ReductionTracker::Complete& c : progress.complete) {
      if (c.slab) updating_.emplace_back(c.tensor, *c.slab);
    }
  }

  const Options options_;
  std::mt19937_64 random_;
  ReductionTracker reduction_;
  std::vector<Rank> ranks_;
  std::deque<std::pair<uint32_t, Slab>> updating_;
  size_t most_waiting_ = 0, summed_ = 0;
};

// Tensors of so many chunks, in one pool that has room for the largest.
ReductionTracker::Options OfChunks(std::vector<uint64_t> chunks) {
  ReductionTracker::Options options{.chunks = std::move(chunks), .micros = 1};
  for (const uint64_t of_tensor : options.chunks) options.slab_bytes.push_back(64 * of_tensor);
  options.pool_of.resize(options.chunks.size());
  options.pool_bytes = {*std::max_element(options.slab_bytes.begin(), options.slab_bytes.end())};
  return options;
}

std::vector<bool> None(const ReductionTracker::Options& options) { return std::vector<bool>(options.chunks.size()); }

TEST(LeastPoolTest, StepsEndWithRoomForTheLargestTensorAndNoCredit) {
  std::mt19937_64 random(1);
  for (uint64_t seed = 1; seed <= 300; ++seed) {
    SCOPED_TRACE(absl::StrCat("seed ", seed));
    std::vector<uint64_t> chunks;
    for (uint64_t i = 2 + random() % 10; i > 0; --i) chunks.push_back(1 + random() % 9);
    const auto options = OfChunks(chunks);
    const auto ranks = static_cast<uint32_t>(1 + random() % 8);
    Starved run(options, ranks, seed);
    for (uint32_t rank = 0; rank < ranks; ++rank) {
      std::vector<bool> absent = None(options);
      for (size_t i = 0; i < absent.size(); ++i) absent[i] = random() % 5 == 0;
      run.Plan(rank, absent);
    }
    ASSERT_TRUE(run.Run());
    EXPECT_LE(run.most_waiting(), 2u);
  }
}

TEST(LeastPoolTest, SoDoThoseOfRanksThatHoldPartsOfTensors) {
  std::mt19937_64 random(2);
  for (uint64_t seed = 1; seed <= 300; ++seed) {
    SCOPED_TRACE(absl::StrCat("seed ", seed));
    std::vector<uint64_t> chunks;
    for (uint64_t i = 2 + random() % 10; i > 0; --i) chunks.push_back(1 + random() % 9);
    const auto options = OfChunks(chunks);
    const auto ranks = static_cast<uint32_t>(2 + random() % 7);
    Starved run(options, ranks, seed);
    // Rank r has of each tensor what fully_shard gives it: a range, whose ends others have as well.
    for (uint32_t rank = 0; rank < ranks; ++rank) {
      std::vector<std::vector<bool>> has;
      for (const uint64_t of_tensor : chunks) {
        std::vector<bool>& set = has.emplace_back(of_tensor);
        for (uint64_t c = of_tensor * rank / ranks; c < (of_tensor * (rank + 1) + ranks - 1) / ranks; ++c)
          set[c] = true;
      }
      run.Plan(rank, None(options), testing::ChunkSetOf(has));
    }
    ASSERT_TRUE(run.Run());
    EXPECT_LE(run.most_waiting(), 2u);
  }
}

TEST(LeastPoolTest, EightRanksOfTwentyThousandTensorsShareARoomForOne) {
  constexpr uint32_t kRanks = 8;
  constexpr uint64_t kTensors = 20000;
  const auto options = OfChunks(std::vector<uint64_t>(kTensors, 1));
  for (const bool sharded : {false, true}) {
    Starved run(options, kRanks, 3);
    for (uint32_t rank = 0; rank < kRanks; ++rank) {
      std::vector<std::vector<bool>> has;
      for (uint64_t i = 0; sharded && i < kTensors; ++i) has.push_back({i % kRanks == rank || i % 3 == 0});
      run.Plan(rank, None(options), testing::ChunkSetOf(has));
    }
    const uint64_t before = run.reduction().work();
    ASSERT_TRUE(run.Run());
    EXPECT_EQ(run.summed(), sharded ? 6667 * kRanks + 13333 : kTensors * kRanks);
    EXPECT_LT(run.reduction().work() - before, 100 * kTensors * kRanks);
  }
}

// It fills the pool, so it waits until all others are read; they wait for it where it comes first.
TEST(LeastPoolTest, ATensorAsLargeAsThePoolIsSummedWhereverItComes) {
  for (const size_t at : {size_t{0}, size_t{4}, size_t{9}}) {
    std::vector<uint64_t> chunks(10, 1);
    chunks[at] = 50;
    const auto options = OfChunks(chunks);
    for (uint64_t seed = 1; seed <= 20; ++seed) {
      Starved run(options, 3, seed);
      for (uint32_t rank = 0; rank < 3; ++rank) run.Plan(rank, None(options));
      ASSERT_TRUE(run.Run()) << "at " << at << ", seed " << seed;
      EXPECT_EQ(run.summed(), 3u * 59);
    }
  }
}

TEST(LeastPoolTest, ASlowRankIsWaitedForWithAChunkOrTwoOfEachOther) {
  const auto options = OfChunks({4, 1, 7, 2});
  Starved run(options, 4, 4);
  for (uint32_t rank = 0; rank < 4; ++rank) run.Plan(rank, None(options));
  run.Sleep(2, true);
  EXPECT_FALSE(run.Run());
  for (const uint32_t rank : {0u, 1u, 3u}) {
    EXPECT_GE(run.waiting(rank), 1u);
    EXPECT_LE(run.waiting(rank), 2u);
  }
  run.Sleep(2, false);
  EXPECT_TRUE(run.Run());
  EXPECT_EQ(run.summed(), 4u * 14);
}

// The wanted chunk has taken the pool for a tensor that the lost rank alone has.
TEST(LeastPoolTest, WhatALostRankWasWaitedForWithDoesNotKeepThePool) {
  const auto options = OfChunks({6, 3, 6});
  for (const bool comes_back : {false, true}) {
    Starved run(options, 3, 5);
    run.Plan(0, {true, false, false});
    run.Plan(1, {true, false, false});
    run.Plan(2, {false, true, true});
    ASSERT_TRUE(run.Send(2));
    ASSERT_TRUE(run.reduction().Wanted(0));
    EXPECT_EQ(run.reduction().Wanted(0)->tensor, 0u);
    ASSERT_TRUE(run.reduction().Forget(2));
    if (comes_back) {
      run.Restart(2);
    } else {
      run.Sleep(2, true);
      run.reduction().LeaveOut(2);
    }
    EXPECT_TRUE(run.Run());
    EXPECT_EQ(run.summed(), 2u * 9 + (comes_back ? 6 : 0));
  }
}

// As after a rewind, or where a step closes torn: updates that are under way keep their slabs.
TEST(LeastPoolTest, AStepThatIsGivenUpLeavesNothingInThePool) {
  const auto options = OfChunks({2, 8, 3});
  ReductionTracker reduction(options);
  for (int step = 0; step < 3; ++step) {
    reduction.Begin(1);
    reduction.BeginMicro(0, /*last=*/true);
    reduction.Deliver(0, {0, 1, 0}, 7);
    const auto progress = reduction.Advance();
    ASSERT_EQ(progress.sums.size(), 1u);  // all of the pool was free
  }
  reduction.Begin(1);
  reduction.BeginMicro(0, /*last=*/true);
  for (uint64_t c = 0; c < 2; ++c) reduction.Deliver(0, {0, 0, c}, 7);
  const auto complete = reduction.Advance().complete;
  ASSERT_EQ(complete.size(), 1u);
  reduction.Begin(1);
  reduction.BeginMicro(0, /*last=*/true);
  reduction.Deliver(0, {0, 1, 0}, 7);
  EXPECT_TRUE(reduction.Advance().sums.empty());  // the update of before still reads
  EXPECT_FALSE(reduction.Wanted(0));
  reduction.Release(0, *complete[0].slab);
  EXPECT_EQ(reduction.Advance().sums.size(), 1u);
}

}  // namespace
}  // namespace ballast
