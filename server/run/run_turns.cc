#include "server/run/run_turns.h"

#include <utility>

namespace ballast {

void RunTurns::Take(const std::string& run_id, Task task) {
  const auto waiting = waiting_.find(run_id);
  if (waiting == waiting_.end()) return task();
  waiting->second.push_back(std::move(task));
}

void RunTurns::End(const std::string& run_id) {
  const auto over = waiting_.extract(run_id);
  // One of them may begin something again: then those behind it wait for that, in their order.
  for (Task& task : over.mapped()) Take(run_id, std::move(task));
}

}  // namespace ballast
