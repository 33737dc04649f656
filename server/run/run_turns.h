// The order of what is asked for with each run: while something with it is under way, which takes long and goes on
// elsewhere, what is asked for later waits. What is asked for with other runs does not.
//
//   RunTurns turns;
//   turns.Take("r1", [] {...});   // at once, where nothing is under way with the run
//   turns.Begin("r1");            // in such a task: from now on something is
//   turns.End("r1");              // what waited has its turn
//
// Strand-confined.
#pragma once

#include <deque>
#include <map>
#include <string>

#include "absl/functional/any_invocable.h"

namespace ballast {

class RunTurns {
 public:
  using Task = absl::AnyInvocable<void()>;

  void Take(const std::string& run_id, Task task);
  void Begin(const std::string& run_id) { waiting_.try_emplace(run_id); }
  void End(const std::string& run_id);
  bool under_way(const std::string& run_id) const { return waiting_.contains(run_id); }

 private:
  std::map<std::string, std::deque<Task>> waiting_;  // by runs with which something is under way
};

}  // namespace ballast
