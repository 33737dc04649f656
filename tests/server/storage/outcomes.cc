#include "tests/server/storage/outcomes.h"

namespace ballast {

Outcomes::Outcomes(const ModelFs& fs, uint64_t limit, uint64_t seed) : fs_(fs), seed_(seed) {
  do {
    Follow();
    are_all_ = ++size_ <= limit;
  } while (are_all_ && Advance());
  if (!are_all_) size_ = limit;
  choices_.clear();
}

// The state that the choices lead to; where they end, what is not synced is lost.
std::unique_ptr<ModelFs> Outcomes::Follow() {
  size_t at = 0;
  return fs_.AfterCut([&](uint64_t options) {
    if (at == choices_.size()) choices_.push_back({.options = options});
    return choices_[at++].chosen;
  });
}

// To the next choices in order. false: these were the last.
bool Outcomes::Advance() {
  while (!choices_.empty() && choices_.back().chosen + 1 == choices_.back().options) choices_.pop_back();
  if (choices_.empty()) return false;
  ++choices_.back().chosen;
  return true;
}

std::unique_ptr<ModelFs> Outcomes::Next() {
  if (given_ == size_) return nullptr;
  const uint64_t index = given_++;
  if (!are_all_) return fs_.AfterCut(index <= 1 ? index : (seed_ << 32) + index);
  auto state = Follow();
  Advance();
  return state;
}

}  // namespace ballast
