#include <algorithm>
#include <ostream>
#include <utility>

#include "absl/strings/str_cat.h"

#include "tests/server/step/step_simulator_world.h"
#include "tests/server/step/step_text.h"

namespace ballast::sim {
namespace {

constexpr uint64_t kFaultyEvents = 500, kMostFaultyEvents = 2500, kFaultySteps = 4;
constexpr uint64_t kCalmEvents = 40000;  // more than any two steps take
constexpr size_t kShownEvents = 20;
constexpr double kTickS = 1;

}  // namespace

SimulatorReport Simulator::Run() {
  while (report_.violation.empty() && !Calm()) Advance();
  return std::move(report_);
}

// Whether the last step of the calm has closed.
bool Simulator::Calm() {
  const uint64_t step = machine_->machine().step();
  if (last_step_) return step > *last_step_;
  const bool enough = report_.events >= kFaultyEvents && step > kFaultySteps;
  if (enough || report_.events >= kMostFaultyEvents) {
    last_step_ = step + 1;
    calm_since_ = report_.events;
  }
  return false;
}

void Simulator::Advance() {
  if (!last_step_ && Chance(&random_, fault_every_)) Fault();
  if (queue_.empty()) return Fail("deadlock: nothing is under way, and the step is open");
  const Action action = queue_.top();
  queue_.pop();
  now_s_ = std::max(now_s_, action.at_s);
  action.run();
  TakeParked();
  while (report_.violation.empty() && !queue_.empty() && queue_.top().at_s > ticked_s_ + kTickS) {
    now_s_ = std::max(now_s_, ticked_s_ + kTickS);
    Tick();
    TakeParked();
  }
  if (last_step_ && report_.events > calm_since_ + kCalmEvents) Fail("no step closes any more");
}

void Simulator::Populate() {
  places_.clear();
  places_.resize(std::max<size_t>(world_, 6));  // the machine may speak of the former world's ranks
  for (uint32_t rank = 0; rank < world_; ++rank) Start(rank, Delay(1), /*takeover=*/false);
}

const StepEffects& Simulator::Handle(const StepEvent& event) {
  if (!report_.violation.empty()) return effects_;
  ++report_.events;
  effects_ = machine_->Handle(event, clock_s());
  Show(event, effects_);
  if (auto violation = checker_.Observe(event, effects_, machine_->machine()); !violation.empty()) {
    Fail(violation);
    return effects_;
  }
  if (checker_.waited_for_slab()) Count(Kind::kSlabWait);
  if (const auto* chunk = std::get_if<event::Chunk>(&event); chunk != nullptr && !effects_.empty()) {
    const auto* drop = std::get_if<effect::Drop>(&effects_.back());
    if (drop != nullptr) Return(drop->rank, {chunk->micro, chunk->tensor, chunk->chunk});
  }
  for (const StepEffect& effect : effects_) {
    std::visit([this](const auto& e) { Carry(e); }, effect);
  }
  for (uint32_t rank = 0; rank < machine_->machine().world(); ++rank) Offer(rank);
  for (uint32_t rank = 0; rank < places_.size(); ++rank) Pump(rank);
  return effects_;
}

void Simulator::Show(const StepEvent& event, const StepEffects& effects) {
  shown_.emplace_back(event, effects);
  if (shown_.size() > kShownEvents) shown_.pop_front();
  if (options_.listing == nullptr) return;
  *options_.listing << "# " << report_.events << " at " << clock_s() << "\n" << Describe(event) << "\n----\n";
  for (const StepEffect& effect : effects) *options_.listing << Describe(effect) << "\n";
  *options_.listing << "\n";
}

void Simulator::Fail(const std::string& what) {
  if (!report_.violation.empty()) return;
  report_.violation = absl::StrCat("seed ", options_.seed, ", event ", report_.events, ": ", what, "\n");
  for (const auto& [event, effects] : shown_) {
    absl::StrAppend(&report_.violation, "  ", Describe(event), "\n");
    for (const StepEffect& effect : effects) absl::StrAppend(&report_.violation, "      ", Describe(effect), "\n");
  }
}

// --- processes and connections ---

// A new process comes up, whatever was there before.
void Simulator::Start(uint32_t rank, double delay_s, bool takeover) {
  Place& place = places_[rank];
  place.client.reset();
  place.epoch = 0;
  place.hook_pending = false;
  place.process = ++processes_;
  After(delay_s, [this, rank, process = place.process, takeover] { Attach(rank, process, takeover); });
}

void Simulator::Attach(uint32_t rank, uint64_t process, bool takeover) {
  if (places_[rank].process != process || places_[rank].epoch != 0) return;
  const auto& client = places_[rank].client;
  const auto token = client != nullptr ? client->session : std::nullopt;
  const StepEffects effects = Handle(
      event::Attach{SessionId{++sessions_}, token, takeover, rank, world_, {shape_.CoverageOf(rank, world_), {}}});
  if (!report_.violation.empty()) return;
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
  const StepMachine& machine = machine_->machine();
  Count(resumed ? Kind::kResume : Kind::kAttach);
  if (resumed) {
    place.client->Resume(machine, rank, place.held);
  } else {
    const SimulatedRank::Identity identity{place.process, options_.seed, rank, world_, Chance(&random_, 10)};
    if (identity.slow) Count(Kind::kSlowRank);
    place.client = std::make_unique<SimulatedRank>(shape_, identity, machine.step(), &random_, &report_.counts);
    place.client->session = session;
    std::vector<uint64_t> weights;
    for (uint32_t i = 0; i < shape_.machine.tensor_names.size(); ++i) weights.push_back(checker_.version(i));
    place.client->Pull(std::move(weights));
  }
  place.epoch = ++epochs_;
  place.up_s = place.down_s = now_s_;
  Up(rank, place.client->Open());
  Pump(rank);
}

void Simulator::Pump(uint32_t rank) {
  Place& place = places_[rank];
  if (place.client == nullptr || !report_.violation.empty()) return;
  while (place.epoch != 0) {
    auto event = place.client->Next();
    if (!event) break;
    Up(rank, std::move(*event));
  }
  if (place.hook_pending || !place.client->computing()) return;
  place.hook_pending = true;
  After(Delay(place.client->slow() ? 3 : 0.02), [this, rank, process = place.process] {
    if (places_[rank].process != process || places_[rank].client == nullptr) return;
    places_[rank].hook_pending = false;
    places_[rank].client->Hook();
    Pump(rank);
  });
}

void Simulator::Up(uint32_t rank, StepEvent event) {
  Place& place = places_[rank];
  place.up_s = std::max(place.up_s, now_s_ + Delay(0.05));
  At(place.up_s, [this, rank, epoch = place.epoch, event = std::move(event)] {
    if (places_[rank].epoch == epoch || places_[rank].zombie == epoch) Arrive(rank, epoch, event);
  });
}

void Simulator::Arrive(uint32_t rank, uint64_t epoch, const StepEvent& event) {
  const auto* opened = std::get_if<event::StreamOpened>(&event);
  if (opened != nullptr && machine_->machine().RankOf(opened->session)) {
    places_[rank].open_epoch = epoch;
    places_[rank].open_session = opened->session;
    places_[rank].parked.clear();
  }
  if (places_[rank].open_epoch == epoch && (!places_[rank].parked.empty() || MustWait(event))) {
    places_[rank].parked.push_back(event);
    return Count(Kind::kParked);
  }
  Take(rank, epoch, event);
}

bool Simulator::MustWait(const StepEvent& event) const {
  const auto* begin = std::get_if<event::MicroBegin>(&event);
  return begin != nullptr && machine_->machine().MustWait(*begin);
}

// As StepDriver does after each event.
void Simulator::TakeParked() {
  for (bool more = true; more;) {
    more = false;
    for (uint32_t rank = 0; rank < places_.size(); ++rank) {
      Place& place = places_[rank];
      if (place.open_epoch == 0) place.parked.clear();
      if (place.parked.empty() || MustWait(place.parked.front())) continue;
      const StepEvent event = std::move(place.parked.front());
      place.parked.pop_front();
      Take(rank, place.open_epoch, event);
      more = true;
    }
  }
}

void Simulator::Take(uint32_t rank, uint64_t epoch, const StepEvent& event) {
  if (std::holds_alternative<event::StreamClosed>(event)) {
    if (places_[rank].open_epoch != epoch) return;
    places_[rank].open_epoch = 0;
  }
  const StepEffects effects = Handle(event);
  if (!effects.empty() && std::holds_alternative<effect::Reject>(effects.front())) {
    Down(rank, epoch, [this, rank, epoch](SimulatedRank*) { End(rank, epoch); });
  }
}

void Simulator::Down(uint32_t rank, uint64_t epoch, std::function<void(SimulatedRank*)> tell) {
  if (epoch == 0 || places_[rank].epoch != epoch) return;
  places_[rank].down_s = std::max(places_[rank].down_s, now_s_ + Delay(0.05));
  At(places_[rank].down_s, [this, rank, epoch, tell = std::move(tell)] {
    if (places_[rank].epoch != epoch) return;
    tell(places_[rank].client.get());
    Pump(rank);
  });
}

// The daemon ended the stream: the session is over, a new process starts.
void Simulator::End(uint32_t rank, uint64_t epoch) {
  Start(rank, Delay(1), /*takeover=*/false);
  Lose(rank, epoch);
}

void Simulator::Result(uint32_t rank, uint64_t step, SimulatedRank* client) {
  if (step > client->step()) {
    Fail(absl::StrCat("rank ", rank, " gets the result of step ", step, ", but waits for that of ", client->step()));
  }
  client->OnResult(step);
}

// The daemon hears of a lost connection some time later, unless another took its place.
void Simulator::Lose(uint32_t rank, uint64_t epoch) {
  After(Delay(3), [this, rank, epoch] {
    if (places_[rank].zombie == epoch) places_[rank].zombie = 0;
    if (places_[rank].open_epoch != epoch) return;
    places_[rank].open_epoch = 0;
    Handle(event::StreamClosed{places_[rank].open_session});
  });
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

// --- the daemon carries out effects ---

void Simulator::Carry(const effect::Fence& e) {
  const uint64_t epoch = std::exchange(places_[e.rank].open_epoch, 0);
  Down(e.rank, epoch, [this, rank = e.rank, epoch](SimulatedRank*) { End(rank, epoch); });
}

void Simulator::Carry(const effect::Opened& e) {
  opened_s_ = clock_s();
  std::fill(could_s_.begin(), could_s_.end(), 0);
  if (!e.left_out.empty()) Count(Kind::kWithout);
}

// Who begins a step has all weights of those before.
void Simulator::Carry(const effect::Begun& e) {
  const SimulatedRank* client = places_[e.rank].client.get();
  if (client == nullptr || client->session != machine_->machine().session(e.rank)) return;
  for (uint32_t i = 0; i < client->weights().size(); ++i) {
    if (client->weights()[i] == checker_.version(i)) continue;
    Fail(absl::StrCat("rank ", e.rank, " begins with tensor ", i, " of step ", client->weights()[i], ", not ",
                      checker_.version(i)));
  }
}

// As StepDriver does after each event.
void Simulator::Offer(uint32_t rank) {
  const Place& place = places_[rank];
  if (place.open_epoch == 0) return;
  uint64_t held = 0;
  for (const auto& [_, bytes] : place.held) held += bytes;
  const auto wanted = machine_->Offer(rank, /*short_of_credit=*/held + kChunkBytes > shape_.window_bytes);
  if (wanted) Down(rank, place.open_epoch, [id = *wanted](SimulatedRank* client) { client->OnWanted(id); });
}

void Simulator::Return(uint32_t rank, ChunkId id) {
  Down(rank, places_[rank].epoch, [id](SimulatedRank* client) { client->OnReturned(id); });
}

void Simulator::ReturnAll(uint32_t rank) {
  for (const auto& [id, bytes] : std::exchange(places_[rank].held, {})) Return(rank, id);
}

void Simulator::Carry(const effect::Sum& e) {
  for (const uint32_t rank : e.ranks) {
    places_[rank].held.erase(e.id);
    Return(rank, e.id);
  }
}

void Simulator::Carry(const effect::Forget& e) {
  Count(Kind::kForgotten);
  ReturnAll(e.rank);
}

void Simulator::Carry(const effect::Update& e) {
  double& free_s = device_free_s_[shape_.machine.reduction.pool_of[e.tensor]];
  free_s = std::max(free_s, now_s_) + Delay(Chance(&random_, 10) ? 2 : 0.05);
  At(free_s, [this, e] { Handle(event::TensorApplied{e.step, e.tensor, e.slab}); });
}

// At times it takes so long that a rank, which is lost or taken over meanwhile, closes the step.
void Simulator::Carry(const effect::Measure& e) {
  constexpr uint64_t kLostFrom = 60, kLostKinds = 22;  // of FaultOf
  constexpr double kSlow_s = 60;
  Count(Kind::kMeasure);
  const bool slow = !last_step_ && !Chance(&random_, 4);
  if (slow) {
    After(0, [this] {
      const auto rank = static_cast<uint32_t>(Below(&random_, places_.size()));
      if (!last_step_) FaultOf(rank, kLostFrom + Below(&random_, kLostKinds));
    });
  }
  After(slow ? kSlow_s : Delay(Chance(&random_, 4) ? 2 : 0.05), [this, step = e.step] {
    if (machine_->machine().step() != step) Count(Kind::kMeasureTorn);
    Handle(event::Measured{step});
  });
}

void Simulator::Carry(const effect::Measured& e) {
  Down(e.rank, places_[e.rank].open_epoch, [e](SimulatedRank* client) { client->OnMeasured(e.step); });
}

void Simulator::Carry(const effect::Abandon&) {
  for (uint32_t rank = 0; rank < places_.size(); ++rank) ReturnAll(rank);
}

void Simulator::Carry(const effect::Judge& e) {
  event::Verdict verdict{.step = e.step};
  if (Chance(&random_, 12)) {
    verdict = {.step = e.step, .outcome = Outcome::kAborted, .reason = "stopped"};
  } else if (Chance(&random_, 4)) {
    verdict = {.step = e.step, .outcome = Outcome::kSkipped, .reason = "overflow"};
  }
  constexpr Kind kKinds[] = {Kind::kVerdictApply, Kind::kVerdictSkip, Kind::kVerdictAbort};
  Count(kKinds[static_cast<size_t>(verdict.outcome)]);
  After(Delay(Chance(&random_, 10) ? 2 : 0.05), [this, verdict] { Handle(verdict); });
}

void Simulator::Carry(const effect::Publish& e) {
  for (uint32_t rank = 0; rank < places_.size(); ++rank) {
    if (e.rank && *e.rank != rank) continue;
    Down(rank, places_[rank].open_epoch, [e](SimulatedRank* client) { client->OnWeights(e.step, e.tensor); });
  }
}

void Simulator::Carry(const effect::Close& e) {
  constexpr Kind kKinds[] = {Kind::kApplied, Kind::kSkipped, Kind::kAborted, Kind::kPartial};
  Count(kKinds[static_cast<size_t>(e.outcome)]);
  if (e.reason == "timeout") CheckOverdue();
  if (e.reason == kDiscarded) Count(Kind::kDiscard);
  for (uint32_t rank = 0; rank < places_.size(); ++rank) ReturnAll(rank);
}

void Simulator::Carry(const effect::Result& e) {
  Down(e.rank, places_[e.rank].open_epoch, [this, e](SimulatedRank* client) { Result(e.rank, e.step, client); });
}

void Simulator::Carry(const effect::Discard&) {
  Count(Kind::kDiscarded);
  for (uint32_t rank = 0; rank < places_.size(); ++rank) ReturnAll(rank);
}

SimulatorReport Simulate(const SimulatorOptions& options) { return Simulator(options).Run(); }

}  // namespace ballast::sim
