#include "server/store/pull_job.h"

#include <algorithm>
#include <deque>
#include <functional>
#include <map>
#include <numeric>
#include <optional>
#include <utility>

#include "absl/strings/str_cat.h"

#include "server/base/clock.h"
#include "server/store/pulls.h"
#include "tests/server/store/store_fixture.h"

namespace ballast {
namespace {

// Takes what it is sent when the test says so.
class SlowReader : public WeightSink {
 public:
  Written WriteWeights(const WeightsChunk& chunk, WeightPiece* piece) override {
    std::string& bytes = tensors[chunk.tensor];
    if (chunk.chunk == 0) {
      bytes.clear();
      ++begun;
    }
    bytes += piece->data;
    ++chunks;
    return Written::kLater;
  }
  void Flush() override { on_chunk(); }
  void TakeBack(WeightPiece*) override {}
  void Finish(absl::Status status) override {
    if (!ended) ended = std::move(status);
    on_end();
  }
  void Cancel() override { ++cancelled; }

  std::map<uint32_t, std::string> tensors;
  int begun = 0, cancelled = 0;
  uint64_t chunks = 0;
  std::optional<absl::Status> ended;
  std::function<void()> on_chunk = [] {}, on_end = [] {};
};

// Takes small ones together, and notes what came with each Flush.
class GatheringReader : public SlowReader {
 public:
  Written WriteWeights(const WeightsChunk& chunk, WeightPiece* piece) override {
    together.back().push_back(chunk);
    std::string& slot = slots[{chunk.tensor, chunk.slot}];
    if (chunk.chunk == 0) slot.clear();
    slot += piece->data;
    written.push_back(piece);
    return SlowReader::WriteWeights(chunk, piece);
  }
  bool gathers() const override { return true; }
  void Flush() override {
    together.emplace_back();
    SlowReader::Flush();
  }
  void TakeBack(WeightPiece* piece) override {
    ASSERT_FALSE(written.empty());
    EXPECT_EQ(piece, written.front()) << "in the order written";
    written.pop_front();
  }

  std::vector<std::vector<WeightsChunk>> together{1};
  std::map<std::pair<uint32_t, StateSlot>, std::string> slots;
  std::deque<WeightPiece*> written;
};

// 70 small tensors, a large one, and two small ones again.
v1::RunSpec ManySmall() {
  v1::RunSpec wire = testing::MakeSpec("r1", {{"large", {64, 1000}, "fp32"}});
  for (int i = 0; i < 72; ++i) {
    v1::TensorSpec* tensor = wire.add_tensors();
    *tensor = wire.tensors(0);
    tensor->set_name(absl::StrCat("small", i));
    tensor->clear_shape();
    tensor->add_shape(3 + i);
  }
  wire.mutable_tensors()->SwapElements(0, 70);
  return wire;
}

std::vector<uint32_t> First(uint32_t count) {
  std::vector<uint32_t> tensors(count);
  std::iota(tensors.begin(), tensors.end(), 0u);
  return tensors;
}

class PullJobTest : public testing::StoreTest {
 protected:
  void SetUp() override { Make("fp32"); }
  void Make(const std::string& serving) {
    if (store_ != nullptr) store_->WaitIdle();
    v1::RunSpec wire = testing::MakeSpec("r1", {{"a", {64, 1000}, "fp32"}, {"b", {300}, "fp32"}});
    if (serving != "fp32") wire.mutable_groups(0)->set_serving(serving);
    MakeStore(wire);
    OnStrand([&] { copies_ = std::make_unique<WeightCopies>(store_.get()); });
  }
  std::shared_ptr<PullJob> Job(std::shared_ptr<WeightSink> reader) {
    return std::make_shared<PullJob>(&spec_, PullSource{.store = store_.get()}, copies_.get(), std::move(reader));
  }
  std::unique_ptr<Pulls> MakePulls() {
    digests_ = std::make_unique<DigestJob>(&spec_, store_.get(), plan_);
    return std::make_unique<Pulls>(Pulls::Environment{
        .spec = &spec_, .store = store_.get(), .digests = digests_.get(), .source_of = [&](uint64_t) {
          return PullSource{.store = store_.get()};
        }});
  }
  void MakeManySmall() {
    store_->WaitIdle();
    MakeStore(ManySmall());
    OnStrand([&] { copies_ = std::make_unique<WeightCopies>(store_.get()); });
  }
  // All of them, by a reader that takes each group at once. between: on the strand, when a group has been written.
  void Read(
      std::vector<uint32_t> tensors, std::vector<StateSlot> slots, const std::shared_ptr<GatheringReader>& reader,
      const std::function<void()>& between = [] {}) {
    const std::shared_ptr<PullJob> job = Job(reader);
    absl::Notification ended;
    reader->ended.reset();
    reader->on_end = [&] { ended.Notify(); };
    reader->on_chunk = [&] {
      strand_.Post([&] {
        between();
        job->OnWritten();
      });
    };
    OnStrand([&] { job->Begin(std::move(tensors), std::move(slots)); });
    ASSERT_TRUE(ended.WaitForNotificationWithTimeout(absl::Seconds(60)));
    OnStrand([] {});
    EXPECT_EQ(*reader->ended, absl::OkStatus());
  }
  // The tensor as it would be served with the weights of this seed.
  std::string Served(uint32_t tensor, uint64_t seed) {
    const TensorSpec& t = spec_.tensors[tensor];
    std::string bytes;
    for (uint64_t k = 0; k < ChunkCount(spec_, t); ++k) {
      WeightPiece piece;
      absl::Notification served;
      OnStrand([&] {
        if (k == 0) Change(tensor, seed);
        store_->EncodeWeights({tensor, ChunkBegin(spec_, k), ChunkEnd(spec_, t, k)}, &piece,
                              [&](const TaskResult&) { served.Notify(); });
      });
      served.WaitForNotification();
      bytes += piece.data;
    }
    return bytes;
  }

  std::unique_ptr<WeightCopies> copies_;
  std::unique_ptr<DigestJob> digests_;
};

// There are two readers: the second waits for the first one's copy.
TEST_F(PullJobTest, AReaderSlowerThanTheUpdatesGetsEachTensorWholeAndOfOneTime) {
  for (const char* serving : {"fp32", "int8-row"}) {
    SCOPED_TRACE(serving);
    Make(serving);
    uint64_t seed = 1, most_chunks = 0;
    int left = 2;
    absl::Notification ended;
    std::vector<std::shared_ptr<SlowReader>> readers;
    std::vector<std::shared_ptr<PullJob>> jobs;
    for (const TensorSpec& t : spec_.tensors) most_chunks += ChunkCount(spec_, t) * (PullJob::kMostRestarts + 2);
    for (int i = 0; i < 2; ++i) {
      readers.push_back(std::make_shared<SlowReader>());
      jobs.push_back(Job(readers[i]));
      readers[i]->on_chunk = [&, i] {
        if (readers[i]->chunks > most_chunks) return jobs[i]->Stop(absl::InternalError("it does not end"));
        strand_.Post([&, job = jobs[i]] {
          Change(0, ++seed);  // ahead of what comes next
          job->OnWritten();
        });
      };
      readers[i]->on_end = [&] {
        if (--left == 0) ended.Notify();
      };
    }
    OnStrand([&] {
      for (const auto& job : jobs) job->Begin({0, 1});
    });
    ASSERT_TRUE(ended.WaitForNotificationWithTimeout(absl::Seconds(60)));
    OnStrand([] {});
    const uint64_t last = seed;
    for (const auto& reader : readers) {
      EXPECT_EQ(*reader->ended, absl::OkStatus());
      EXPECT_LE(reader->begun, PullJob::kMostRestarts + 2 + 1);
      EXPECT_EQ(reader->tensors[1], Served(1, 1));
      bool found = false;
      for (uint64_t s = 1; s <= last && !found; ++s) found = reader->tensors[0] == Served(0, s);
      EXPECT_TRUE(found) << "the weights of no time";
    }
    jobs.clear();
  }
}

TEST_F(PullJobTest, SmallTensorsComeTogetherAndAreWhatTheyAreAlone) {
  MakeManySmall();
  const std::vector<uint32_t> all = First(static_cast<uint32_t>(spec_.tensors.size()));
  for (const std::vector<StateSlot>& slots :
       {std::vector{StateSlot::kWeights}, {StateSlot::kMaster, StateSlot::kMomentum, StateSlot::kUpdates}}) {
    std::map<std::pair<uint32_t, StateSlot>, std::string> alone;
    for (const uint32_t tensor : all) {  // each by a pull of its own
      const auto reader = std::make_shared<GatheringReader>();
      for (const StateSlot slot : slots) {
        Read({tensor}, {slot}, reader);
        alone[{tensor, slot}] = reader->slots[{tensor, slot}];
      }
    }
    const auto reader = std::make_shared<GatheringReader>();
    Read(all, slots, reader);
    EXPECT_EQ(reader->slots, alone);
    EXPECT_TRUE(reader->written.empty());
    std::vector<WeightsChunk> order;
    for (const auto& group : reader->together) {
      const bool large = std::any_of(group.begin(), group.end(), [](const auto& chunk) { return chunk.tensor == 70; });
      EXPECT_LE(group.size(), large ? 1 : kSmallSendBuffers + 1);
      order.insert(order.end(), group.begin(), group.end());
    }
    EXPECT_LT(reader->together.size(), 20 + slots.size() * 20) << "of " << order.size() << " chunks";
    EXPECT_TRUE(
        std::is_sorted(order.begin(), order.end(), [](const auto& a, const auto& b) { return a.tensor < b.tensor; }));
    EXPECT_EQ(std::count_if(order.begin(), order.end(), [](const auto& chunk) { return chunk.last; }),
              static_cast<ptrdiff_t>(all.size()));
  }
}

// Each group is of the time when it was encoded, with the label of that time.
TEST_F(PullJobTest, WhatChangesWhileAGroupIsOnItsWayComesNewInTheNext) {
  MakeManySmall();
  const auto reader = std::make_shared<GatheringReader>();
  Read(First(70), {StateSlot::kWeights}, reader, [&] {
    for (uint32_t i = 0; i < 70; ++i) Change(i, 2);
  });
  ASSERT_GE(reader->together.size(), 3u);
  const uint32_t first = static_cast<uint32_t>(reader->together[0].size());
  for (uint32_t i = 0; i < 70; ++i) EXPECT_EQ(reader->tensors[i], Served(i, i < first ? 1 : 2)) << i;
}

// A tensor whose slots two groups share is sent anew when it changes between them.
TEST_F(PullJobTest, AllSlotsOfATensorAreOfOneTimeAlsoOverTwoGroups) {
  MakeManySmall();
  const auto reader = std::make_shared<GatheringReader>();
  Read(First(70), {StateSlot::kWeights, StateSlot::kMaster}, reader, [&] {
    if (reader->together.size() > 2) return;  // more than the first group has been written
    for (uint32_t i = 0; i < 70; ++i) Change(i, 2);
  });
  ASSERT_EQ(reader->together[0].size() % 2, 1u) << "a tensor lies in two groups";
  const uint32_t cut = reader->together[0].back().tensor;
  EXPECT_EQ(reader->together[1].front().tensor, cut);
  EXPECT_EQ(reader->together[1].front().slot, StateSlot::kWeights) << "it begins anew";
  for (uint32_t i = 0; i < 70; ++i) {
    EXPECT_EQ((reader->slots[{i, StateSlot::kWeights}]), Served(i, i < cut ? 1 : 2)) << i;
    EXPECT_EQ((reader->slots[{i, StateSlot::kMaster}]), (reader->slots[{i, StateSlot::kWeights}])) << "served in fp32";
  }
}

// The time is the test's.
TEST_F(PullJobTest, AReaderThatTakesNothingIsToldSoAndThenCutOff) {
  std::unique_ptr<Pulls> pulls;
  const auto reader = std::make_shared<SlowReader>();
  absl::Notification sent;
  reader->on_chunk = [&] { sent.Notify(); };
  OnStrand([&] {
    pulls = MakePulls();
    pulls->Begin({.tensors = {0}}, reader);
  });
  sent.WaitForNotification();
  OnStrand([&] {
    const double now_s = MonotonicSeconds(), patience_s = spec_.pull_timeout_s;
    pulls->Tick(now_s);
    EXPECT_FALSE(reader->ended);
    pulls->Tick(now_s + patience_s + 1);
    ASSERT_TRUE(reader->ended);
    EXPECT_EQ(reader->ended->code(), absl::StatusCode::kUnavailable);
    pulls->Tick(now_s + patience_s + 2);
    EXPECT_EQ(reader->cancelled, 0);
    pulls->Tick(now_s + 2 * patience_s + 2);
    EXPECT_EQ(reader->cancelled, 1);
    pulls->OnGone(reader.get());
    pulls->Tick(now_s + 3 * patience_s);
    EXPECT_EQ(reader->cancelled, 1);
    pulls.reset();
  });
}

// It has been told the end, behind what it was sent.
TEST_F(PullJobTest, AReaderThatDoesNotReadTheEndIsCutOff) {
  const auto reader = std::make_shared<SlowReader>();
  OnStrand([&] {
    const std::unique_ptr<Pulls> pulls = MakePulls();
    pulls->Begin({.tensors = {}}, reader);
    ASSERT_EQ(reader->ended, absl::OkStatus());
    const double now_s = MonotonicSeconds(), patience_s = spec_.pull_timeout_s;
    pulls->Tick(now_s);
    pulls->Tick(now_s + patience_s - 1);
    EXPECT_EQ(reader->cancelled, 0);
    pulls->Tick(now_s + patience_s + 1);
    EXPECT_EQ(reader->cancelled, 1);
  });
}

// The reader takes a chunk whenever its time is nearly up, while another one waits for a copy.
TEST_F(PullJobTest, ASlowReaderLosesTheCopyThatAnotherWaitsFor) {
  const auto trickling = std::make_shared<SlowReader>(), next = std::make_shared<SlowReader>();
  absl::Notification has_copy, waits, ended;
  uint64_t seed = 1;
  std::unique_ptr<Pulls> pulls;
  const auto read_on = [&](const std::shared_ptr<SlowReader>& reader) {
    Change(0, ++seed);
    pulls->OnWritten(reader.get());
  };
  trickling->on_chunk = [&] {
    strand_.Post([&] {
      if (trickling->begun <= PullJob::kMostRestarts + 1) return read_on(trickling);
      if (!has_copy.HasBeenNotified()) has_copy.Notify();
    });
  };
  next->on_chunk = [&] {
    strand_.Post([&] {
      read_on(next);
      if (next->begun == PullJob::kMostRestarts + 1) waits.Notify();
    });
  };
  next->on_end = [&] { ended.Notify(); };
  OnStrand([&] {
    pulls = MakePulls();
    pulls->Begin({.tensors = {0}}, trickling);
  });
  has_copy.WaitForNotification();
  const double late_s = MonotonicSeconds() + 2 * spec_.pull_timeout_s;
  OnStrand([&] {
    pulls->OnWritten(trickling.get());
    pulls->Tick(late_s);  // it has nothing that it could take
    EXPECT_FALSE(trickling->ended) << "nobody waits for it";
    pulls->Begin({.tensors = {0}}, next);
  });
  waits.WaitForNotification();
  absl::Notification is_sent_more;
  OnStrand([&] {
    trickling->on_chunk = [&] { is_sent_more.Notify(); };
    pulls->OnWritten(trickling.get());
    pulls->Tick(MonotonicSeconds());
    EXPECT_FALSE(trickling->ended) << "it was quick so far";
    pulls->Tick(late_s);
    EXPECT_FALSE(trickling->ended) << "it waits for the daemon";
  });
  is_sent_more.WaitForNotification();
  OnStrand([&] {
    pulls->Tick(late_s);
    ASSERT_TRUE(trickling->ended);
    EXPECT_EQ(trickling->ended->code(), absl::StatusCode::kUnavailable);
  });
  ASSERT_TRUE(ended.WaitForNotificationWithTimeout(absl::Seconds(60)));
  OnStrand([&] {
    EXPECT_EQ(*next->ended, absl::OkStatus());
    pulls.reset();
  });
}

TEST_F(PullJobTest, AReaderThatGoesGivesItsCopyUp) {
  const auto gone = std::make_shared<SlowReader>(), next = std::make_shared<SlowReader>();
  const auto job = Job(gone), other = Job(next);
  absl::Notification ended;
  uint64_t seed = 1;
  gone->on_chunk = [&] {
    strand_.Post([&] {
      Change(0, ++seed);
      if (gone->begun > PullJob::kMostRestarts + 1) return job->Stop(absl::CancelledError("gone"));
      job->OnWritten();
    });
  };
  next->on_chunk = [&] {
    strand_.Post([&] {
      Change(0, ++seed);
      other->OnWritten();
    });
  };
  next->on_end = [&] { ended.Notify(); };
  OnStrand([&] {
    job->Begin({0});
    other->Begin({0});
  });
  ASSERT_TRUE(ended.WaitForNotificationWithTimeout(absl::Seconds(60)));
  OnStrand([&] {
    EXPECT_EQ(*next->ended, absl::OkStatus());
    EXPECT_EQ(gone->ended->code(), absl::StatusCode::kCancelled);
  });
}

}  // namespace
}  // namespace ballast
