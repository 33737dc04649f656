// What must hold of the parts of a run together, whatever each of them does: a staged step is applied on all parts or on
// none, but where all ranks were lost that might have said so; then every rank is told that it is PARTIAL.
#pragma once

#include <cstdint>
#include <map>
#include <string>
#include <vector>

#include "ballast/v1/run.pb.h"
#include "tests/server/step/parts_simulator_daemon.h"

namespace ballast::sim {

class PartsLedger {
 public:
  explicit PartsLedger(bool staged) : staged_(staged) {}

  // A rank was told this of a step which the parts closed so. What it violates; empty: nothing.
  std::string Told(const std::vector<ClosedPart>& closed, const v1::StepResult& whole, bool live);
  // A rank has made this of what the parts measure; by tensor of the run, what they measured.
  std::string Measured(const std::vector<double>& squares, double norm);
  uint64_t torn() const { return torn_; }

 private:
  std::string CheckTorn(const std::vector<ClosedPart>& closed, const v1::StepResult& whole);
  std::string CheckVerdicts(const std::vector<ClosedPart>& closed);

  const bool staged_;
  uint64_t torn_ = 0;
  struct Saying {
    std::vector<ClosedPart> closed;  // by part
    std::string whole;
  };
  std::map<uint64_t, Saying> said_;  // by number of a closing: what live ranks were told
};

}  // namespace ballast::sim
