// One daemon of the simulation: a step machine, its device, and the ranks' connections to it. What the ranks do besides
// keeping to the protocol on their streams, whoever derives from this says.
#pragma once

#include <deque>
#include <functional>
#include <map>
#include <memory>
#include <string>
#include <utility>
#include <vector>

#include "tests/server/step/step_simulator_timeline.h"

namespace ballast::sim {

class SimulatedDaemon {
 public:
  struct Options {
    RunShape shape;
    MakeMachine make;
    std::string name = {};  // where there are several
    std::ostream* listing = nullptr;
  };
  SimulatedDaemon(Options options, Timeline* timeline);
  virtual ~SimulatedDaemon() = default;

  const StepMachine& machine() const { return machine_->machine(); }
  double clock_s() const { return timeline_.now_s() + jumped_s_; }

 protected:
  // A rank's place: its process, and the daemon's end of its connection.
  struct Place {
    std::unique_ptr<SimulatedRank> client;
    uint64_t process = 0;
    bool hook_pending = false;
    uint64_t epoch = 0;   // the connection that the client has; 0: none
    uint64_t zombie = 0;  // a connection of a process that was replaced: what is in flight still comes
    uint64_t mute = 0;    // a connection on which nothing gets to the daemon any more
    uint64_t deaf = 0;    // one on which nothing gets to the client
    double up_s = 0, down_s = 0;
    uint64_t open_epoch = 0;  // the stream that the daemon has; 0: none
    SessionId open_session = {};
    std::map<ChunkId, uint64_t> held;  // bytes
    std::deque<StepEvent> parked;      // of the stream that the daemon has: one that must wait, and what follows it
  };

  const StepEffects& Handle(const StepEvent& event);
  void Fail(const std::string& what);
  void Count(Kind kind) { timeline_.Count(kind); }
  double Delay(double most_s) { return timeline_.Delay(most_s); }
  void At(double at_s, std::function<void()> run) { timeline_.At(at_s, std::move(run)); }
  void After(double delay_s, std::function<void()> run) { timeline_.After(delay_s, std::move(run)); }

  // The client's side.
  // A stream of the session that the place's client has.
  void Connect(uint32_t rank);
  void Pump(uint32_t rank);
  void Up(uint32_t rank, StepEvent event);
  void Down(uint32_t rank, uint64_t epoch, std::function<void(SimulatedRank*)> tell);
  // The daemon hears of a lost connection some time later, unless another took its place.
  void Lose(uint32_t rank, uint64_t epoch);
  void TakeParked();

  // The daemon has ended the stream with this status, and the client has heard.
  virtual void OnEnded(uint32_t rank, uint64_t epoch, const absl::Status& status) = 0;
  virtual void OnResult(uint32_t rank, uint64_t step, SimulatedRank* client) = 0;
  virtual event::Verdict VerdictOf(uint64_t step) = 0;
  // How long the device takes to measure the step.
  virtual double MeasuringTakes() { return Delay(Chance(&timeline_.random, 4) ? 2 : 0.05); }
  virtual void OnClosed(const effect::Close& e) = 0;
  virtual void OnTaken(uint32_t, const StepEvent&) {}  // unless it was refused
  virtual void Tell(const effect::Measured& e);

  void ReturnAll(uint32_t rank);
  // Another machine, with another device, in place of the one that is gone.
  void RenewMachine(StepMachine::Past past);

  const RunShape shape_;
  Timeline& timeline_;
  std::unique_ptr<MachineUnderTest> machine_;
  std::unique_ptr<StepChecker> checker_;
  std::vector<Place> places_;
  double jumped_s_ = 0;
  uint64_t life_ = 0;    // what a daemon asked of its device is not answered to the one that comes after it
  double opened_s_ = 0;  // the open step, by the machine's clock
  std::vector<double> could_s_ = std::vector<double>(64);  // by rank: for which it could have sent, in the open step
  std::vector<double> device_free_s_;                      // by pool

 private:
  void Show(const StepEvent& event, const StepEffects& effects);
  void Arrive(uint32_t rank, uint64_t epoch, const StepEvent& event);
  void Take(uint32_t rank, uint64_t epoch, const StepEvent& event);
  bool MustWait(const StepEvent& event) const;

  void Carry(const effect::Fence& e);
  void Carry(const effect::Opened& e);
  void Carry(const effect::LeftOut&) { Count(Kind::kLeftOut); }
  void Carry(const effect::Begun& e);
  void Carry(const effect::Hold& e) { places_[e.rank].held[e.id] = shape_.ChunkBytes(e.id); }
  void Carry(const effect::Sum& e);
  void Carry(const effect::Forget& e);
  void Carry(const effect::Update& e);
  void Carry(const effect::Measure& e);
  void Carry(const effect::Measured& e) { Tell(e); }
  void Carry(const effect::Abandon& e);
  void Carry(const effect::Judge& e);
  void Carry(const effect::Publish& e);
  void Carry(const effect::Close& e);
  void Carry(const effect::Result& e);
  void Carry(const effect::Discard& e);
  template <class E>
  void Carry(const E&) {}
  void Offer(uint32_t rank);
  void Return(uint32_t rank, ChunkId id);

  const MakeMachine make_;
  const std::string name_;
  std::ostream* const listing_;
  StepEffects effects_;  // of the event in hand
  std::deque<std::pair<StepEvent, StepEffects>> shown_;
};

}  // namespace ballast::sim
