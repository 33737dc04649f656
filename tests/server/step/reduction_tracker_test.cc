// The reduction against the plain walk that it replaced, in drawn schedules; what its calls cost; and what its accounts
// take of memory.
#include "server/step/reduction_tracker.h"

#include <gtest/gtest.h>
#include <malloc.h>

#include <algorithm>
#include <deque>
#include <memory>
#include <numeric>
#include <random>

#include "absl/strings/str_cat.h"
#include "absl/strings/str_join.h"

#include "tests/server/step/chunk_sets.h"
#include "tests/server/step/walking_reduction.h"

namespace ballast {
namespace {

std::string Text(const ChunkId& id) { return absl::StrCat(id.micro, "/", id.tensor, "/", id.chunk); }
std::string Text(const std::optional<ChunkId>& id) { return id ? Text(*id) : "-"; }

std::string Text(const ReductionTracker::Progress& progress) {
  std::string text;
  for (const ReductionTracker::Sum& sum : progress.sums) {
    absl::StrAppend(&text, " sum ", Text(sum.id), " at ", sum.slab.offset, " of ", absl::StrJoin(sum.ranks, ","),
                    sum.first ? " first" : "");
  }
  for (const ReductionTracker::Complete& c : progress.complete) {
    absl::StrAppend(&text, " complete ", c.tensor, " at ", c.slab ? absl::StrCat(c.slab->offset) : "-");
  }
  return text;
}

// Drives both through the same events.
class BothTrackers {
 public:
  explicit BothTrackers(uint64_t seed) : random_(seed), options_(Draw()), real_(options_), walk_(options_) {
    world_ = 1 + static_cast<uint32_t>(Below(5));
    Begin();
  }

  // Returns how often a chunk was wanted.
  int Run(int events) {
    for (int i = 0; i < events && !::testing::Test::HasFailure(); ++i) Event();
    return wanted_;
  }
  int named() const { return named_; }  // how often a micro-batch was named the last afterwards

 private:
  struct Rank {
    uint32_t begun = 0;
    bool ended = true;
    bool named = false;            // the last micro-batch, where it does not begin as such
    std::vector<ChunkId> to_send;  // in this order
    std::vector<ChunkId> sent;
  };

  uint64_t Below(uint64_t n) { return random_() % n; }

  ReductionTracker::Options Draw() {
    ReductionTracker::Options options;
    const uint64_t tensors = 1 + Below(5), pools = 1 + Below(2);
    most_micros_ = static_cast<uint32_t>(Below(2) == 0 ? 1 : 1 + Below(5));
    options.micros = most_micros_;
    std::vector<uint64_t> all(pools), largest(pools);
    for (uint64_t i = 0; i < tensors; ++i) {
      options.chunks.push_back(1 + Below(70));
      options.slab_bytes.push_back(64 * (1 + Below(4)));
      options.pool_of.push_back(static_cast<uint32_t>(Below(pools)));
      all[options.pool_of[i]] += options.slab_bytes[i];
      largest[options.pool_of[i]] = std::max(largest[options.pool_of[i]], options.slab_bytes[i]);
    }
    whole_ = most_micros_ > 1 || Below(3) == 0;
    for (uint64_t p = 0; p < pools; ++p) {
      options.pool_bytes.push_back(whole_ ? all[p] : largest[p] + Below(2) * (all[p] - largest[p]) / 2);
    }
    return options;
  }

  void Begin() {
    real_.Begin(world_);
    walk_.Begin(world_);
    ranks_.assign(world_, {});
    micros_ = 1 + static_cast<uint32_t>(Below(most_micros_));
    open_ended_ = whole_ && Below(2) == 0;
    for (uint32_t r = 0; r < world_; ++r) {
      std::vector<std::vector<bool>> covered;
      for (size_t i = 0; sharded_ && i < options_.chunks.size(); ++i) {
        std::vector<bool>& set = covered.emplace_back(options_.chunks[i]);
        for (size_t c = 0; c < set.size(); ++c) set[c] = r == 0 || Below(2) == 0;
      }
      const ChunkSet covers = testing::ChunkSetOf(covered);
      real_.Cover(r, covers);
      walk_.Cover(r, covers);
    }
    sharded_ = Below(3) == 0;
  }

  void Event() {
    const auto r = static_cast<uint32_t>(Below(world_));
    Rank& rank = ranks_[r];
    const uint64_t what = Below(100);
    if (what < 3 && !updating_.empty()) {
      Release();
    } else if (what < 4) {
      ASSERT_EQ(real_.Forget(r), walk_.Forget(r));
      if (real_.micros_begun(r) == 0) rank = {};
    } else if (rank.ended && open_ended_ && rank.begun == micros_ && !rank.named) {
      NameLast(r);
    } else if (rank.ended) {
      BeginMicro(r);
    } else if (!rank.to_send.empty()) {
      Send(r, what);
    } else {
      EndMicro(r);
    }
    Compare();
  }

  void Release() {
    const auto [tensor, slab] = updating_.front();
    updating_.pop_front();
    real_.Release(tensor, slab);
    walk_.Release(tensor, slab);
  }

  void BeginMicro(uint32_t r) {
    Rank& rank = ranks_[r];
    if (rank.begun == micros_ || !real_.MayBegin(rank.begun)) return MaybeNextStep();
    const bool last = !open_ended_ && rank.begun + 1 == micros_;
    real_.BeginMicro(r, last);
    walk_.BeginMicro(r, last);
    rank = {.begun = rank.begun + 1, .ended = false};
    absent_ = std::vector<bool>(options_.chunks.size());
    for (uint32_t i = 0; i < options_.chunks.size(); ++i) {
      const bool left_out = Below(4) == 0;
      for (uint64_t c = 0; !left_out && c < options_.chunks[i]; ++c) {
        if (Contains(real_.covers(r), i, c)) rank.to_send.push_back({rank.begun - 1, i, c});
      }
    }
    std::shuffle(rank.to_send.begin(), rank.to_send.end(), random_);
  }

  void NameLast(uint32_t r) {
    real_.NameLast(r);
    walk_.NameLast(r);
    ranks_[r].named = true;
    ++named_;
  }

  void Send(uint32_t r, uint64_t what) {
    Rank& rank = ranks_[r];
    const bool again = what < 10 && !rank.sent.empty();
    const ChunkId id = again ? rank.sent[Below(rank.sent.size())] : rank.to_send.back();
    const uint32_t crc = static_cast<uint32_t>(what % 3);  // 0: not known
    if (!again) rank.sent.push_back(id);
    if (!again) rank.to_send.pop_back();
    ASSERT_EQ(real_.Deliver(r, id, again ? crc : 2), walk_.Deliver(r, id, again ? crc : 2));
  }

  void EndMicro(uint32_t r) {
    Rank& rank = ranks_[r];
    std::vector<bool> absent(options_.chunks.size(), true);
    for (const ChunkId& id : rank.sent) absent[id.tensor] = false;
    real_.EndMicro(r, absent);
    walk_.EndMicro(r, absent);
    rank.ended = true;
    rank.sent.clear();
  }

  // The step is over, or given up.
  void MaybeNextStep() {
    const bool all =
        std::all_of(ranks_.begin(), ranks_.end(), [&](const Rank& r) { return r.begun == micros_ && r.ended; });
    if (all && updating_.size() > 1) Release();
    if ((all && real_.all_complete()) || Below(300) == 0) Begin();
  }

  void Compare() {
    const ReductionTracker::Progress real = real_.Advance();
    ASSERT_EQ(Text(real), Text(walk_.Advance()));
    for (const ReductionTracker::Complete& c : real.complete) {
      if (c.slab) updating_.emplace_back(c.tensor, *c.slab);
    }
    if (Below(3) == 0) return;  // asking takes a slab
    for (uint32_t r = 0; r < world_; ++r) {
      const auto wanted = real_.Wanted(r);
      ASSERT_EQ(Text(wanted), Text(walk_.Wanted(r)));
      wanted_ += wanted ? 1 : 0;
    }
  }

  std::mt19937_64 random_;
  uint32_t most_micros_ = 1, micros_ = 1, world_ = 1;
  bool sharded_ = false, whole_ = false, open_ended_ = false;
  const ReductionTracker::Options options_;
  ReductionTracker real_;
  WalkingReduction walk_;
  std::vector<Rank> ranks_;
  std::vector<bool> absent_;
  int named_ = 0;
  std::deque<std::pair<uint32_t, Slab>> updating_;
  int wanted_ = 0;
};

TEST(ReductionTrackerTest, ReductionAgreesWithAWalkOverAllChunks) {
  int wanted = 0, named = 0;
  for (uint64_t seed = 1; seed <= 150 && !HasFailure(); ++seed) {
    SCOPED_TRACE(absl::StrCat("seed ", seed));
    BothTrackers pair(seed);
    wanted += pair.Run(700);
    named += pair.named();
  }
  EXPECT_GT(wanted, 10000);
  EXPECT_GT(named, 100);
}

ReductionTracker::Options Large(uint64_t chunks, uint32_t micros) {
  return {.chunks = std::vector<uint64_t>(chunks, 1),
          .slab_bytes = std::vector<uint64_t>(chunks, 64),
          .pool_of = std::vector<uint32_t>(chunks),
          .pool_bytes = {64 * chunks},
          .micros = micros};
}

// What one chunk of one rank costs, when 64 ranks deliver in orders of their own and ask after every chunk what is
// wanted.
double WorkOf(uint64_t chunks) {
  constexpr uint32_t kRanks = 64;
  ReductionTracker reduction(Large(chunks, 1));
  reduction.Begin(kRanks);
  for (uint32_t r = 0; r < kRanks; ++r) reduction.BeginMicro(r, /*last=*/true);
  const uint64_t before = reduction.work();
  for (uint64_t i = 0; i < chunks; ++i) {
    for (uint32_t r = 0; r < kRanks; ++r) {
      const uint64_t at = (i * (2 * r + 1) + r) % chunks;  // chunks is a power of 2: each once
      EXPECT_EQ(reduction.Deliver(r, {0, static_cast<uint32_t>(at), 0}, 7), ReductionTracker::Arrival::kNew);
      reduction.Advance();
      reduction.Wanted(r);
    }
  }
  EXPECT_TRUE(reduction.all_complete());
  return static_cast<double>(reduction.work() - before) / static_cast<double>(chunks * kRanks);
}

TEST(ReductionTrackerTest, AChunkCostsTheSameHoweverManyThereAre) {
  const double few = WorkOf(64), many = WorkOf(4096);
  EXPECT_LT(many, 16);
  EXPECT_LT(many, 1.5 * few);
}

// What one tensor costs whose chunk waits for one of eight slabs, when all have been delivered and the device gives slabs
// back one by one.
double WorkOfWaiting(uint64_t tensors) {
  ReductionTracker::Options options = Large(tensors, 1);
  options.pool_bytes = {64 * 8};
  ReductionTracker reduction(options);
  reduction.Begin(1);
  reduction.BeginMicro(0, /*last=*/true);
  std::deque<ReductionTracker::Complete> updating;
  const auto advance = [&] {
    for (const ReductionTracker::Complete& complete : reduction.Advance().complete) updating.push_back(complete);
  };
  for (uint32_t i = 0; i < tensors; ++i) {
    reduction.Deliver(0, {0, i, 0}, 7);
    advance();
  }
  const uint64_t before = reduction.work();
  uint32_t next = 0;
  while (!updating.empty()) {
    EXPECT_EQ(updating.front().tensor, next++);
    reduction.Release(updating.front().tensor, *updating.front().slab);
    updating.pop_front();
    advance();
  }
  EXPECT_TRUE(reduction.all_complete());
  return static_cast<double>(reduction.work() - before) / static_cast<double>(tensors);
}

TEST(ReductionTrackerTest, ASlabThatIsGivenBackCostsTheSameHoweverManyWaitForOne) {
  const double few = WorkOfWaiting(64), many = WorkOfWaiting(4096);
  EXPECT_LT(many, 16);
  EXPECT_LT(many, 1.5 * few);
}

TEST(ReductionTrackerTest, ARankMayBeOneMicroBatchAheadOfWhatIsSummed) {
  ReductionTracker reduction(Large(2, 1024));
  reduction.Begin(2);
  const std::vector<bool> all_absent(2, true);
  for (uint32_t micro = 0; micro < ReductionTracker::kMostLive; ++micro) {
    ASSERT_TRUE(reduction.MayBegin(micro));
    reduction.BeginMicro(0, false);
    reduction.EndMicro(0, all_absent);
  }
  EXPECT_FALSE(reduction.MayBegin(ReductionTracker::kMostLive));
  reduction.BeginMicro(1, false);
  reduction.EndMicro(1, {true, false});
  reduction.Advance();
  EXPECT_FALSE(reduction.MayBegin(ReductionTracker::kMostLive));
  reduction.Deliver(1, {0, 1, 0}, 7);
  reduction.Advance();
  EXPECT_TRUE(reduction.MayBegin(ReductionTracker::kMostLive));
  EXPECT_FALSE(reduction.MayBegin(ReductionTracker::kMostLive + 1));
  EXPECT_EQ(reduction.micros_summed(), 1u);
}

// The micro-batch that becomes the last is summed already: its tensors are complete at once.
TEST(ReductionTrackerTest, TheLastMicroBatchMayBecomeKnownWhenItIsSummed) {
  for (const uint32_t micros : {1u, 3u}) {
    ReductionTracker reduction(Large(3, 4));
    reduction.Begin(2);
    for (uint32_t micro = 0; micro < micros; ++micro) {
      for (const uint32_t r : {0u, 1u}) {
        ASSERT_TRUE(reduction.MayBegin(micro));
        reduction.BeginMicro(r, false);
        reduction.Deliver(r, {micro, 0, 0}, 7);
        reduction.EndMicro(r, {false, true, true});
      }
      EXPECT_EQ(reduction.Advance().sums.size(), 1u);
    }
    EXPECT_EQ(reduction.micros_summed(), micros);
    EXPECT_FALSE(reduction.all_complete());
    reduction.NameLast(1);
    EXPECT_TRUE(reduction.Advance().complete.empty());  // the first rank's word counts; the caller compares them
    reduction.NameLast(0);
    const ReductionTracker::Progress named = reduction.Advance();
    EXPECT_EQ(Text(named), " complete 0 at 0 complete 1 at - complete 2 at -");
    EXPECT_TRUE(reduction.all_complete());
    EXPECT_EQ(reduction.last_micro(0), micros - 1);
    EXPECT_FALSE(reduction.Wanted(0));
  }
}

TEST(ReductionTrackerTest, AMicroBatchNoLongerKeptCountsAsHeld) {
  ReductionTracker reduction(Large(2, 8));
  reduction.Begin(1);
  for (uint32_t micro = 0; micro < 4; ++micro) {
    ASSERT_TRUE(reduction.MayBegin(micro));
    reduction.BeginMicro(0, micro == 3);
    reduction.Deliver(0, {micro, 0, 0}, 7);
    reduction.EndMicro(0, {false, true});
    reduction.Advance();
  }
  EXPECT_FALSE(reduction.kept(0, 0));
  EXPECT_TRUE(reduction.ended(0, 0));
  EXPECT_EQ(reduction.Delivered(0, 0, 0), std::vector<bool>{true});
  EXPECT_EQ(reduction.Deliver(0, {0, 0, 0}, 8), ReductionTracker::Arrival::kAgain);
  EXPECT_TRUE(reduction.kept(0, 3));
  EXPECT_EQ(reduction.Deliver(0, {3, 0, 0}, 8), ReductionTracker::Arrival::kOther);
  EXPECT_EQ(reduction.Delivered(0, 3, 1), std::vector<bool>{false});
}

size_t AllocatedBytes() {
  const struct mallinfo2 info = mallinfo2();
  return info.uordblks + info.hblkhd;
}

// What malloc gave out for a step in which every rank is as far ahead as it may be.
TEST(ReductionTrackerTest, ItsAccountsTakeNoMoreThanWasPlanned) {
  constexpr uint32_t kRanks = 16, kMicros = 1024;
  constexpr uint64_t kChunks = 20000;
  const ReductionTracker::Options options = Large(kChunks, kMicros);
  const uint64_t copied = 3 * kChunks * sizeof(uint64_t);  // of the options
  const size_t before = AllocatedBytes();
  auto reduction = std::make_unique<ReductionTracker>(options);
  reduction->Begin(kRanks);
  for (uint32_t r = 0; r < kRanks; ++r) {
    for (uint32_t micro = 0; reduction->MayBegin(micro); ++micro) {
      reduction->BeginMicro(r, false);
      if (r > 0) reduction->Deliver(r, {micro, 0, 0}, 7);
      reduction->EndMicro(r, std::vector<bool>(kChunks));
      reduction->Advance();
    }
  }
  const size_t taken = AllocatedBytes() - before;
  const uint64_t planned =
      ReductionTracker::BytesAtMost({.ranks = kRanks, .micros = kMicros, .tensors = kChunks, .chunks = kChunks});
  EXPECT_TRUE(taken == 0 || taken > planned / 2);  // 0: the allocator does not tell, as under a sanitizer
  EXPECT_LE(taken, planned + copied);
}

}  // namespace
}  // namespace ballast
