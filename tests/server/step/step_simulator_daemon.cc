#include "tests/server/step/step_simulator_daemon.h"

#include <algorithm>
#include <ostream>
#include <utility>

#include "absl/strings/str_cat.h"

#include "tests/server/step/step_text.h"

namespace ballast::sim {
namespace {

constexpr size_t kShownEvents = 20;

}  // namespace

SimulatedDaemon::SimulatedDaemon(Options options, Timeline* timeline)
    : shape_(std::move(options.shape)),
      timeline_(*timeline),
      machine_(options.make(shape_.machine)),
      checker_(std::make_unique<StepChecker>(shape_)),
      device_free_s_(shape_.machine.reduction.pool_bytes.size()),
      make_(std::move(options.make)),
      name_(std::move(options.name)),
      listing_(options.listing) {}

const StepEffects& SimulatedDaemon::Handle(const StepEvent& event) {
  if (timeline_.failed()) return effects_;
  ++timeline_.report.events;
  effects_ = machine_->Handle(event, clock_s());
  Show(event, effects_);
  if (auto violation = checker_->Observe(event, effects_, machine()); !violation.empty()) {
    Fail(violation);
    return effects_;
  }
  if (checker_->waited_for_slab()) Count(Kind::kSlabWait);
  if (const auto* chunk = std::get_if<event::Chunk>(&event); chunk != nullptr && !effects_.empty()) {
    const auto* drop = std::get_if<effect::Drop>(&effects_.back());
    if (drop != nullptr) Return(drop->rank, {chunk->micro, chunk->tensor, chunk->chunk});
  }
  for (const StepEffect& effect : effects_) {
    std::visit([this](const auto& e) { Carry(e); }, effect);
  }
  for (uint32_t rank = 0; rank < machine().world(); ++rank) Offer(rank);
  for (uint32_t rank = 0; rank < places_.size(); ++rank) Pump(rank);
  return effects_;
}

void SimulatedDaemon::Show(const StepEvent& event, const StepEffects& effects) {
  shown_.emplace_back(event, effects);
  if (shown_.size() > kShownEvents) shown_.pop_front();
  if (listing_ == nullptr) return;
  *listing_ << "# " << name_ << timeline_.report.events << " at " << clock_s() << "\n" << Describe(event) << "\n----\n";
  for (const StepEffect& effect : effects) *listing_ << Describe(effect) << "\n";
  *listing_ << "\n";
}

void SimulatedDaemon::Fail(const std::string& what) {
  if (timeline_.failed()) return;
  timeline_.report.violation = absl::StrCat(name_, "event ", timeline_.report.events, ": ", what, "\n");
  for (const auto& [event, effects] : shown_) {
    absl::StrAppend(&timeline_.report.violation, "  ", Describe(event), "\n");
    for (const StepEffect& effect : effects)
      absl::StrAppend(&timeline_.report.violation, "      ", Describe(effect), "\n");
  }
}

void SimulatedDaemon::RenewMachine(StepMachine::Past past) {
  machine_ = make_(shape_.machine);
  machine_->GoOnFrom(std::move(past));
  std::fill(device_free_s_.begin(), device_free_s_.end(), 0);
}

// --- connections ---

void SimulatedDaemon::Connect(uint32_t rank) {
  Place& place = places_[rank];
  place.epoch = timeline_.NewNumber();
  place.up_s = place.down_s = timeline_.now_s();
  Up(rank, place.client->Open());
  Pump(rank);
}

void SimulatedDaemon::Pump(uint32_t rank) {
  Place& place = places_[rank];
  if (place.client == nullptr || timeline_.failed()) return;
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

void SimulatedDaemon::Up(uint32_t rank, StepEvent event) {
  Place& place = places_[rank];
  place.up_s = std::max(place.up_s, timeline_.now_s() + Delay(0.05));
  At(place.up_s, [this, rank, epoch = place.epoch, event = std::move(event)] {
    const Place& now = places_[rank];
    if (now.mute != epoch && (now.epoch == epoch || now.zombie == epoch)) Arrive(rank, epoch, event);
  });
}

void SimulatedDaemon::Arrive(uint32_t rank, uint64_t epoch, const StepEvent& event) {
  const auto* opened = std::get_if<event::StreamOpened>(&event);
  if (opened != nullptr && machine().RankOf(opened->session)) {
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

bool SimulatedDaemon::MustWait(const StepEvent& event) const {
  const auto* begin = std::get_if<event::MicroBegin>(&event);
  return begin != nullptr && machine().MustWait(*begin);
}

// As StepDriver does after each event.
void SimulatedDaemon::TakeParked() {
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

void SimulatedDaemon::Take(uint32_t rank, uint64_t epoch, const StepEvent& event) {
  if (std::holds_alternative<event::StreamClosed>(event)) {
    if (places_[rank].open_epoch != epoch) return;
    places_[rank].open_epoch = 0;
  }
  const StepEffects effects = Handle(event);
  if (!effects.empty() && std::holds_alternative<effect::Reject>(effects.front())) {
    const absl::Status status = std::get<effect::Reject>(effects.front()).status;
    Down(rank, epoch, [this, rank, epoch, status](SimulatedRank*) { OnEnded(rank, epoch, status); });
  } else {
    OnTaken(rank, event);
  }
}

void SimulatedDaemon::Down(uint32_t rank, uint64_t epoch, std::function<void(SimulatedRank*)> tell) {
  if (epoch == 0 || places_[rank].epoch != epoch) return;
  places_[rank].down_s = std::max(places_[rank].down_s, timeline_.now_s() + Delay(0.05));
  At(places_[rank].down_s, [this, rank, epoch, tell = std::move(tell)] {
    if (places_[rank].epoch != epoch || places_[rank].deaf == epoch) return;
    tell(places_[rank].client.get());
    Pump(rank);
  });
}

void SimulatedDaemon::Lose(uint32_t rank, uint64_t epoch) {
  After(Delay(3), [this, rank, epoch] {
    if (places_[rank].zombie == epoch) places_[rank].zombie = 0;
    if (places_[rank].open_epoch != epoch) return;
    places_[rank].open_epoch = 0;
    Handle(event::StreamClosed{places_[rank].open_session});
  });
}

void SimulatedDaemon::Carry(const effect::Fence& e) {
  const uint64_t epoch = std::exchange(places_[e.rank].open_epoch, 0);
  Down(e.rank, epoch,
       [this, rank = e.rank, epoch, status = e.status](SimulatedRank*) { OnEnded(rank, epoch, status); });
}

void SimulatedDaemon::Carry(const effect::Opened& e) {
  opened_s_ = clock_s();
  std::fill(could_s_.begin(), could_s_.end(), 0);
  if (!e.left_out.empty()) Count(Kind::kWithout);
}

// Who begins a step has all weights of those before.
void SimulatedDaemon::Carry(const effect::Begun& e) {
  const SimulatedRank* client = places_[e.rank].client.get();
  if (client == nullptr || client->session != machine().session(e.rank)) return;
  for (uint32_t i = 0; i < client->weights().size(); ++i) {
    if (client->weights()[i] == checker_->version(i)) continue;
    Fail(absl::StrCat("rank ", e.rank, " begins with tensor ", i, " of step ", client->weights()[i], ", not ",
                      checker_->version(i)));
  }
}

// As StepDriver does after each event.
void SimulatedDaemon::Offer(uint32_t rank) {
  const Place& place = places_[rank];
  if (place.open_epoch == 0) return;
  uint64_t held = 0;
  for (const auto& [_, bytes] : place.held) held += bytes;
  const auto wanted = machine_->Offer(rank, /*short_of_credit=*/held + kChunkBytes > shape_.window_bytes);
  if (wanted) Down(rank, place.open_epoch, [id = *wanted](SimulatedRank* client) { client->OnWanted(id); });
}

void SimulatedDaemon::Return(uint32_t rank, ChunkId id) {
  Down(rank, places_[rank].epoch, [id](SimulatedRank* client) { client->OnReturned(id); });
}

void SimulatedDaemon::ReturnAll(uint32_t rank) {
  for (const auto& [id, bytes] : std::exchange(places_[rank].held, {})) Return(rank, id);
}

void SimulatedDaemon::Carry(const effect::Sum& e) {
  for (const uint32_t rank : e.ranks) {
    places_[rank].held.erase(e.id);
    Return(rank, e.id);
  }
}

void SimulatedDaemon::Carry(const effect::Forget& e) {
  Count(Kind::kForgotten);
  ReturnAll(e.rank);
}

void SimulatedDaemon::Carry(const effect::Update& e) {
  double& free_s = device_free_s_[shape_.machine.reduction.pool_of[e.tensor]];
  free_s = std::max(free_s, timeline_.now_s()) + Delay(Chance(&timeline_.random, 10) ? 2 : 0.05);
  At(free_s, [this, e, life = life_] {
    if (life == life_) Handle(event::TensorApplied{e.step, e.tensor, e.slab});
  });
}

void SimulatedDaemon::Carry(const effect::Measure& e) {
  Count(Kind::kMeasure);
  After(MeasuringTakes(), [this, step = e.step, life = life_] {
    if (life != life_) return;
    if (machine().step() != step) Count(Kind::kMeasureTorn);
    Handle(event::Measured{step});
  });
}

void SimulatedDaemon::Tell(const effect::Measured& e) {
  Down(e.rank, places_[e.rank].open_epoch, [e](SimulatedRank* client) { client->OnMeasured(e.step); });
}

void SimulatedDaemon::Carry(const effect::Abandon&) {
  for (uint32_t rank = 0; rank < places_.size(); ++rank) ReturnAll(rank);
}

void SimulatedDaemon::Carry(const effect::Judge& e) {
  const event::Verdict verdict = VerdictOf(e.step);
  constexpr Kind kKinds[] = {Kind::kVerdictApply, Kind::kVerdictSkip, Kind::kVerdictAbort};
  Count(kKinds[static_cast<size_t>(verdict.outcome)]);
  After(Delay(Chance(&timeline_.random, 10) ? 2 : 0.05), [this, verdict, life = life_] {
    if (life == life_) Handle(verdict);
  });
}

void SimulatedDaemon::Carry(const effect::Publish& e) {
  for (uint32_t rank = 0; rank < places_.size(); ++rank) {
    if (e.rank && *e.rank != rank) continue;
    Down(rank, places_[rank].open_epoch, [e](SimulatedRank* client) { client->OnWeights(e.step, e.tensor); });
  }
}

void SimulatedDaemon::Carry(const effect::Close& e) {
  constexpr Kind kKinds[] = {Kind::kApplied, Kind::kSkipped, Kind::kAborted, Kind::kPartial};
  Count(kKinds[static_cast<size_t>(e.outcome)]);
  if (e.reason == kDiscarded) Count(Kind::kDiscard);
  for (uint32_t rank = 0; rank < places_.size(); ++rank) ReturnAll(rank);
  OnClosed(e);
}

void SimulatedDaemon::Carry(const effect::Result& e) {
  Down(e.rank, places_[e.rank].open_epoch, [this, e](SimulatedRank* client) { OnResult(e.rank, e.step, client); });
}

void SimulatedDaemon::Carry(const effect::Discard&) {
  Count(Kind::kDiscarded);
  for (uint32_t rank = 0; rank < places_.size(); ++rank) ReturnAll(rank);
}

}  // namespace ballast::sim
