#include "tests/server/step/parts_simulator_daemon.h"

#include <algorithm>
#include <cmath>
#include <limits>
#include <utility>

#include "absl/strings/str_cat.h"
#include "proto/rewound.h"

#include "tests/server/step/parts_simulator_whole.h"

namespace ballast::sim {

PartDaemon::PartDaemon(Options options, Identity identity, Timeline* timeline, PartsListener* listener)
    : SimulatedDaemon(std::move(options), timeline), identity_(identity), listener_(*listener) {
  places_.resize(identity_.world);
}

// --- what a rank's client does ---

PartDaemon::Answer PartDaemon::Attach(uint32_t rank, bool takeover, uint64_t from_step, uint64_t again_step) {
  const SessionId session{timeline_.NewNumber()};
  const StepEffects effects = Handle(event::Attach{.session = session,
                                                   .takeover = takeover,
                                                   .rank = rank,
                                                   .world = identity_.world,
                                                   .coverage = {shape_.CoverageOf(rank, identity_.world), {}},
                                                   .from_step = from_step,
                                                   .again_step = again_step});
  NoteAttach(effects, from_step);
  if (timeline_.failed()) return {};
  if (const auto* reject = std::get_if<effect::Reject>(&effects.front()))
    return {reject->status, reject->retry_after_s};
  sessions_.insert(session);
  Answer answer{.resume_step = machine().step()};
  if (!closed_.empty() && closed_.rbegin()->first == closed_step()) answer.last = closed_.rbegin()->second;
  Grant(rank, session);
  return answer;
}

void PartDaemon::NoteAttach(const StepEffects& effects, uint64_t from_step) {
  bool again = false;
  for (const StepEffect& effect : effects) {
    if (std::holds_alternative<effect::Discard>(effect)) {
      asked_.clear();
      again = true;
    }
    const auto* fence = std::get_if<effect::Fence>(&effect);
    again = again || (fence != nullptr && RewoundTo(fence->status));
    const auto* close = std::get_if<effect::Close>(&effect);
    if (close == nullptr || close->detail.find("goes on with step") == std::string::npos) continue;
    if (close->step + 1 != from_step) Fail("closed another step than the one before the rank's next");
  }
  if (again) listener_.Count(PartsKind::kBegunAgain);
}

// The client that has the session, with weights as they are now.
void PartDaemon::Grant(uint32_t rank, SessionId session) {
  Place& place = places_[rank];
  place.process = timeline_.NewNumber();
  place.hook_pending = false;
  const bool slow = Chance(&timeline_.random, 10);
  const SimulatedRank::Identity who{place.process, identity_.seed, rank, identity_.world, slow, identity_.part, true};
  place.client =
      std::make_unique<SimulatedRank>(shape_, who, machine().step(), &timeline_.random, &timeline_.report.counts);
  place.client->session = session;
  std::vector<uint64_t> weights;
  for (uint32_t i = 0; i < shape_.machine.tensor_names.size(); ++i) weights.push_back(checker_->version(i));
  place.client->Pull(std::move(weights));
  Connect(rank);
}

void PartDaemon::Leave(uint32_t rank) {
  Place& place = places_[rank];
  if (place.client == nullptr) return;
  if (place.epoch != 0 && !place.client->in_step()) Up(rank, event::StreamClosed{*place.client->session, true});
  Abandon(rank, /*flying=*/true);
}

void PartDaemon::Abandon(uint32_t rank, bool flying) {
  Place& place = places_[rank];
  if (place.epoch != 0) {
    if (flying) place.zombie = place.epoch;
    Lose(rank, std::exchange(place.epoch, 0));
  }
  place.client.reset();
  place.process = 0;
}

void PartDaemon::Return(uint32_t rank, uint64_t process) {
  Place& place = places_[rank];
  if (place.process != process || place.epoch != 0 || place.client == nullptr) return;
  if (!up_) return After(0.3 + Delay(0.3), [this, rank, process] { Return(rank, process); });
  if (sessions_.count(*place.client->session) == 0) {
    return listener_.OnEnded(identity_.part, rank, RewoundError(closed_step(), machine().generation()));
  }
  const StepEffects effects = Handle(event::Attach{.session = SessionId{timeline_.NewNumber()},
                                                   .resumes = place.client->session,
                                                   .rank = rank,
                                                   .world = identity_.world});
  if (timeline_.failed()) return;
  if (const auto* reject = std::get_if<effect::Reject>(&effects.front())) {
    return listener_.OnEnded(identity_.part, rank, reject->status);
  }
  // The daemon reads nothing more of the old stream: what is on its way there comes again.
  place.zombie = 0;
  if (std::exchange(place.open_epoch, 0) != 0) Handle(event::StreamClosed{place.open_session});
  place.client->Resume(machine(), rank, place.held);
  Connect(rank);
}

std::set<uint64_t> PartDaemon::kept() const {
  std::set<uint64_t> steps = checkpoints_;
  steps.insert(snapshots_.begin(), snapshots_.end());
  if (closed_step() > 0) steps.insert(closed_step());
  return steps;
}

bool PartDaemon::GoBack(uint64_t step) {
  if (kept().count(step) == 0) {
    Fail(absl::StrCat("is to go back to step ", step, ", which it does not have"));
    return true;
  }
  const StepEffects effects = Handle(event::Rewind{step});
  if (timeline_.failed()) return true;
  if (!effects.empty() && std::holds_alternative<effect::Reject>(effects.front())) return false;
  for (uint32_t rank = 0; rank < places_.size(); ++rank) ReturnAll(rank);
  TakeBackTo(step);
  return true;
}

void PartDaemon::TakeBackTo(uint64_t step) {
  ++returns_;
  ++era_;
  taken_back_ = timeline_.NewNumber();
  floor_ = step;
  closed_.erase(closed_.upper_bound(step), closed_.end());
  checkpoints_.erase(checkpoints_.upper_bound(step), checkpoints_.end());
  snapshots_.erase(snapshots_.upper_bound(step), snapshots_.end());
  asked_.clear();
  judged_.reset();
}

// --- faults ---

void PartDaemon::Cut(uint32_t rank, double away_s) {
  Place& place = places_[rank];
  if (place.epoch == 0) return;
  Lose(rank, std::exchange(place.epoch, 0));
  After(away_s, [this, rank, process = place.process] { Return(rank, process); });
}

// Only one side's messages arrive; after some time the client gives the connection up.
void PartDaemon::Silence(uint32_t rank, bool to_client) {
  Place& place = places_[rank];
  if (place.epoch == 0) return;
  (to_client ? place.deaf : place.mute) = place.epoch;
  After(Delay(3), [this, rank, epoch = place.epoch, to_client] {
    if (places_[rank].epoch != epoch) return;
    if (to_client) places_[rank].zombie = epoch;
    Cut(rank, Delay(1));
  });
}

void PartDaemon::Die() {
  up_ = false;
  ++life_;
  sessions_.clear();
  for (uint32_t rank = 0; rank < places_.size(); ++rank) {
    Place& place = places_[rank];
    place.open_epoch = place.zombie = 0;
    place.parked.clear();
    place.held.clear();
    if (place.epoch == 0) continue;
    place.mute = place.epoch;
    After(Delay(1), [this, rank, epoch = place.epoch] {
      if (places_[rank].epoch == epoch) Cut(rank, Delay(1));
    });
  }
  uint64_t step = closed_step();
  if (!identity_.storage.journal) {
    step = *checkpoints_.rbegin();
  } else if (step > std::max<uint64_t>(floor_, 1)) {
    step -= Below(&timeline_.random, 2);
  }
  if (step + 1 < closed_step()) listener_.Count(PartsKind::kOlderStep);
  After(Delay(5), [this, step] { ComeBack(step); });
}

void PartDaemon::ComeBack(uint64_t step) {
  auto checker = std::make_unique<StepChecker>(shape_);
  checker->StartFrom(step, machine().generation(), *checker_);
  const StepMachine::Past past(machine().generation(), step);
  RenewMachine(past);
  checker_ = std::move(checker);
  TakeBackTo(step);
  snapshots_.clear();
  up_ = true;
}

void PartDaemon::Tick() {
  if (up_) Handle(event::Tick{});
}

// --- what the daemon tells ---

void PartDaemon::OnEnded(uint32_t rank, uint64_t epoch, const absl::Status& status) {
  places_[rank].epoch = 0;
  Lose(rank, epoch);
  listener_.OnEnded(identity_.part, rank, status);
}

void PartDaemon::OnResult(uint32_t rank, uint64_t step, SimulatedRank* client) {
  const bool awaited = client->in_step() && client->step() == step;
  if (client->in_step() && step > client->step()) {
    return listener_.OnEnded(identity_.part, rank, absl::UnavailableError("the daemon keeps no result of the step"));
  }
  client->OnResult(step);
  const auto closed = closed_.find(step);
  if (awaited && closed != closed_.end()) listener_.OnResult(identity_.part, rank, closed->second);
}

std::vector<double> PartDaemon::Squares() const {
  std::vector<double> squares;
  for (uint32_t i = 0; i < shape_.machine.tensor_names.size(); ++i) {
    squares.push_back(checker_->MeasureOf(i).value_or(std::numeric_limits<double>::quiet_NaN()));
  }
  return squares;
}

void PartDaemon::Tell(const effect::Measured& e) {
  MeasuredStep measured{.measured = !e.discarded};
  if (!e.discarded) measured = MeasureOf(Squares());
  Down(e.rank, places_[e.rank].open_epoch, [this, e, measured](SimulatedRank* client) {
    client->OnMeasured(e.step);
    if (client->in_step() && client->step() == e.step) listener_.OnMeasured(identity_.part, e.rank, measured);
  });
}

event::Verdict PartDaemon::VerdictOf(uint64_t step) {
  std::string whole = checker_->end_content();
  if (whole.empty()) Fail("judges without what the whole step measures");
  if (identity_.judges_by_its_own) {
    v1::WholeMeasure own;
    double squares = 0;
    for (const double square : Squares()) squares += std::isnan(square) ? 0 : square;
    own.set_grad_norm(std::sqrt(squares));
    whole = TextOf(own);
  }
  event::Verdict verdict = JudgeWhole(whole);
  verdict.step = step;
  judged_ = verdict.outcome;
  return verdict;
}

void PartDaemon::OnTaken(uint32_t rank, const StepEvent& event) {
  if (std::holds_alternative<event::StreamOpened>(event)) {
    Down(rank, places_[rank].open_epoch, [this, rank](SimulatedRank*) { listener_.OnOpened(identity_.part, rank); });
  }
  const bool in_step = machine().world() > rank && machine().InStep(rank);
  if (std::holds_alternative<event::StepMeasure>(event) && in_step) asked_[rank] = *machine().session(rank);
  const auto* begin = std::get_if<event::StepBegin>(&event);
  const SimulatedRank* from = places_[rank].client.get();  // else a client said it that has left by now
  if (begin != nullptr && in_step && from != nullptr && from->session == begin->session) {
    listener_.OnBegun(identity_.part, rank, machine().step());
  }
}

void PartDaemon::OnClosed(const effect::Close& e) {
  ClosedPart closed{.number = timeline_.NewNumber(),
                    .step = e.step,
                    .outcome = e.outcome,
                    .reason = e.reason,
                    .not_applied = e.not_applied,
                    .updated = checker_->updated_any(),
                    .judged = std::exchange(judged_, std::nullopt),
                    .taken_back = taken_back_};
  const bool torn = IsTorn(e.reason);
  bool gone = false;
  for (const auto& [rank, session] : std::exchange(asked_, {})) {
    const bool there = machine().session(rank) == session;
    gone = gone || !there;
    closed.torn_before_ranks = closed.torn_before_ranks || (torn && there);
  }
  if (gone && closed.judged) listener_.Count(PartsKind::kVerdictByOthers);
  closed_[e.step] = std::move(closed);
  Keep(e.step);
}

void PartDaemon::Keep(uint64_t step) {
  const Storage& storage = identity_.storage;
  if (step % storage.snapshot_every == 0) snapshots_.insert(step);
  while (snapshots_.size() > storage.snapshots) snapshots_.erase(snapshots_.begin());
  if (step % storage.checkpoint_every != 0) return;
  After(Delay(1), [this, step, era = era_, life = life_] {
    if (era != era_ || life != life_) return;
    checkpoints_.insert(step);
    while (checkpoints_.size() > identity_.storage.checkpoints) checkpoints_.erase(checkpoints_.begin());
  });
}

}  // namespace ballast::sim
