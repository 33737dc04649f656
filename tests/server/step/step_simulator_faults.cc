// What goes wrong around the step machine.
#include <utility>

#include "tests/server/step/step_simulator_world.h"

namespace ballast::sim {

void Simulator::Fault() {
  const uint64_t what = Below(&timeline_.random, 100);
  if (what < 4) {
    Count(Kind::kAllCut);
    for (uint32_t rank = 0; rank < places_.size(); ++rank) Cut(rank, Delay(2));
  } else if (what < 6) {
    ChangeWorld();
  } else if (what < 9) {
    Rewind();
  } else if (what < 14) {
    Count(Kind::kClockJump);
    jumped_s_ += Delay(300);
    Tick();
  } else {
    FaultOf(static_cast<uint32_t>(Below(&timeline_.random, places_.size())), what);
  }
}

void Simulator::FaultOf(uint32_t rank, uint64_t what) {
  Place& place = places_[rank];
  if (place.epoch == 0) return;
  const double too_long_s = shape_.machine.lease_s + shape_.machine.rank_timeout_s + 4;
  if (what < 45) {
    Count(Kind::kCut);
    Cut(rank, Delay(3));
  } else if (what < 60) {
    Count(Kind::kDeath);
    Count(Kind::kRestart);
    Die(rank, Delay(3), /*takeover=*/false);
  } else if (what < 72) {
    Count(Kind::kTakeover);
    Die(rank, Delay(0.2), /*takeover=*/true);
  } else if (what < 77) {
    Count(Kind::kTimeout);
    Cut(rank, too_long_s + Delay(20));
  } else if (what < 82) {
    Count(Kind::kTimeout);
    Die(rank, too_long_s + Delay(20), /*takeover=*/false);
  } else if (what < 88) {
    place.client->CorruptNext();
  } else if (what < 94) {
    place.client->DisagreeNext();
  } else {
    Count(Kind::kLeave);
    Up(rank, event::StreamClosed{*place.client->session, /*clean=*/true});
    place.zombie = place.epoch;
    Lose(rank, place.epoch);
    Start(rank, Delay(3), /*takeover=*/false);
  }
}

// All processes end; others come, more or fewer.
void Simulator::ChangeWorld() {
  if (world_ > 6) return;
  Count(Kind::kWorldChange);
  for (Place& place : places_) {
    place.epoch = place.zombie = 0;
    place.client.reset();
  }
  for (Place& place : places_) {
    if (std::exchange(place.open_epoch, 0) != 0) Handle(event::StreamClosed{place.open_session});
  }
  world_ = static_cast<uint32_t>(1 + Below(&timeline_.random, 6));
  Populate();
}

}  // namespace ballast::sim
