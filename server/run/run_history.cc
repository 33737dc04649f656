#include "server/run/run_history.h"

#include <algorithm>
#include <utility>

namespace ballast {

void RunHistory::Add(StepRecord record) {
  record.not_applied = std::vector<uint32_t>();
  absl::MutexLock lock(&mu_);
  records_.push_back(std::move(record));
  if (records_.size() > kSteps) records_.pop_front();
}

std::vector<StepRecord> RunHistory::Since(uint64_t after, size_t most) const {
  absl::MutexLock lock(&mu_);
  // A step that was rewound from and made anew stands where it was made anew.
  auto first = records_.end();
  while (first != records_.begin() && std::prev(first)->step > after &&
         static_cast<size_t>(records_.end() - first) < most) {
    --first;
  }
  return {first, records_.end()};
}

}  // namespace ballast
