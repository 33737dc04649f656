// What goes wrong around a run on several daemons.
#include <utility>

#include "tests/server/step/parts_simulator_run.h"

namespace ballast::sim {

void PartsSimulator::Fault() {
  const uint64_t what = Below(&timeline_.random, 100);
  const auto part = static_cast<uint32_t>(Below(&timeline_.random, world_.parts()));
  const auto rank = static_cast<uint32_t>(Below(&timeline_.random, ranks_.size()));
  if (what < 6) return FaultOfAll(what);
  if (what < 20) return FaultOfPart(part, what);
  if (what < 42) return FaultOfRank(rank, what);
  FaultOfConnection(part, rank, what);
}

// All ranks' processes end at once, also in the middle of their saying how a step ends.
void PartsSimulator::FaultOfAll(uint64_t) {
  Count(PartsKind::kAllDeaths);
  for (PartsRank& rank : ranks_)
    rank.Start(timeline_.Delay(3), Chance(&timeline_.random, 2), Chance(&timeline_.random, 2));
}

void PartsSimulator::FaultOfPart(uint32_t part, uint64_t what) {
  PartDaemon& daemon = *world_.daemons[part];
  if (!daemon.up()) return;
  if (what < 14) {
    if (!daemon.MayDie()) return;
    Count(PartsKind::kDaemonDeath);
    return daemon.Die();
  }
  const std::set<uint64_t> kept = daemon.kept();
  if (kept.empty()) return;
  auto to = kept.begin();
  std::advance(to, static_cast<long>(Below(&timeline_.random, kept.size())));
  if (daemon.GoBack(*to)) Count(PartsKind::kPartRewound);
}

void PartsSimulator::FaultOfRank(uint32_t rank, uint64_t what) {
  if (what < 34) {
    Count(PartsKind::kDeath);
    return ranks_[rank].Start(timeline_.Delay(3), Chance(&timeline_.random, 2), Chance(&timeline_.random, 2));
  }
  if (what < 37) {
    Count(PartsKind::kTimeout);
    return ranks_[rank].Start(patience_s_ + timeline_.Delay(20), false, Chance(&timeline_.random, 2));
  }
  ranks_[rank].DisagreeNext();
}

void PartsSimulator::FaultOfConnection(uint32_t part, uint32_t rank, uint64_t what) {
  PartDaemon& daemon = *world_.daemons[part];
  if (what < 65) {
    Count(PartsKind::kCut);
    daemon.Cut(rank, timeline_.Delay(3));
  } else if (what < 75) {
    Count(PartsKind::kDeaf);
    daemon.Silence(rank, /*to_client=*/true);
  } else if (what < 85) {
    Count(PartsKind::kMute);
    daemon.Silence(rank, /*to_client=*/false);
  } else if (what < 95) {
    Count(PartsKind::kTimeout);
    daemon.Cut(rank, patience_s_ + timeline_.Delay(20));
  } else if (daemon.client(rank) != nullptr) {
    daemon.client(rank)->CorruptNext();
  }
}

}  // namespace ballast::sim
