#include "tests/server/step/step_simulator_mutants.h"

#include <algorithm>
#include <map>
#include <tuple>
#include <utility>

#include "tests/server/step/chunk_sets.h"

namespace ballast::sim {
namespace {

// Alters the effects on their way out.
class OfEffects : public MachineUnderTest {
 public:
  using Alter = void (*)(StepEffects*);
  OfEffects(StepMachineOptions options, Alter alter) : MachineUnderTest(std::move(options)), alter_(alter) {}
  StepEffects Handle(const StepEvent& event, double now_s) override {
    StepEffects effects = MachineUnderTest::Handle(event, now_s);
    alter_(&effects);
    return effects;
  }

 private:
  const Alter alter_;
};

template <class E, class Do>
void ForEach(StepEffects* effects, Do change) {
  for (StepEffect& effect : *effects) {
    if (E* e = std::get_if<E>(&effect)) change(e);
  }
}

template <class E>
void Drop(StepEffects* effects) {
  EraseIf(effects, [](const StepEffect& e) { return std::holds_alternative<E>(e); });
}

template <class E>
void Double(StepEffects* effects) {
  StepEffects doubled;
  for (const StepEffect& effect : *effects) {
    doubled.push_back(effect);
    if (std::holds_alternative<E>(effect)) doubled.push_back(effect);
  }
  *effects = std::move(doubled);
}

void DropRankOfSum(StepEffects* effects) {
  ForEach<effect::Sum>(effects, [](effect::Sum* sum) {
    if (sum->ranks.size() > 1) sum->ranks.pop_back();
  });
}

void NeverZero(StepEffects* effects) {
  EraseIf(effects, [](const StepEffect& e) {
    const auto* sum = std::get_if<effect::Sum>(&e);
    return sum != nullptr && sum->ranks.empty();
  });
}

void ReverseRanks(StepEffects* effects) {
  ForEach<effect::Sum>(effects, [](effect::Sum* sum) { std::reverse(sum->ranks.begin(), sum->ranks.end()); });
}

void BeginEverySum(StepEffects* effects) {
  ForEach<effect::Sum>(effects, [](effect::Sum* sum) { sum->first = true; });
}

void MoveSlab(StepEffects* effects) {
  ForEach<effect::Sum>(effects, [](effect::Sum* sum) { sum->slab.offset /= 2; });
}

void PartialAsApplied(StepEffects* effects) {
  ForEach<effect::Close>(effects, [](effect::Close* close) {
    if (close->outcome == Outcome::kPartial) close->outcome = Outcome::kApplied;
  });
}

void PublishEarly(StepEffects* effects) {
  StepEffects more;
  ForEach<effect::Update>(effects, [&](effect::Update* update) {
    more.push_back(effect::Publish{update->step, update->tensor});
  });
  effects->insert(effects->end(), more.begin(), more.end());
}

void HideWhoIsLeftOut(StepEffects* effects) {
  ForEach<effect::Opened>(effects, [](effect::Opened* opened) { opened->left_out.clear(); });
}

void UpdateBeforeVerdict(StepEffects* effects) {
  StepEffects more;
  ForEach<effect::Judge>(effects, [&](effect::Judge* judge) {
    for (uint32_t i = 0; i < judge->slabs.size(); ++i) {
      if (judge->slabs[i]) more.push_back(effect::Update{judge->step, i, *judge->slabs[i]});
    }
  });
  effects->insert(effects->end(), more.begin(), more.end());
}

void JudgeBeforeMeasured(StepEffects* effects) {
  StepEffects more;
  ForEach<effect::Measure>(effects, [&](effect::Measure* measure) {
    more.push_back(effect::Judge{measure->step, measure->slabs});
  });
  effects->insert(effects->end(), more.begin(), more.end());
}

void TellDiscardedAsMeasured(StepEffects* effects) {
  ForEach<effect::Measured>(effects, [](effect::Measured* measured) { measured->discarded = false; });
}

void DiscardedAsApplied(StepEffects* effects) {
  ForEach<effect::Close>(effects, [](effect::Close* close) {
    if (close->reason == kDiscarded) close->outcome = Outcome::kApplied;
  });
}

// A chunk's sum of one micro-batch comes after that of the next.
class MicrosOutOfOrder : public MachineUnderTest {
 public:
  using MachineUnderTest::MachineUnderTest;
  StepEffects Handle(const StepEvent& event, double now_s) override {
    StepEffects out;
    for (StepEffect& effect : MachineUnderTest::Handle(event, now_s)) {
      auto* sum = std::get_if<effect::Sum>(&effect);
      if (sum != nullptr && sum->id.micro == 0 && machine().reduction().last_micro(0).value_or(1) > 0) {
        late_[{sum->id.tensor, sum->id.chunk}] = *sum;
        continue;
      }
      out.push_back(effect);
      if (sum == nullptr) continue;
      if (const auto late = late_.find({sum->id.tensor, sum->id.chunk}); late != late_.end()) {
        out.push_back(late->second);
        late_.erase(late);
      }
    }
    return out;
  }

 private:
  std::map<std::pair<uint32_t, uint64_t>, effect::Sum> late_;
};

// Takes the device to have answered a measure when it has been asked.
class MeasuresInNoTime : public MachineUnderTest {
 public:
  using MachineUnderTest::MachineUnderTest;
  StepEffects Handle(const StepEvent& event, double now_s) override {
    StepEffects effects = MachineUnderTest::Handle(event, now_s);
    std::optional<uint64_t> asked;
    ForEach<effect::Measure>(&effects, [&](effect::Measure* measure) { asked = measure->step; });
    if (!asked) return effects;
    for (StepEffect& more : MachineUnderTest::Handle(event::Measured{*asked}, now_s)) effects.push_back(more);
    return effects;
  }
};

// Drops the rank's contributions, and makes the step of the others'.
class DiscardsForOneRank : public MachineUnderTest {
 public:
  using MachineUnderTest::MachineUnderTest;
  StepEffects Handle(const StepEvent& event, double now_s) override {
    const auto* end = std::get_if<event::StepEnd>(&event);
    if (end == nullptr || !end->discard) return MachineUnderTest::Handle(event, now_s);
    return MachineUnderTest::Handle(event::StepEnd{end->session, end->content}, now_s);
  }
};

// Believes that a micro-batch which is not announced as the last is followed by another.
class WaitsForTheNextMicroBatch : public MachineUnderTest {
 public:
  using MachineUnderTest::MachineUnderTest;
  StepEffects Handle(const StepEvent& event, double now_s) override {
    const auto* end = std::get_if<event::StepEnd>(&event);
    const auto rank = end == nullptr ? std::nullopt : machine().RankOf(end->session);
    const bool open = rank && machine().InStep(*rank) && !end->discard && !machine().reduction().last_micro(*rank);
    return open ? StepEffects() : MachineUnderTest::Handle(event, now_s);
  }
};

class LosesSlabs : public MachineUnderTest {
 public:
  using MachineUnderTest::MachineUnderTest;
  StepEffects Handle(const StepEvent& event, double now_s) override {
    const auto* applied = std::get_if<event::TensorApplied>(&event);
    if (applied == nullptr) return MachineUnderTest::Handle(event, now_s);
    return MachineUnderTest::Handle(
        event::TensorApplied{applied->step, applied->tensor, {.offset = applied->slab.offset, .bytes = 0}}, now_s);
  }
};

class WaitsForEver : public MachineUnderTest {
 public:
  explicit WaitsForEver(StepMachineOptions options) : MachineUnderTest(Patient(std::move(options))) {}

 private:
  static StepMachineOptions Patient(StepMachineOptions options) {
    options.step_timeout_s = 0;
    return options;
  }
};

class WantsNothing : public MachineUnderTest {
 public:
  using MachineUnderTest::MachineUnderTest;
  std::optional<ChunkId> Offer(uint32_t, bool) override { return std::nullopt; }
};

class BlamesWhoWaits : public MachineUnderTest {
 public:
  using MachineUnderTest::MachineUnderTest;
  std::optional<ChunkId> Offer(uint32_t rank, bool short_of_credit) override {
    const auto wanted = MachineUnderTest::Offer(rank, short_of_credit);
    MachineUnderTest::Offer(rank, /*short_of_credit=*/false);
    return wanted;
  }
};

// Holds ranks to blame for time in which the daemon was stopped.
class CountsItsOwnSleep : public MachineUnderTest {
 public:
  explicit CountsItsOwnSleep(StepMachineOptions options) : MachineUnderTest(Sleepy(std::move(options))) {}

 private:
  static StepMachineOptions Sleepy(StepMachineOptions options) {
    options.counted_tick_s = 1e9;
    return options;
  }
};

// Takes the rank for told as long as it has not sent what it was told, though the chunk is summed without it.
class OffersOnce : public MachineUnderTest {
 public:
  using MachineUnderTest::MachineUnderTest;
  StepEffects Handle(const StepEvent& event, double now_s) override {
    StepEffects effects = MachineUnderTest::Handle(event, now_s);
    if (const auto* opened = std::get_if<event::StreamOpened>(&event)) {
      if (const auto rank = machine().RankOf(opened->session)) told_.erase(*rank);
    }
    ForEach<effect::Hold>(&effects, [&](effect::Hold* hold) {
      if (const auto told = told_.find(hold->rank); told != told_.end() && told->second == hold->id) told_.erase(told);
    });
    ForEach<effect::Forget>(&effects, [&](effect::Forget* forget) { told_.erase(forget->rank); });
    ForEach<effect::Close>(&effects, [&](effect::Close*) { told_.clear(); });
    ForEach<effect::Discard>(&effects, [&](effect::Discard*) { told_.clear(); });
    return effects;
  }
  std::optional<ChunkId> Offer(uint32_t rank, bool short_of_credit) override {
    if (told_.count(rank) > 0) return std::nullopt;
    const auto wanted = MachineUnderTest::Offer(rank, short_of_credit);
    if (wanted) told_[rank] = *wanted;
    return wanted;
  }

 private:
  std::map<uint32_t, ChunkId> told_;  // by rank
};

// Takes every repetition for the same bytes.
class BelievesCrcs : public MachineUnderTest {
 public:
  using MachineUnderTest::MachineUnderTest;
  StepEffects Handle(const StepEvent& event, double now_s) override {
    const auto* chunk = std::get_if<event::Chunk>(&event);
    if (chunk == nullptr) return MachineUnderTest::Handle(event, now_s);
    event::Chunk altered = *chunk;
    const auto key = std::tuple(chunk->session, machine().step(), chunk->micro, chunk->tensor, chunk->chunk);
    altered.crc = crcs_.emplace(key, chunk->crc).first->second;
    return MachineUnderTest::Handle(altered, now_s);
  }

 private:
  std::map<std::tuple<SessionId, uint64_t, uint32_t, uint32_t, uint64_t>, uint32_t> crcs_;
};

// Lets sessions of before a rewind go on.
class RewindsInSilence : public MachineUnderTest {
 public:
  using MachineUnderTest::MachineUnderTest;
  StepEffects Handle(const StepEvent& event, double now_s) override {
    StepEffects effects = MachineUnderTest::Handle(event, now_s);
    if (std::holds_alternative<event::Rewind>(event)) Drop<effect::Fence>(&effects);
    return effects;
  }
};

// Takes ranks that no process has attached to for ones that were lost.
class TakesSlowForLost : public MachineUnderTest {
 public:
  using MachineUnderTest::MachineUnderTest;
  StepEffects Handle(const StepEvent& event, double now_s) override {
    const auto* attach = std::get_if<event::Attach>(&event);
    const uint32_t world = machine().world();
    StepEffects effects = MachineUnderTest::Handle(event, now_s);
    if (attach != nullptr && machine().world() != world) ComeAndGo(*attach, now_s);
    return effects;
  }

 private:
  void ComeAndGo(event::Attach other, double now_s) {
    const uint32_t first = other.rank;
    for (other.rank = 0; other.rank < other.world; ++other.rank) {
      if (other.rank == first) continue;
      other.session = SessionId{(uint64_t{1} << 40) + other.rank};
      MachineUnderTest::Handle(other, now_s);
      MachineUnderTest::Handle(event::StreamClosed{other.session, /*clean=*/true}, now_s);
    }
  }
};

// Takes ranks that contribute to part of a chunk for ones that contribute to all of it.
class TakesPartsForWhole : public MachineUnderTest {
 public:
  explicit TakesPartsForWhole(StepMachineOptions options)
      : MachineUnderTest(options), chunks_(std::move(options.reduction.chunks)) {}
  StepEffects Handle(const StepEvent& event, double now_s) override {
    const auto* attach = std::get_if<event::Attach>(&event);
    if (attach == nullptr || attach->coverage.contributes.empty()) return MachineUnderTest::Handle(event, now_s);
    event::Attach altered = *attach;
    altered.coverage.contributes = testing::WithoutParts(attach->coverage.contributes, chunks_);
    return MachineUnderTest::Handle(altered, now_s);
  }

 private:
  const std::vector<uint64_t> chunks_;
};

// Has the device's answers to updates of before a rewind counted as the new step's.
class BelievesThePast : public MachineUnderTest {
 public:
  using MachineUnderTest::MachineUnderTest;
  StepEffects Handle(const StepEvent& event, double now_s) override {
    StepEffects effects = MachineUnderTest::Handle(event, now_s);
    const auto* applied = std::get_if<event::TensorApplied>(&event);
    if (applied != nullptr && effects.empty()) effects.push_back(effect::Publish{applied->step, applied->tensor});
    return effects;
  }
};

template <class M>
Mutant Of(std::string name) {
  return {std::move(name), [](StepMachineOptions options) { return std::make_unique<M>(std::move(options)); }};
}

Mutant Altering(std::string name, OfEffects::Alter alter) {
  return {std::move(name),
          [alter](StepMachineOptions options) { return std::make_unique<OfEffects>(std::move(options), alter); }};
}

}  // namespace

std::unique_ptr<MachineUnderTest> MakePlain(StepMachineOptions options) {
  return std::make_unique<MachineUnderTest>(std::move(options));
}

std::vector<Mutant> Mutants() {
  return {Altering("DropsARankOfASum", DropRankOfSum),
          Altering("LeavesGapsUnwritten", NeverZero),
          Altering("SumsRanksInReverse", ReverseRanks),
          Altering("BeginsEverySum", BeginEverySum),
          Altering("OverlapsSlabs", MoveSlab),
          Altering("UpdatesTwice", Double<effect::Update>),
          Altering("ClosesTwice", Double<effect::Close>),
          Altering("ClosesPartialAsApplied", PartialAsApplied),
          Altering("PublishesBeforeApplied", PublishEarly),
          Altering("UpdatesBeforeTheVerdict", UpdateBeforeVerdict),
          Altering("MeasuresTwice", Double<effect::Measure>),
          Altering("LosesTheNorm", Drop<effect::Measured>),
          Altering("TellsTheNormTwice", Double<effect::Measured>),
          Altering("TellsDiscardedAsMeasured", TellDiscardedAsMeasured),
          Altering("JudgesBeforeMeasured", JudgeBeforeMeasured),
          Altering("HoldsWhatIsDiscarded", Drop<effect::Abandon>),
          Altering("ClosesDiscardedAsApplied", DiscardedAsApplied),
          Altering("HidesWhoIsLeftOut", HideWhoIsLeftOut),
          Altering("LeavesOutInSilence", Drop<effect::LeftOut>),
          Altering("LosesResults", Drop<effect::Result>),
          Altering("LosesWeights", Drop<effect::Publish>),
          Altering("KeepsWhatItForgot", Drop<effect::Forget>),
          Of<MicrosOutOfOrder>("SumsMicrosOutOfOrder"),
          Of<MeasuresInNoTime>("MeasuresInNoTime"),
          Of<DiscardsForOneRank>("DiscardsForOneRank"),
          Of<WaitsForTheNextMicroBatch>("WaitsForTheNextMicroBatch"),
          Of<LosesSlabs>("LosesSlabs"),
          Of<WaitsForEver>("WaitsForEver"),
          Of<WantsNothing>("WantsNothing"),
          Of<BlamesWhoWaits>("BlamesWhoWaits"),
          Of<CountsItsOwnSleep>("CountsItsOwnSleep"),
          Of<OffersOnce>("OffersOnce"),
          Of<BelievesCrcs>("AcknowledgesAnotherCrc"),
          Of<TakesSlowForLost>("TakesSlowForLost"),
          Of<RewindsInSilence>("RewindsInSilence"),
          Of<TakesPartsForWhole>("TakesPartsForWhole"),
          Of<BelievesThePast>("PublishesOfBeforeARewind")};
}

}  // namespace ballast::sim
