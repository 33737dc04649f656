// The simulation of one daemon: how its ranks' processes come and go.
#pragma once

#include <string>

#include "tests/server/step/step_simulator_daemon.h"

namespace ballast::sim {

class Simulator final : public SimulatedDaemon {
 public:
  Simulator(const SimulatorOptions& options, RunShape shape, uint32_t world, Timeline* timeline);
  SimulatorReport Run();

 private:
  void Populate();
  void Advance();
  bool Calm();

  void Start(uint32_t rank, double delay_s, bool takeover);
  void Attach(uint32_t rank, uint64_t process, bool takeover);
  void OnAttached(uint32_t rank, bool resumed, SessionId session);
  void OnAttachRefused(uint32_t rank, const effect::Reject& reject, bool takeover);
  void OnEnded(uint32_t rank, uint64_t epoch, const absl::Status& status) override;
  void OnResult(uint32_t rank, uint64_t step, SimulatedRank* client) override;
  event::Verdict VerdictOf(uint64_t step) override;
  double MeasuringTakes() override;
  void OnClosed(const effect::Close& e) override;
  void Tick();
  bool WaitsForOthers(uint32_t rank) const;
  void CheckOverdue();
  void Cut(uint32_t rank, double away_s);
  void Die(uint32_t rank, double away_s, bool takeover);
  void Fault();
  void FaultOf(uint32_t rank, uint64_t what);
  void ChangeWorld();
  void Rewind();

  const SimulatorOptions options_;
  uint32_t world_;
  const uint64_t fault_every_;
  double ticked_s_ = 0;
  double seen_at_s_ = 0;               // the last tick, by the machine's clock
  std::optional<uint64_t> last_step_;  // faults are over; it ends with this step
  uint64_t calm_since_ = 0;            // events
};

}  // namespace ballast::sim
