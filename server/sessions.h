// Session tokens: 16 random bytes that name a session of a run's rank. Tokens of sessions that are over are known for a
// while, so that who shows one learns that it is over.
//
// Thread-safe. Bounded: kRemembered tokens a run.
#pragma once

#include <cstdint>
#include <deque>
#include <optional>
#include <string>

#include "absl/base/thread_annotations.h"
#include "absl/container/flat_hash_map.h"
#include "absl/strings/string_view.h"
#include "absl/synchronization/mutex.h"

#include "server/step_machine.h"

namespace ballast {

class Sessions {
 public:
  static constexpr size_t kTokenBytes = 16;
  static constexpr size_t kRemembered = 64;
  struct Session {
    std::string run_id;
    SessionId id = {};
  };

  // Never the same twice, whatever becomes of it.
  SessionId NewId();
  // A token for a session that was attached.
  std::string Issue(const Session& session);
  std::optional<Session> Find(absl::string_view token) const;
  void Forget(absl::string_view run_id);

 private:
  mutable absl::Mutex mu_;
  uint64_t last_id_ ABSL_GUARDED_BY(mu_) = 0;
  absl::flat_hash_map<std::string, Session> by_token_ ABSL_GUARDED_BY(mu_);
  absl::flat_hash_map<std::string, std::deque<std::string>> of_run_ ABSL_GUARDED_BY(mu_);
};

}  // namespace ballast
