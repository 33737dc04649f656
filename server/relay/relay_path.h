// The relays between this one and the daemon that trains, by the ids that each draws when it starts: so that relays which
// follow each other in a circle find out. Thread-safe.
#pragma once

#include <cstdint>
#include <string>
#include <vector>

#include "absl/base/thread_annotations.h"
#include "absl/status/status.h"
#include "absl/synchronization/mutex.h"

#include "ballast/v1/admin.pb.h"

namespace ballast {

class RelayPath {
 public:
  static constexpr size_t kMostRelays = 16;  // one above the other

  explicit RelayPath(std::string upstream);
  // What the upstream says of itself. FAILED_PRECONDITION: it is this very relay, or follows it by way of others; or there
  // are too many.
  absl::Status Learn(const v1::GetServerResponse& server);
  v1::RelayInfo info() const;

 private:
  const std::string upstream_;
  const uint64_t id_;
  mutable absl::Mutex mu_;
  std::vector<uint64_t> above_ ABSL_GUARDED_BY(mu_);  // the nearest first
};

}  // namespace ballast
