// The simulator's world: ranks' processes and connections, the device, the queue of what comes next.
#pragma once

#include <deque>
#include <functional>
#include <queue>
#include <tuple>

#include "tests/server/step/step_simulator.h"

namespace ballast::sim {

class Simulator {
 public:
  explicit Simulator(const SimulatorOptions& options)
      : options_(options),
        random_(options.seed),
        shape_(DrawRun(options, &random_, &world_)),
        machine_(options.make(shape_.machine)),
        checker_(shape_),
        device_free_s_(shape_.machine.reduction.pool_bytes.size()),
        fault_every_((world_ > 6 ? 200 : 15) * (1 + Below(&random_, 6))) {
    Populate();
  }
  SimulatorReport Run();

 private:
  // A rank's place: its process, and the daemon's end of its connection.
  struct Place {
    std::unique_ptr<SimulatedRank> client;
    uint64_t process = 0;
    bool hook_pending = false;
    uint64_t epoch = 0;   // the connection that the client has; 0: none
    uint64_t zombie = 0;  // a connection of a process that was replaced: what is in flight still comes
    double up_s = 0, down_s = 0;
    uint64_t open_epoch = 0;  // the stream that the daemon has; 0: none
    SessionId open_session = {};
    std::map<ChunkId, uint64_t> held;  // bytes
    std::deque<StepEvent> parked;      // of the stream that the daemon has: one that must wait, and what follows it
  };
  struct Action {
    double at_s;
    uint64_t order;
    std::function<void()> run;
    bool operator<(const Action& other) const { return std::tie(other.at_s, other.order) < std::tie(at_s, order); }
  };

  void Populate();
  void Advance();
  bool Calm();
  void Count(Kind kind) { ++report_.counts[static_cast<size_t>(kind)]; }
  void Fail(const std::string& what);
  double Delay(double most_s) { return most_s * static_cast<double>(Below(&random_, 1000)) / 1000; }
  void At(double at_s, std::function<void()> run) { queue_.push({at_s, ++order_, std::move(run)}); }
  void After(double delay_s, std::function<void()> run) { At(now_s_ + delay_s, std::move(run)); }
  double clock_s() const { return now_s_ + jumped_s_; }

  const StepEffects& Handle(const StepEvent& event);
  void Show(const StepEvent& event, const StepEffects& effects);

  // The client's side.
  void Start(uint32_t rank, double delay_s, bool takeover);
  void Attach(uint32_t rank, uint64_t process, bool takeover);
  void OnAttached(uint32_t rank, bool resumed, SessionId session);
  void OnAttachRefused(uint32_t rank, const effect::Reject& reject, bool takeover);
  void Pump(uint32_t rank);
  void Up(uint32_t rank, StepEvent event);
  void Arrive(uint32_t rank, uint64_t epoch, const StepEvent& event);
  void Take(uint32_t rank, uint64_t epoch, const StepEvent& event);
  bool MustWait(const StepEvent& event) const;
  void TakeParked();
  void Tick();
  bool WaitsForOthers(uint32_t rank) const;
  void CheckOverdue();
  void Down(uint32_t rank, uint64_t epoch, std::function<void(SimulatedRank*)> tell);
  void End(uint32_t rank, uint64_t epoch);
  void Result(uint32_t rank, uint64_t step, SimulatedRank* client);
  void Cut(uint32_t rank, double away_s);
  void Die(uint32_t rank, double away_s, bool takeover);
  void Lose(uint32_t rank, uint64_t epoch);
  void Fault();
  void FaultOf(uint32_t rank, uint64_t what);
  void ChangeWorld();
  void Rewind();

  // The daemon's side.
  void Carry(const effect::Fence& e);
  void Carry(const effect::Opened& e);
  void Carry(const effect::LeftOut&) { Count(Kind::kLeftOut); }
  void Carry(const effect::Begun& e);
  void Carry(const effect::Hold& e) { places_[e.rank].held[e.id] = shape_.ChunkBytes(e.id); }
  void Carry(const effect::Sum& e);
  void Carry(const effect::Forget& e);
  void Carry(const effect::Update& e);
  void Carry(const effect::Measure& e);
  void Carry(const effect::Measured& e);
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
  void ReturnAll(uint32_t rank);

  const SimulatorOptions options_;
  Random random_;
  uint32_t world_ = 0;
  const RunShape shape_;
  const std::unique_ptr<MachineUnderTest> machine_;
  StepChecker checker_;
  std::vector<Place> places_;
  std::vector<double> device_free_s_;  // by pool
  const uint64_t fault_every_;
  std::priority_queue<Action> queue_;
  double now_s_ = 0, jumped_s_ = 0, ticked_s_ = 0;
  double opened_s_ = 0, seen_at_s_ = 0;  // the open step; the last tick: by the machine's clock
  uint64_t order_ = 0, epochs_ = 0, processes_ = 0, sessions_ = 0;
  std::vector<double> could_s_ = std::vector<double>(64);  // by rank: for which it could have sent, in the open step
  std::optional<uint64_t> last_step_;                      // faults are over; it ends with this step
  uint64_t calm_since_ = 0;                                // events
  StepEffects effects_;                                    // of the event in hand
  std::deque<std::pair<StepEvent, StepEffects>> shown_;
  SimulatorReport report_;
};

}  // namespace ballast::sim
