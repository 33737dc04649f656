#include "server/run/sessions.h"

#include <openssl/rand.h>

#include <cstdlib>
#include <utility>

namespace ballast {

SessionId Sessions::NewId() {
  absl::MutexLock lock(&mu_);
  return SessionId{++last_id_};
}

std::string Sessions::Issue(const Session& session) {
  std::string token(kTokenBytes, '\0');
  // Without randomness tokens could be guessed: better no daemon than that.
  if (RAND_bytes(reinterpret_cast<unsigned char*>(token.data()), kTokenBytes) != 1) std::abort();
  absl::MutexLock lock(&mu_);
  by_token_[token] = session;
  Tokens& tokens = of_run_[session.run_id];
  std::string& latest = tokens.latest[session.rank];
  std::string over = token;
  if (latest.empty() || by_token_[latest].id < session.id) std::swap(latest, over);
  if (over.empty()) return token;
  tokens.over.push_back(std::move(over));
  if (tokens.over.size() > kRemembered) {
    by_token_.erase(tokens.over.front());
    tokens.over.pop_front();
  }
  return token;
}

std::optional<Sessions::Session> Sessions::Find(absl::string_view token) const {
  absl::MutexLock lock(&mu_);
  const auto found = by_token_.find(token);
  if (found == by_token_.end()) return std::nullopt;
  return found->second;
}

void Sessions::Resume(absl::string_view token, const Caller& caller) {
  absl::MutexLock lock(&mu_);
  if (const auto found = by_token_.find(token); found != by_token_.end()) found->second.caller = caller;
}

void Sessions::Forget(absl::string_view run_id) {
  absl::MutexLock lock(&mu_);
  const auto run = of_run_.find(run_id);
  if (run == of_run_.end()) return;
  for (const auto& [rank, token] : run->second.latest) by_token_.erase(token);
  for (const std::string& token : run->second.over) by_token_.erase(token);
  of_run_.erase(run);
}

}  // namespace ballast
