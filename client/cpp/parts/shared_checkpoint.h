// The newest checkpoint that all daemons of a run have said to have, which each of them is told to keep: else one that
// writes more of them than another, when it is told to or while the other's disk is full, would retire the last step that
// the run can go back to when a daemon is lost. Thread-compatible.
//
//   SharedCheckpoint shared(parts);
//   shared.Note(part, result.checkpoint_step());   // with each result
//   end.set_kept_step(shared.newest());            // 0: none is known
#pragma once

#include <cstddef>
#include <cstdint>
#include <limits>
#include <set>
#include <vector>

#include "client/cpp/parts/step_of_all.h"

namespace ballast {

class SharedCheckpoint {
 public:
  explicit SharedCheckpoint(uint32_t parts = 1) : said_(parts) {}

  // The part's newest is of this step; 0: it has none, or does not know.
  void Note(uint32_t part, uint64_t step) {
    std::set<uint64_t>& said = said_[part];
    if (step == 0 || !said.insert(step).second) return;
    if (said.size() > kMostSteps) said.erase(said.begin());
    if (const auto common = LastCommonStep(said_, std::numeric_limits<uint64_t>::max())) newest_ = *common;
  }
  uint64_t newest() const { return newest_; }

 private:
  // Of each part. One that writes none for longer than others write so many has none in common with them until it does.
  static constexpr size_t kMostSteps = 64;

  std::vector<std::set<uint64_t>> said_;
  uint64_t newest_ = 0;
};

}  // namespace ballast
