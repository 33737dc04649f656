// The links to all ranks that a run may have. Strand-confined.
#pragma once

#include <cstdint>
#include <deque>
#include <optional>
#include <string>
#include <vector>

#include "server/run/rank_link.h"
#include "server/run/run_status.h"
#include "server/step/step_machine.h"

namespace ballast {

class RankLinks {
 public:
  RankLinks(uint32_t ranks, const RankLink::Environment& environment) {
    for (uint32_t rank = 0; rank < ranks; ++rank) links_.emplace_back(environment);
  }

  uint32_t size() const { return static_cast<uint32_t>(links_.size()); }
  RankLink& operator[](uint32_t rank) { return links_[rank]; }
  const RankLink& operator[](uint32_t rank) const { return links_[rank]; }
  auto begin() { return links_.begin(); }
  auto end() { return links_.end(); }
  auto begin() const { return links_.begin(); }
  auto end() const { return links_.end(); }

  // Whose stream it is; none: it has been left, or its link closed.
  std::optional<uint32_t> RankOf(const RankStream* stream) const;
  bool any_sending() const;
  uint64_t buffer_bytes() const;  // reserved, by all outboxes
  // What they look like from outside, by rank: of those that the machine's world has.
  std::vector<RankStatus> Status(const StepMachine& machine) const;

 private:
  std::deque<RankLink> links_;  // none is ever added or moved
};

}  // namespace ballast
