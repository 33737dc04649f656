#include "tests/server/step/parts_simulator.h"

#include <algorithm>
#include <utility>

#include "absl/strings/str_cat.h"

#include "tests/server/step/parts_simulator_run.h"

namespace ballast::sim {
namespace {

constexpr uint64_t kFaultyEvents = 1200, kMostFaultyEvents = 5000, kFaultySteps = 4;
constexpr uint64_t kCalmEvents = 60000;  // more than the parts need to come together, and for two steps
constexpr double kTickS = 1;

}  // namespace

const char* PartsKindName(PartsKind kind) {
  constexpr const char* kNames[] = {
      "parts",          "result",       "staged_applied", "staged_skipped", "aborted",   "release_torn",
      "staged_torn",    "cut",          "deaf",           "mute",           "death",     "all_deaths",
      "timeout",        "daemon_death", "older_step",     "part_rewound",   "from_step", "begun_again",
      "closed_besides", "go_back",      "await_aligned",  "discard",        "by_others", "no_common_step"};
  static_assert(std::size(kNames) == static_cast<size_t>(PartsKind::kCount));
  return kNames[static_cast<size_t>(kind)];
}

PartsSimulator::PartsSimulator(const PartsOptions& options, const DrawnRun& run, Timeline* timeline)
    : options_(options),
      timeline_(*timeline),
      ledger_(run.whole.machine.commit == Commit::kStaged),
      patience_s_(run.whole.machine.lease_s + run.whole.machine.rank_timeout_s),
      fault_every_(40 * (1 + Below(&timeline->random, 8))) {
  world_ = {.seed = options.seed,
            .planted = options.planted,
            .staged = run.whole.machine.commit == Commit::kStaged,
            .rewinds_torn = run.rewinds_torn,
            .placement = run.placement,
            .tensor_names = run.whole.machine.tensor_names,
            .timeline = timeline,
            .ledger = &ledger_,
            .listener = this};
  for (uint32_t part = 0; part < run.parts.size(); ++part) {
    Count(PartsKind::kParts);
    SimulatedDaemon::Options of_daemon{run.parts[part], options.make, absl::StrCat("part ", part, " "),
                                       options.listing};
    const PartDaemon::Identity identity{part, run.world, options.seed,
                                        options.planted == Planted::kJudgesByItsOwn && part > 0, run.storage};
    world_.daemons.push_back(std::make_unique<PartDaemon>(std::move(of_daemon), identity, timeline, this));
  }
  for (uint32_t rank = 0; rank < run.world; ++rank) ranks_.emplace_back(&world_, rank);
  for (PartsRank& rank : ranks_) rank.Start(timeline_.Delay(1), /*takeover=*/false);
}

PartsReport PartsSimulator::Run() {
  while (!timeline_.failed() && !world_.over && !Calm()) Advance();
  if (timeline_.failed()) timeline_.report.violation.insert(0, absl::StrCat("parts seed ", options_.seed, ", "));
  return {std::move(timeline_.report.violation), timeline_.report.events, counts_};
}

uint64_t PartsSimulator::last_closed() const {
  uint64_t last = 0;
  for (const auto& daemon : world_.daemons) last = std::max(last, daemon->closed_step());
  return last;
}

bool PartsSimulator::Calm() {
  if (last_step_) {
    return std::all_of(ranks_.begin(), ranks_.end(), [&](const PartsRank& r) { return r.made() >= *last_step_; });
  }
  const bool enough = timeline_.report.events >= kFaultyEvents && last_closed() > kFaultySteps;
  if (enough || timeline_.report.events >= kMostFaultyEvents) {
    last_step_ = last_closed() + 2;
    calm_since_ = timeline_.report.events;
  }
  return false;
}

void PartsSimulator::Fail(const std::string& what) { world_.daemons[0]->FailBy(what); }

void PartsSimulator::Advance() {
  if (!last_step_ && Chance(&timeline_.random, fault_every_)) Fault();
  if (timeline_.empty()) return Fail("deadlock: nothing is under way");
  timeline_.RunNext();
  for (const auto& daemon : world_.daemons) daemon->TakeWhatWaits();
  while (!timeline_.failed() && !timeline_.empty() && timeline_.next_s() > ticked_s_ + kTickS) {
    ticked_s_ += kTickS;
    timeline_.PassTo(ticked_s_);
    for (const auto& daemon : world_.daemons) daemon->Tick();
    for (const auto& daemon : world_.daemons) daemon->TakeWhatWaits();
  }
  if (last_step_ && timeline_.report.events > calm_since_ + kCalmEvents) Fail("the parts make no steps any more");
}

// A rank begins a step everywhere only when all parts have closed the one before.
void PartsSimulator::OnBegun(uint32_t part, uint32_t rank, uint64_t step) {
  for (uint32_t other = 0; other < world_.parts(); ++other) {
    const PartDaemon& daemon = *world_.daemons[other];
    const bool was_taken_back = !daemon.up() || daemon.returns() != ranks_[rank].returns()[other];
    if (was_taken_back || daemon.closed_step() + 1 >= step) continue;
    Fail(absl::StrCat("rank ", rank, " begins step ", step, " on part ", part, ", but part ", other,
                      " has not closed the one before"));
  }
}

PartsReport SimulateParts(const PartsOptions& options) {
  Timeline timeline(options.seed);
  const DrawnRun run = DrawPartsRun(options.seed, &timeline.random);
  return PartsSimulator(options, run, &timeline).Run();
}

}  // namespace ballast::sim
