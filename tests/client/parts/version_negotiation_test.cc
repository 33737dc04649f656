// How the readers of a run's parts come to the same version: case by case, and with daemons that are drawn.
#include "client/cpp/parts/version_negotiation.h"

#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include <deque>
#include <ostream>
#include <random>
#include <set>

#include "absl/strings/str_cat.h"

namespace ballast {

void PrintTo(const VersionNegotiation::Order& order, std::ostream* out) {
  *out << "part " << order.part << " from " << (order.from ? absl::StrCat(*order.from) : "any") << " every "
       << order.every;
}

namespace {

using ::testing::ElementsAre;
using ::testing::IsEmpty;
using Decision = VersionNegotiation::Decision;
using Order = VersionNegotiation::Order;
using Standing = VersionNegotiation::Standing;
using Timeline = VersionNegotiation::Timeline;

v1::VersionId Id(uint64_t step, uint64_t generation = 1, uint64_t epoch = 9) {
  v1::VersionId id;
  id.set_step(step);
  id.set_generation(generation);
  id.set_epoch(epoch);
  return id;
}

Standing Has(uint64_t step) { return {.here = Id(step), .handed = Id(step)}; }
Standing Offers(v1::VersionId id, uint64_t has) { return {.offered = id, .here = Id(has), .handed = Id(has)}; }
const Timeline kNow = {.generation = 1, .epoch = 9};

TEST(VersionNegotiationTest, NothingIsDecidedBeforeAllHaveSomething) {
  VersionNegotiation negotiation(2, 0);
  EXPECT_FALSE(negotiation.WantsTimelines({{}, {.here = Id(3)}}));
  EXPECT_FALSE(negotiation.WantsTimelines({Has(3), Has(3)})) << "nothing new";
  EXPECT_FALSE(negotiation.WantsTimelines({Offers(Id(4), 3), Has(3)})) << "the other one is on its way";
  EXPECT_FALSE(negotiation.WantsTimelines({Offers(Id(2, 2), 3), Has(3)})) << "likewise, back";
}

TEST(VersionNegotiationTest, TheSameStepOfAllIsAgreedOn) {
  VersionNegotiation negotiation(3, 0);
  const std::vector<Standing> all = {Offers(Id(4), 3), {.here = Id(4), .handed = Id(3)}, Offers(Id(4), 2)};
  ASSERT_TRUE(negotiation.WantsTimelines(all));
  const Decision decision = negotiation.Decide(all, {kNow, kNow, kNow});
  EXPECT_TRUE(decision.agreed);
  EXPECT_THAT(decision.orders, IsEmpty());
}

TEST(VersionNegotiationTest, WeightsThatAreReplacedOnOneDaemonAreAVersionOfTheSameStep) {
  VersionNegotiation negotiation(2, 0);
  const std::vector<Standing> all = {Offers(Id(3, 2, 10), 3), Has(3)};
  ASSERT_TRUE(negotiation.WantsTimelines(all));
  EXPECT_TRUE(negotiation.Decide(all, {{.generation = 2, .epoch = 10}, kNow}).agreed);
}

TEST(VersionNegotiationTest, WhatWasUndoneIsNotAgreedOn) {
  VersionNegotiation negotiation(2, 0);
  const std::vector<Standing> all = {Offers(Id(4), 3), Offers(Id(4, 2), 3)};
  ASSERT_TRUE(negotiation.WantsTimelines(all));
  for (const Timeline& first : {Timeline{.generation = 2, .epoch = 9}, Timeline{.generation = 1, .epoch = 10},
                                Timeline{.generation = 1, .epoch = std::nullopt}}) {
    const Decision decision = negotiation.Decide(all, {first, {.generation = 2, .epoch = 9}});
    EXPECT_FALSE(decision.agreed);
    EXPECT_THAT(decision.orders, ElementsAre(Order{.part = 0, .every = 1}));
  }
}

TEST(VersionNegotiationTest, WhoIsBehindGoesOnToWhoIsFurthest) {
  VersionNegotiation negotiation(2, 0);
  const std::vector<Standing> all = {Offers(Id(4), 3), Offers(Id(6), 3)};
  ASSERT_TRUE(negotiation.WantsTimelines(all));
  const Decision decision = negotiation.Decide(all, {kNow, kNow});
  EXPECT_FALSE(decision.agreed);
  EXPECT_THAT(decision.orders, ElementsAre(Order{.part = 0, .from = 6, .every = 1}));
  EXPECT_TRUE(negotiation.strict());
}

TEST(VersionNegotiationTest, WhoMissEachOtherAgainMeetFurtherAhead) {
  VersionNegotiation negotiation(2, 3);
  negotiation.Decide({Offers(Id(4), 3), Offers(Id(6), 3)}, {kNow, kNow});
  Decision decision = negotiation.Decide({Offers(Id(7), 3), Offers(Id(6), 3)}, {kNow, kNow});
  EXPECT_THAT(decision.orders, ElementsAre(Order{0, 12, 6}, Order{1, 12, 6}));
  decision = negotiation.Decide({Offers(Id(12), 3), Offers(Id(14), 3)}, {kNow, kNow});
  EXPECT_THAT(decision.orders, ElementsAre(Order{0, 24, 12}, Order{1, 24, 12}));
  ASSERT_TRUE(negotiation.Decide({Offers(Id(24), 3), Offers(Id(24), 3)}, {kNow, kNow}).agreed);
  EXPECT_THAT(negotiation.OnHandedOut(), ElementsAre(Order{0, std::nullopt, 12}, Order{1, std::nullopt, 12}));
  EXPECT_THAT(negotiation.OnHandedOut(), IsEmpty());
}

TEST(VersionNegotiationTest, ACalmRunIsFollowedMoreCloselyAgain) {
  VersionNegotiation negotiation(2, 1);
  for (int i = 0; i < 3; ++i) negotiation.Decide({Offers(Id(4), 3), Offers(Id(6), 3)}, {kNow, kNow});
  std::vector<uint64_t> strides;
  for (int i = 0; i < 40; ++i) {
    for (const Order& order : negotiation.OnHandedOut()) {
      if (order.part == 0) strides.push_back(order.every);
    }
  }
  EXPECT_THAT(strides, ElementsAre(4, 2, 1));
  EXPECT_FALSE(negotiation.strict());
}

TEST(VersionNegotiationTest, ARunAtRestIsFollowedToItsLastStep) {
  VersionNegotiation negotiation(2, 1);
  for (int i = 0; i < 3; ++i) negotiation.Decide({Offers(Id(4), 3), Offers(Id(6), 3)}, {kNow, kNow});
  EXPECT_THAT(negotiation.Relax({Offers(Id(4), 3), Has(3)}),
              ElementsAre(Order{0, std::nullopt, 1}, Order{1, std::nullopt, 1}));
  EXPECT_THAT(negotiation.Relax({Offers(Id(4), 3), Standing()}), ElementsAre(Order{0, std::nullopt, 1}));
  EXPECT_FALSE(negotiation.strict());
}

// Neither a rewind nor a version that came whole, and was broken off, leaves a part waiting for a step that nobody else waits for,
// and a run at rest does not come to.
TEST(VersionNegotiationTest, WhatPartsWereToldIsTakenBack) {
  VersionNegotiation negotiation(2, 1);
  for (int i = 0; i < 2; ++i) negotiation.Decide({Offers(Id(4), 3), Offers(Id(6), 3)}, {kNow, kNow});
  const Timeline then = {.generation = 2, .epoch = 9};
  ASSERT_TRUE(negotiation.Decide({Offers(Id(2, 2), 3), Offers(Id(2, 2), 3)}, {then, then}).agreed);
  EXPECT_TRUE(negotiation.strict());
  EXPECT_THAT(negotiation.OnHandedOut(), ElementsAre(Order{0, std::nullopt, 1}, Order{1, std::nullopt, 1}));
  EXPECT_FALSE(negotiation.strict());

  for (int i = 0; i < 2; ++i) negotiation.Decide({Offers(Id(4, 2), 2), Offers(Id(6, 2), 2)}, {then, then});
  EXPECT_THAT(negotiation.Relax({Offers(Id(4, 2), 2), Standing()}),
              ElementsAre(Order{0, std::nullopt, 1}, Order{1, std::nullopt, 1}));
  EXPECT_FALSE(negotiation.strict());
}

// A daemon with one part, and its reader, in ticks: a step closes in each, or the run rests. What a test draws: how long it
// takes to make a version, and for how long the reader's requests are on their way.
class DrawnDaemon {
 public:
  DrawnDaemon(std::mt19937_64* random, int making, int telling)
      : random_(*random), making_(making), telling_(telling) {}

  void Close(uint64_t step, uint64_t generation) {
    if (made_at_ == now_) {
      version_ = *std::exchange(made_, std::nullopt);
      made_at_ = -1;
    }
    if (asked_at_ == now_) {
      asked_at_ = -1;
      request_ = asked_;
    }
    now_id_ = Id(step, generation);
    if (!made_ && Wants(now_id_)) {
      made_ = now_id_;
      made_at_ = now_ + 1 + static_cast<int>(random_() % static_cast<uint64_t>(making_));
    }
    if (asked_at_ < 0 && version_ && !standing.offered && Wants(*version_)) {
      (standing.here ? standing.offered : standing.here) = version_;
      request_.have = version_;
    }
    ++now_;
  }
  void Tell(const Order& order) {
    const uint64_t generation = (standing.offered ? standing.offered : standing.here)->generation();
    standing.offered.reset();
    asked_ = {.have = standing.here, .every = order.every};
    if (order.from && generation != standing.here->generation()) {
      asked_ = {.have = Id(0, generation), .every = *order.from};
    } else if (order.from && *order.from > standing.here->step()) {
      asked_.every = std::max(asked_.every, *order.from - standing.here->step());
    }
    asked_at_ = now_ + static_cast<int>(random_() % static_cast<uint64_t>(telling_));
  }
  Timeline Now() const { return {.generation = now_id_.generation(), .epoch = 9}; }

  Standing standing;

 private:
  struct Request {
    std::optional<v1::VersionId> have = {};
    uint64_t every = 1;
  };
  // As FollowJob::WantsAfter.
  bool Wants(const v1::VersionId& id) const {
    if (!request_.have) return true;
    if (id.generation() != request_.have->generation()) return id.generation() > request_.have->generation();
    return id.step() >= request_.have->step() + request_.every;
  }

  std::mt19937_64& random_;
  const int making_, telling_;
  int now_ = 0, made_at_ = -1, asked_at_ = -1;
  v1::VersionId now_id_;
  std::optional<v1::VersionId> made_, version_;
  Request request_, asked_;
};

class DrawnRun {
 public:
  explicit DrawnRun(uint64_t seed) : random_(seed), negotiation_(2 + seed % 3, /*every=*/1 + seed % 2) {
    for (size_t p = 0; p < 2 + seed % 3; ++p) {
      daemons_.emplace_back(&random_, 1 + static_cast<int>(random_() % 12), 1 + static_cast<int>(random_() % 6));
    }
  }
  // One step of the run, or a rewind of it.
  void Tick(bool rewinds) {
    if (rewinds) {
      step_ -= std::min<uint64_t>(step_, 5);
      ++generation_;
    } else {
      ++step_;
    }
    for (DrawnDaemon& daemon : daemons_) daemon.Close(step_, generation_);
    Negotiate();
  }
  // None is made for long. Readers wait for what they were told, and then go on to what there is.
  void Rest() {
    for (int tick = 0; tick < 160; ++tick) {
      for (DrawnDaemon& daemon : daemons_) daemon.Close(step_, generation_);
      Negotiate();
      if (tick % 40 == 39) Relax();
    }
  }
  uint64_t step() const { return step_; }
  std::vector<v1::VersionId> handed;

 private:
  std::vector<Standing> Standings() const {
    std::vector<Standing> all;
    for (const DrawnDaemon& daemon : daemons_) all.push_back(daemon.standing);
    return all;
  }
  void Relax() {
    const std::vector<Standing> all = Standings();
    const bool waits = std::any_of(all.begin(), all.end(), [](const Standing& part) { return part.offered; });
    if (!waits && !negotiation_.strict()) return;
    for (const Order& order : negotiation_.Relax(all)) daemons_[order.part].Tell(order);
  }
  void Negotiate() {
    const std::vector<Standing> all = Standings();
    std::vector<Timeline> now;
    for (const DrawnDaemon& daemon : daemons_) now.push_back(daemon.Now());
    if (!negotiation_.WantsTimelines(all)) return;
    const Decision decision = negotiation_.Decide(all, now);
    for (const Order& order : decision.orders) daemons_[order.part].Tell(order);
    if (!decision.agreed) return;
    std::set<uint64_t> steps;
    for (DrawnDaemon& daemon : daemons_) {
      Standing& standing = daemon.standing;
      if (standing.offered) standing.here = std::exchange(standing.offered, std::nullopt);
      standing.handed = standing.here;
      steps.insert(standing.here->step());
      ASSERT_EQ(standing.here->generation(), generation_);
    }
    ASSERT_EQ(steps.size(), 1u);
    handed.push_back(*daemons_[0].standing.here);
    for (const Order& order : negotiation_.OnHandedOut()) daemons_[order.part].Tell(order);
  }

  std::mt19937_64 random_;
  VersionNegotiation negotiation_;
  std::deque<DrawnDaemon> daemons_;
  uint64_t step_ = 10, generation_ = 1;
};

TEST(VersionNegotiationTest, DaemonsOfAnyPaceComeTogether) {
  for (uint64_t seed = 0; seed < 300; ++seed) {
    DrawnRun run(seed);
    const uint64_t every = 1 + seed % 2;
    for (int tick = 0; tick < 2000; ++tick) {
      run.Tick(/*rewinds=*/tick % 400 == 399);
      if (tick % 200 != 199) continue;
      run.Rest();
      ASSERT_FALSE(run.handed.empty());
      EXPECT_GT(run.handed.back().step() + every, run.step()) << "seed " << seed << ", tick " << tick;
    }
    EXPECT_GE(run.handed.size(), 20u) << "seed " << seed;
    ASSERT_FALSE(run.handed.empty());
    EXPECT_EQ(run.handed.back().generation(), 6u) << "seed " << seed;
    for (size_t i = 1; i < run.handed.size(); ++i) {
      const auto &before = run.handed[i - 1], &after = run.handed[i];
      EXPECT_TRUE(after.generation() > before.generation() || after.step() > before.step()) << "seed " << seed;
    }
    if (HasFailure()) return;
  }
}

}  // namespace
}  // namespace ballast
