#include <algorithm>
#include <utility>

#include "absl/strings/str_cat.h"

#include "tests/server/step/step_simulator_world.h"

namespace ballast::sim {
namespace {

constexpr uint64_t kFaultyEvents = 500, kMostFaultyEvents = 2500, kFaultySteps = 4;
constexpr uint64_t kCalmEvents = 40000;  // more than any two steps take
constexpr double kTickS = 1;

}  // namespace

Simulator::Simulator(const SimulatorOptions& options, RunShape shape, uint32_t world, Timeline* timeline)
    : SimulatedDaemon({.shape = std::move(shape), .make = options.make, .listing = options.listing}, timeline),
      options_(options),
      world_(world),
      fault_every_((world > 6 ? 200 : 15) * (1 + Below(&timeline->random, 6))) {
  Populate();
}

SimulatorReport Simulator::Run() {
  while (!timeline_.failed() && !Calm()) Advance();
  if (timeline_.failed()) timeline_.report.violation.insert(0, absl::StrCat("seed ", options_.seed, ", "));
  return std::move(timeline_.report);
}

// Whether the last step of the calm has closed.
bool Simulator::Calm() {
  const uint64_t step = machine().step();
  if (last_step_) return step > *last_step_;
  const bool enough = timeline_.report.events >= kFaultyEvents && step > kFaultySteps;
  if (enough || timeline_.report.events >= kMostFaultyEvents) {
    last_step_ = step + 1;
    calm_since_ = timeline_.report.events;
  }
  return false;
}

void Simulator::Advance() {
  if (!last_step_ && Chance(&timeline_.random, fault_every_)) Fault();
  if (timeline_.empty()) return Fail("deadlock: nothing is under way, and the step is open");
  timeline_.RunNext();
  TakeParked();
  while (!timeline_.failed() && !timeline_.empty() && timeline_.next_s() > ticked_s_ + kTickS) {
    timeline_.PassTo(ticked_s_ + kTickS);
    Tick();
    TakeParked();
  }
  if (last_step_ && timeline_.report.events > calm_since_ + kCalmEvents) Fail("no step closes any more");
}

void Simulator::Populate() {
  places_.clear();
  places_.resize(std::max<size_t>(world_, 6));  // the machine may speak of the former world's ranks
  for (uint32_t rank = 0; rank < world_; ++rank) Start(rank, Delay(1), /*takeover=*/false);
}

// A new process comes up, whatever was there before.
void Simulator::Start(uint32_t rank, double delay_s, bool takeover) {
  Place& place = places_[rank];
  place.client.reset();
  place.epoch = 0;
  place.hook_pending = false;
  place.process = timeline_.NewNumber();
  After(delay_s, [this, rank, process = place.process, takeover] { Attach(rank, process, takeover); });
}

void Simulator::Attach(uint32_t rank, uint64_t process, bool takeover) {
  if (places_[rank].process != process || places_[rank].epoch != 0) return;
  const auto& client = places_[rank].client;
  const auto token = client != nullptr ? client->session : std::nullopt;
  const StepEffects effects = Handle(event::Attach{
      SessionId{timeline_.NewNumber()}, token, takeover, rank, world_, {shape_.CoverageOf(rank, world_), {}}});
  if (timeline_.failed()) return;
  if (const auto* reject = std::get_if<effect::Reject>(&effects.front())) {
    OnAttachRefused(rank, *reject, takeover);
  } else {
    const auto& attached = std::get<effect::Attached>(effects.back());
    OnAttached(rank, attached.resumed, attached.session);
  }
}

void Simulator::OnAttachRefused(uint32_t rank, const effect::Reject& reject, bool takeover) {
  if (places_[rank].client != nullptr) return Start(rank, Delay(0.5), /*takeover=*/false);  // its session is over
  const double wait_s = reject.retry_after_s > 0 ? reject.retry_after_s : 1;
  After(wait_s + Delay(0.1),
        [this, rank, process = places_[rank].process, takeover] { Attach(rank, process, takeover); });
}

void Simulator::OnAttached(uint32_t rank, bool resumed, SessionId session) {
  Place& place = places_[rank];
  Count(resumed ? Kind::kResume : Kind::kAttach);
  if (resumed) {
    place.client->Resume(machine(), rank, place.held);
  } else {
    const SimulatedRank::Identity identity{place.process, options_.seed, rank, world_, Chance(&timeline_.random, 10)};
    if (identity.slow) Count(Kind::kSlowRank);
    place.client = std::make_unique<SimulatedRank>(shape_, identity, machine().step(), &timeline_.random,
                                                   &timeline_.report.counts);
    place.client->session = session;
    std::vector<uint64_t> weights;
    for (uint32_t i = 0; i < shape_.machine.tensor_names.size(); ++i) weights.push_back(checker_->version(i));
    place.client->Pull(std::move(weights));
  }
  Connect(rank);
}

// The daemon ended the stream: the session is over, a new process starts.
void Simulator::OnEnded(uint32_t rank, uint64_t epoch, const absl::Status&) {
  Start(rank, Delay(1), /*takeover=*/false);
  Lose(rank, epoch);
}

void Simulator::OnResult(uint32_t rank, uint64_t step, SimulatedRank* client) {
  if (step > client->step()) {
    Fail(absl::StrCat("rank ", rank, " gets the result of step ", step, ", but waits for that of ", client->step()));
  }
  client->OnResult(step);
}

void Simulator::Cut(uint32_t rank, double away_s) {
  Place& place = places_[rank];
  if (place.epoch == 0) return;
  Lose(rank, std::exchange(place.epoch, 0));
  After(away_s, [this, rank, process = place.process] { Attach(rank, process, /*takeover=*/false); });
}

void Simulator::Die(uint32_t rank, double away_s, bool takeover) {
  Place& place = places_[rank];
  if (place.epoch == 0) return;
  if (takeover) place.zombie = place.epoch;
  Lose(rank, place.epoch);
  Start(rank, away_s, takeover);
}

event::Verdict Simulator::VerdictOf(uint64_t step) {
  if (Chance(&timeline_.random, 12)) return {.step = step, .outcome = Outcome::kAborted, .reason = "stopped"};
  if (Chance(&timeline_.random, 4)) return {.step = step, .outcome = Outcome::kSkipped, .reason = "overflow"};
  return {.step = step};
}

// At times it takes so long that a rank, which is lost or taken over meanwhile, closes the step.
double Simulator::MeasuringTakes() {
  constexpr uint64_t kLostFrom = 60, kLostKinds = 22;  // of FaultOf
  constexpr double kSlow_s = 60;
  const bool slow = !last_step_ && !Chance(&timeline_.random, 4);
  if (!slow) return SimulatedDaemon::MeasuringTakes();
  After(0, [this] {
    const auto rank = static_cast<uint32_t>(Below(&timeline_.random, places_.size()));
    if (!last_step_) FaultOf(rank, kLostFrom + Below(&timeline_.random, kLostKinds));
  });
  return kSlow_s;
}

void Simulator::OnClosed(const effect::Close& e) {
  if (e.reason == "timeout") CheckOverdue();
}

SimulatorReport Simulate(const SimulatorOptions& options) {
  Timeline timeline(options.seed);
  uint32_t world = 0;
  RunShape shape = DrawRun(options, &timeline.random, &world);
  return Simulator(options, std::move(shape), world, &timeline).Run();
}

}  // namespace ballast::sim
