// Versions and their readers over a store on the CPU: each version has the bits that the store serves when its step has
// closed, however the reader comes by it and whatever changes meanwhile.
#include "server/follow/followers.h"

#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include <algorithm>
#include <deque>
#include <map>
#include <optional>
#include <random>

#include "absl/strings/str_cat.h"
#include "absl/synchronization/mutex.h"
#include "proto/checksum.h"

#include "server/base/clock.h"
#include "server/metrics/metrics.h"
#include "server/store/tensor_digester.h"
#include "tests/server/store/store_fixture.h"

namespace ballast {
namespace {

using ::testing::ElementsAre;
using ::testing::HasSubstr;

// All of a run's weights as they are served, by tensor.
struct Served {
  std::string codes;
  std::vector<float> scales;  // of each row once, where there are some
  bool operator==(const Served&) const = default;
};
using Weights = std::vector<Served>;

// Applies what comes, as a client does, and checks all that it can.
class Reader : public VersionSink {
 public:
  Reader(const RunSpec* spec, Weights weights, std::optional<VersionId> have, std::function<void()> sent)
      : spec_(spec), sent_(std::move(sent)), weights_(std::move(weights)), have_(have) {}

  void Write(const VersionOpening& opening) override {
    absl::MutexLock lock(&mu_);
    EXPECT_FALSE(open_);
    EXPECT_TRUE(!opening.base || opening.base == have_);
    open_ = opening;
    bytes_ = 0;
  }
  void Write(const VersionChunk& chunk) override {
    absl::MutexLock lock(&mu_);
    ASSERT_TRUE(open_);
    const TensorSpec& t = spec_->tensors[chunk.tensor];
    const size_t width = WireBytes(t.serving_format);
    const uint64_t first = ChunkBegin(*spec_, chunk.chunk), last = ChunkEnd(*spec_, t, chunk.chunk);
    Served& served = weights_[chunk.tensor];
    auto* const codes = reinterpret_cast<std::byte*>(served.codes.data());
    const ChangesView view{chunk.position_coding, chunk.value_coding, chunk.count, chunk.positions, chunk.values};
    const auto applied = ApplyChanges(view, width, absl::MakeSpan(codes + first * width, (last - first) * width));
    EXPECT_TRUE(applied.ok()) << applied;
    EXPECT_EQ(Crc32c(BytesOf(absl::StrCat(chunk.positions, chunk.values))), chunk.crc32c);
    const ScaleRange rows = ScalesOf(t, first, last);
    ASSERT_EQ(chunk.scales.size(), rows.size());
    std::copy(chunk.scales.begin(), chunk.scales.end(),
              served.scales.begin() + static_cast<std::ptrdiff_t>(rows.first));
    bytes_ += chunk.bytes();
    EXPECT_EQ(chunk.digest, chunk.last ? DigestOf(*spec_, weights_, chunk.tensor) : 0);
  }
  void Write(const VersionClosing& closing) override {
    absl::MutexLock lock(&mu_);
    EXPECT_EQ(closing.id, open_->id);
    EXPECT_EQ(bytes_, open_->bytes);
    have_ = closing.id;
    came.push_back(absl::StrCat(open_->base ? "+" : "", closing.id.step, open_->skipped > 0 ? "!" : ""));
    changed = closing.changed;
    sent_bytes = bytes_;
    open_.reset();
  }
  bool HasRoom(uint64_t) const override { return parts_++ < 3; }
  bool Send() override {
    parts_ = 0;
    if (ended_) return false;
    if (!held) sent_();
    return true;
  }
  void Finish(absl::Status status) override {
    absl::MutexLock lock(&mu_);
    if (!ended_) ended_ = std::move(status);
  }
  void Cancel() override {}

  // Once it has this version, in the order of came.
  Weights At(uint64_t step) {
    absl::MutexLock lock(&mu_);
    const auto has = [&] { return have_ && have_->step == step && !open_; };
    EXPECT_TRUE(mu_.AwaitWithTimeout(absl::Condition(&has), absl::Minutes(1))) << "version " << step;
    return weights_;
  }
  VersionId have() {
    absl::MutexLock lock(&mu_);
    return *have_;
  }
  std::optional<absl::Status> ended() {
    absl::MutexLock lock(&mu_);
    return ended_;
  }
  void Sent() { sent_(); }

  static absl::Span<const std::byte> BytesOf(absl::string_view bytes) {
    return {reinterpret_cast<const std::byte*>(bytes.data()), bytes.size()};
  }
  static Weights Blank(const RunSpec& spec) {
    Weights weights;
    for (const TensorSpec& t : spec.tensors) {
      weights.push_back({std::string(ServingBytes(t), '\0'), std::vector<float>(ScaleCount(t))});
    }
    return weights;
  }
  static uint64_t DigestOf(const RunSpec& spec, const Weights& weights, uint32_t tensor) {
    TensorDigester digester(&spec.tensors[tensor]);
    digester.Add(BytesOf(weights[tensor].codes), weights[tensor].scales, 0);
    return digester.Digest();
  }

  std::atomic<bool> held = false;  // it takes no message until Sent
  std::vector<std::string> came;   // versions: + as changes, ! after some that were skipped
  uint64_t changed = 0, sent_bytes = 0;

 private:
  const RunSpec* const spec_;
  const std::function<void()> sent_;
  absl::Mutex mu_;
  Weights weights_;
  std::optional<VersionId> have_;
  std::optional<VersionOpening> open_;
  uint64_t bytes_ = 0;
  mutable int parts_ = 0;
  std::optional<absl::Status> ended_;
};

class FollowersTest : public testing::StoreTest {
 protected:
  FollowersTest() : StoreTest(/*threads=*/2) {}

  void Make(const std::string& serving, uint32_t every = 1, uint32_t readers = 9) {
    v1::RunSpec wire =
        testing::MakeSpec("r1", {{"a", {64, 1000}, "fp32"}, {"b", {300}, "fp32"}, {"c", {9, 4096}, "bf16"}});
    if (!serving.empty()) wire.mutable_groups(0)->set_serving(serving);
    wire.mutable_follow()->set_every(every);
    wire.mutable_follow()->set_readers(readers);
    MakeStore(wire);
    run_ = metrics_.AddRun({.run_id = "r1", .followed = true});
    OnStrand([&] {
      followers_ = std::make_unique<Followers>(Followers::Environment{.spec = &spec_,
                                                                      .plan = &plan_,
                                                                      .store = store_.get(),
                                                                      .strand = &strand_,
                                                                      .metrics = run_.get(),
                                                                      .show =
                                                                          [this](const FollowFigures& figures) {
                                                                            absl::MutexLock lock(&mu_);
                                                                            shown_ = figures;
                                                                          },
                                                                      .made = [] {}});
      store_->set_before_change([this](uint32_t tensor) { followers_->BeforeChange(tensor); });
    });
  }
  void TearDown() override {
    readers_.clear();
    store_->WaitIdle();
    OnStrand([&] { followers_.reset(); });
    StoreTest::TearDown();
  }

  // `weights`: what the reader has. It takes no message but the first where it is held.
  std::shared_ptr<Reader> Follow(FollowOrder order = {}, std::optional<Weights> weights = {}, bool held = false) {
    if (!weights) weights = Reader::Blank(spec_);
    auto place = std::make_shared<Reader*>(nullptr);
    const auto reader = std::make_shared<Reader>(&spec_, *weights, order.have, [this, place] {
      strand_.Post([this, place] {
        if (followers_ != nullptr) followers_->OnSent(*place);
      });
    });
    *place = reader.get();
    reader->held = held;
    readers_.push_back(reader);
    OnStrand([&] { followers_->Begin(std::move(order), reader); });
    return reader;
  }
  // As a closed step does, and the idle time after it.
  bool Close(uint64_t step, uint64_t generation = 1) {
    bool wanted = false;
    OnStrand([&] {
      wanted = followers_->Wants(generation, step);
      if (wanted) followers_->Make(generation, step, 1e9 + static_cast<double>(step));
    });
    return wanted;
  }
  void Encode() {
    OnStrand([&] { EncodeMore(); });
  }
  void EncodeMore() {
    followers_->EncodeNext([this] { EncodeMore(); });
  }
  void AwaitMade(uint64_t step, uint64_t generation = 1) {
    absl::MutexLock lock(&mu_);
    const auto made = [&] {
      return shown_.newest && shown_.newest->step == step && shown_.newest->generation == generation;
    };
    ASSERT_TRUE(mu_.AwaitWithTimeout(absl::Condition(&made), absl::Minutes(1))) << "version " << step;
  }
  // A version of what there is now.
  void Version(uint64_t step, uint64_t generation = 1) {
    ASSERT_TRUE(Close(step, generation));
    Encode();
    AwaitMade(step, generation);
  }
  // What the store serves now.
  Weights Look() {
    Weights weights = Reader::Blank(spec_);
    std::deque<WeightPiece> pieces;
    std::vector<std::pair<uint32_t, uint64_t>> places;
    OnStrand([&] {
      for (uint32_t i = 0; i < spec_.tensors.size(); ++i) {
        for (uint64_t c = 0; c < ChunkCount(spec_, spec_.tensors[i]); ++c) {
          places.push_back({i, c});
          pieces.emplace_back();
          store_->EncodeWeights({i, ChunkBegin(spec_, c), ChunkEnd(spec_, spec_.tensors[i], c)}, &pieces.back(),
                                [](const TaskResult&) {});
        }
      }
    });
    store_->WaitIdle();
    for (size_t p = 0; p < places.size(); ++p) {
      const auto [i, c] = places[p];
      const TensorSpec& t = spec_.tensors[i];
      const uint64_t first = ChunkBegin(spec_, c);
      weights[i].codes.replace(first * WireBytes(t.serving_format), pieces[p].data.size(), pieces[p].data);
      const auto to = static_cast<std::ptrdiff_t>(ScalesOf(t, first, ChunkEnd(spec_, t, c)).first);
      std::copy(pieces[p].scales.begin(), pieces[p].scales.end(), weights[i].scales.begin() + to);
    }
    return weights;
  }
  void ChangeNow(uint32_t tensor, uint64_t seed) {
    OnStrand([&] { Change(tensor, seed); });
  }
  // On the strand: some elements of the tensor from `first` on, as little updates do.
  void Nudge(uint32_t tensor, uint64_t seed) {
    OnStrand([&] {
      auto values = std::make_unique<std::vector<float>>(spec_.tensors[tensor].elements);
      for (size_t e = 0; e < values->size(); ++e) {
        (*values)[e] = static_cast<float>((e * 7 + 31 + tensor) % 1009);
        if (e % 97 == seed % 97) (*values)[e] *= 1.01f;
      }
      const auto* in = reinterpret_cast<const std::byte*>(values->data());
      store_->Load({tensor, 0, spec_.tensors[tensor].elements}, kernels::FindWireFormat("fp32"), in,
                   [values = std::move(values)](const TaskResult&) {});
    });
  }

  Metrics metrics_{{}};
  std::unique_ptr<RunMetrics> run_;
  std::unique_ptr<Followers> followers_;
  std::vector<std::shared_ptr<Reader>> readers_;
  absl::Mutex mu_;
  FollowFigures shown_;
};

class FollowFormatsTest : public FollowersTest, public ::testing::WithParamInterface<const char*> {};

TEST_P(FollowFormatsTest, EveryVersionHasTheBitsThatWereServed) {
  Make(GetParam());
  const auto reader = Follow();
  Version(0);
  EXPECT_EQ(reader->At(0), Look());
  std::mt19937_64 random(3);
  for (uint64_t step = 1; step <= 12; ++step) {
    for (uint32_t tensor = 0; tensor < 3; ++tensor) {
      if (random() % 3 > 0) random() % 4 == 0 ? ChangeNow(tensor, step) : Nudge(tensor, random());
    }
    const Weights now = Look();
    Version(step);
    EXPECT_EQ(reader->At(step), now) << step;
  }
  EXPECT_EQ(reader->came.front(), "0");
  EXPECT_GT(std::count_if(reader->came.begin(), reader->came.end(), [](const std::string& v) { return v[0] == '+'; }),
            3);
}

INSTANTIATE_TEST_SUITE_P(Formats, FollowFormatsTest,
                         ::testing::Values("", "bf16", "fp16", "fp8-e4m3", "int8-row", "int8-tensor"));

TEST_F(FollowersTest, WhatChangesAfterTheStepIsNotInItsVersion) {
  Make("bf16");
  const auto reader = Follow();
  Version(0);
  Nudge(0, 1);
  const Weights then = Look();
  ASSERT_TRUE(Close(1));  // and nothing is encoded yet
  for (uint32_t tensor = 0; tensor < 3; ++tensor) ChangeNow(tensor, 9);
  AwaitMade(1);
  EXPECT_EQ(reader->At(1), then);
  const Weights now = Look();
  Version(2);
  EXPECT_EQ(reader->At(2), now);
}

TEST_F(FollowersTest, NothingIsMadeForNobodyOrOfAStepThatIsNotDue) {
  Make("bf16", /*every=*/10);
  EXPECT_FALSE(Close(1));
  const auto reader = Follow();
  Version(1);  // the first reader comes
  EXPECT_FALSE(Close(9));
  Version(11);  // 10 was missed
  EXPECT_FALSE(Close(19));
  Version(5, /*generation=*/2);  // a rewind
  reader->At(5);
  EXPECT_THAT(reader->came, ElementsAre("1", "+11", "+5"));
}

TEST_F(FollowersTest, LittleChangesTakeFewBytesAndNoneNone) {
  Make("bf16");
  const auto reader = Follow();
  ChangeNow(0, 1);
  for (uint32_t tensor = 0; tensor < 3; ++tensor) Nudge(tensor, 0);
  Version(0);
  reader->At(0);
  const uint64_t whole = reader->sent_bytes;
  Nudge(0, 1);
  const Weights now = Look();
  Version(1);
  EXPECT_EQ(reader->At(1), now);
  EXPECT_GT(reader->changed, 900u);
  EXPECT_LT(reader->changed, 1400u);
  EXPECT_LT(reader->sent_bytes * 20, whole);
  Version(2);
  EXPECT_EQ(reader->At(2), now);
  EXPECT_EQ(reader->sent_bytes, 0u);
}

TEST_F(FollowersTest, AReaderThatKnowsItsVersionIsSentWhatHasChangedSince) {
  Make("bf16");
  const auto first = Follow();
  Version(0);
  first->At(0);
  const VersionId had = first->have();
  const Weights had_weights = Look();
  Nudge(1, 1);
  Version(1);
  Nudge(1, 2);
  Version(2);
  first->At(2);

  const auto back = Follow({.have = had}, had_weights);
  EXPECT_EQ(back->At(2), Look());
  EXPECT_THAT(back->came, ElementsAre("+1", "+2"));

  VersionId other = had;
  ++other.epoch;
  std::vector<uint64_t> digests(3);
  const Weights now = Look();
  for (uint32_t i = 0; i < 3; ++i) digests[i] = Reader::DigestOf(spec_, now, i) + (i == 1 ? 1 : 0);
  const auto lost = Follow({.have = other, .digests = digests}, had_weights);
  EXPECT_EQ(lost->At(2), now);
  EXPECT_THAT(lost->came, ElementsAre("2"));
  EXPECT_EQ(lost->sent_bytes, 300 * 2u) << "but for the tensors that it has";
}

TEST_F(FollowersTest, EachReaderHasItsOwnEvery) {
  Make("bf16");
  const auto all = Follow(), some = Follow({.every = 3});
  Weights at6;
  for (uint64_t step = 0; step <= 7; ++step) {
    Nudge(0, step);
    if (step == 6) at6 = Look();
    Version(step);
    all->At(step);
  }
  EXPECT_EQ(some->At(6), at6);
  EXPECT_THAT(some->came, ElementsAre("0", "+1", "+2", "+3", "+4", "+5", "+6"));
}

TEST_F(FollowersTest, ASlowReaderHoldsNobodyUpAndGetsFewerVersions) {
  Make("bf16");
  const auto slow = Follow({}, {}, /*held=*/true);
  const auto quick = Follow();
  for (uint64_t step = 0; step < 8; ++step) {
    for (uint32_t tensor = 0; tensor < 3; ++tensor) ChangeNow(tensor, step + 10);
    const Weights now = Look();
    Version(step);
    EXPECT_EQ(quick->At(step), now);
  }
  EXPECT_TRUE(slow->came.empty());
  slow->held = false;
  slow->Sent();
  EXPECT_EQ(slow->At(7), Look());
  EXPECT_THAT(slow->came, ElementsAre("0", "7!"));
}

TEST_F(FollowersTest, MemoryIsBoundedAndWhoKeepsItTooLongIsEnded) {
  Make("bf16");
  const uint64_t most = FollowMemoryBytes(spec_, plan_);
  std::vector<std::shared_ptr<Reader>> slow;
  uint64_t step = 0;
  const auto quick = Follow();
  for (; step < 3; ++step) {
    for (uint32_t tensor = 0; tensor < 3; ++tensor) ChangeNow(tensor, step + 10);
    Version(step);
    quick->At(step);
    slow.push_back(Follow({}, {}, /*held=*/true));
    OnStrand([&] { EXPECT_LE(followers_->memory_bytes(), most); });
  }
  for (uint32_t tensor = 0; tensor < 3; ++tensor) ChangeNow(tensor, 99);
  EXPECT_FALSE(Close(step)) << "all three are being sent";
  OnStrand([&] { followers_->Tick(MonotonicSeconds()); });
  EXPECT_FALSE(slow[0]->ended());
  OnStrand([&] { followers_->Tick(MonotonicSeconds() + 1000); });
  ASSERT_TRUE(slow[0]->ended());
  EXPECT_THAT(std::string(slow[0]->ended()->message()), HasSubstr("limits.pull_timeout"));
  EXPECT_FALSE(slow[1]->ended()) << "one was enough";
  EXPECT_FALSE(slow[2]->ended()) << "it is sent the newest";
  EXPECT_FALSE(quick->ended());
  const Weights now = Look();
  Version(step);
  EXPECT_EQ(quick->At(step), now);
  OnStrand([&] { EXPECT_LE(followers_->memory_bytes(), most); });
  EXPECT_THAT(metrics_.Serialize(), HasSubstr("ballast_followers_ended_total{reason=\"slow\",run_id=\"r1\"} 1"));
}

TEST_F(FollowersTest, MoreReadersThanTheSpecAllowsAreRefused) {
  Make("bf16", /*every=*/1, /*readers=*/2);
  Follow();
  const auto second = Follow(), third = Follow();
  EXPECT_THAT(std::string(third->ended()->message()), HasSubstr("2 readers follow run 'r1'"));
  EXPECT_EQ(third->ended()->code(), absl::StatusCode::kResourceExhausted);
  OnStrand([&] { followers_->OnGone(second.get()); });
  EXPECT_FALSE(Follow()->ended());
}

TEST_F(FollowersTest, AfterAResetNoVersionIsKnownAnyMore) {
  Make("bf16");
  const auto reader = Follow();
  Version(0);
  reader->At(0);
  OnStrand([&] { followers_->Reset(absl::UnavailableError("replaced")); });
  EXPECT_EQ(reader->ended()->message(), "replaced");
  ChangeNow(0, 5);
  const auto again = Follow({.have = reader->have()});
  Version(0);
  EXPECT_EQ(again->At(0), Look());
  EXPECT_THAT(again->came, ElementsAre("0"));
}

TEST_F(FollowersTest, WhatIsUnderWayMayOutliveThem) {
  Make("bf16");
  const auto reader = Follow();
  ASSERT_TRUE(Close(0));
  Encode();
  OnStrand([&] {
    followers_->End(absl::NotFoundError("deleted"));
    store_->set_before_change(nullptr);
    followers_.reset();
  });
  EXPECT_EQ(reader->ended()->message(), "deleted");
}

}  // namespace
}  // namespace ballast
