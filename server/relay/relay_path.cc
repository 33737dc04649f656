#include "server/relay/relay_path.h"

#include <algorithm>
#include <random>
#include <utility>

#include "absl/strings/str_cat.h"

namespace ballast {
namespace {

uint64_t DrawId() {
  std::random_device random;
  return uint64_t{random()} << 32 | random();
}

}  // namespace

RelayPath::RelayPath(std::string upstream) : upstream_(std::move(upstream)), id_(DrawId()) {}

absl::Status RelayPath::Learn(const v1::GetServerResponse& server) {
  std::vector<uint64_t> above;
  if (server.has_relay()) {
    above.push_back(server.relay().id());
    above.insert(above.end(), server.relay().above().begin(), server.relay().above().end());
  }
  const bool circle = std::find(above.begin(), above.end(), id_) != above.end();
  const bool deep = above.size() >= kMostRelays;
  // One that is part of no circle, and follows one, is told of more and more: what is kept has an end.
  above.resize(std::min(above.size(), kMostRelays));
  absl::MutexLock lock(&mu_);
  above_ = std::move(above);
  if (circle) {
    return absl::FailedPreconditionError(absl::StrCat(
        "relay.upstream, ", upstream_,
        ", is this very relay, or follows it: no daemon in this circle trains; give one of them another upstream"));
  }
  if (!deep) return absl::OkStatus();
  return absl::FailedPreconditionError(
      absl::StrCat("above relay.upstream, ", upstream_, ", are ", kMostRelays,
                   " relays already, or it follows some that follow each other in a circle"));
}

v1::RelayInfo RelayPath::info() const {
  v1::RelayInfo info;
  info.set_upstream(upstream_);
  info.set_id(id_);
  absl::MutexLock lock(&mu_);
  info.mutable_above()->Add(above_.begin(), above_.end());
  return info;
}

}  // namespace ballast
