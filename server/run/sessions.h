// Session tokens: 16 random bytes that name a session of a run's rank. A rank's latest is known as long as its run;
// those before it, whose sessions are over, for a while, so that who shows one learns that it is over. By the latest, though
// a rewind has ended its session, the daemon knows of whom a keepalive is (step/step_machine.h).
//
// Thread-safe. Bounded: a token for each of a run's ranks and kRemembered more.
#pragma once

#include <cstdint>
#include <deque>
#include <optional>
#include <string>

#include "absl/base/thread_annotations.h"
#include "absl/container/flat_hash_map.h"
#include "absl/strings/string_view.h"
#include "absl/synchronization/mutex.h"

#include "server/access/access_list.h"
#include "server/step/step_machine.h"

namespace ballast {

class Sessions {
 public:
  static constexpr size_t kTokenBytes = 16;
  static constexpr size_t kRemembered = 64;
  struct Session {
    std::string run_id;
    SessionId id = {};
    uint32_t rank = 0;
    Caller caller = {};  // who attached
  };

  // Never the same twice, whatever becomes of it.
  SessionId NewId();
  // A token for a session that was attached: the rank's latest, unless a later one has its token already.
  std::string Issue(const Session& session);
  std::optional<Session> Find(absl::string_view token) const;
  // The session was resumed, perhaps by another caller, whose right counts from now on.
  void Resume(absl::string_view token, const Caller& caller);
  void Forget(absl::string_view run_id);

 private:
  struct Tokens {
    absl::flat_hash_map<uint32_t, std::string> latest;  // by rank
    std::deque<std::string> over;                       // oldest first
  };

  mutable absl::Mutex mu_;
  uint64_t last_id_ ABSL_GUARDED_BY(mu_) = 0;
  absl::flat_hash_map<std::string, Session> by_token_ ABSL_GUARDED_BY(mu_);
  absl::flat_hash_map<std::string, Tokens> of_run_ ABSL_GUARDED_BY(mu_);
};

}  // namespace ballast
