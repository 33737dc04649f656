// The simulation of a run on several daemons: its daemons, its ranks, and what goes wrong around them.
#pragma once

#include <memory>
#include <optional>
#include <vector>

#include "tests/server/step/parts_simulator_rank.h"

namespace ballast::sim {

// A run as it is drawn, and what each daemon has of it.
struct DrawnRun {
  uint32_t world = 1;
  RunShape whole = {};
  std::vector<RunShape> parts = {};
  PartPlacement placement = {};
  PartDaemon::Storage storage = {};
  bool rewinds_torn = false;
};
DrawnRun DrawPartsRun(uint64_t seed, Random* random);

class PartsSimulator final : public PartsListener {
 public:
  PartsSimulator(const PartsOptions& options, const DrawnRun& run, Timeline* timeline);
  PartsReport Run();

 private:
  void OnOpened(uint32_t part, uint32_t rank) override { ranks_[rank].OnOpened(part); }
  void OnEnded(uint32_t part, uint32_t rank, const absl::Status& status) override {
    ranks_[rank].OnEnded(part, status);
  }
  void OnMeasured(uint32_t part, uint32_t rank, const MeasuredStep& measured) override {
    ranks_[rank].OnMeasured(part, measured);
  }
  void OnResult(uint32_t part, uint32_t rank, const ClosedPart& closed) override {
    ranks_[rank].OnResult(part, closed);
  }
  void OnBegun(uint32_t part, uint32_t rank, uint64_t step) override;
  void Count(PartsKind kind) override { ++counts_[static_cast<size_t>(kind)]; }

  void Advance();
  bool Calm();
  uint64_t last_closed() const;
  void Fail(const std::string& what);
  void Fault();
  void FaultOfAll(uint64_t what);
  void FaultOfPart(uint32_t part, uint64_t what);
  void FaultOfRank(uint32_t rank, uint64_t what);
  void FaultOfConnection(uint32_t part, uint32_t rank, uint64_t what);

  const PartsOptions options_;
  Timeline& timeline_;
  PartsLedger ledger_;
  PartsWorld world_;
  const double patience_s_;  // of the daemons, for a rank that is away
  const uint64_t fault_every_;
  std::vector<PartsRank> ranks_;
  double ticked_s_ = 0;
  std::optional<uint64_t> last_step_;  // faults are over; it ends when all ranks have made this step
  uint64_t calm_since_ = 0;            // events
  PartsCounts counts_ = {};
};

}  // namespace ballast::sim
