#include "server/run/rank_links.h"

#include <algorithm>

namespace ballast {

std::optional<uint32_t> RankLinks::RankOf(const RankStream* stream) const {
  for (uint32_t rank = 0; rank < size(); ++rank) {
    if (links_[rank].stream().get() == stream) return rank;
  }
  return std::nullopt;
}

bool RankLinks::any_sending() const {
  return std::any_of(links_.begin(), links_.end(), [](const RankLink& link) { return link.sending(); });
}

uint64_t RankLinks::buffer_bytes() const {
  uint64_t bytes = 0;
  for (const RankLink& link : links_) bytes += link.buffer_bytes();
  return bytes;
}

std::vector<RankStatus> RankLinks::Status(const StepMachine& machine) const {
  std::vector<RankStatus> ranks;
  for (uint32_t rank = 0; rank < machine.world(); ++rank) {
    ranks.push_back({.peer = machine.session(rank) ? links_[rank].peer() : "",
                     .transport = links_[rank].transport(),
                     .connected = machine.connected(rank),
                     .disconnected_at_s = machine.disconnected_at_s(rank)});
  }
  return ranks;
}

}  // namespace ballast
