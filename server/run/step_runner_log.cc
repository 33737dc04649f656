// What the step runner tells the log of: ranks that are gone, and steps that were not applied whole.
#include "server/base/log.h"
#include "server/run/step_runner.h"

namespace ballast {

// Of a stream that was not taken: as with any other request.
void StepRunner::LogRefused(const RankStream& stream, const absl::Status& why) const {
  Log(LogLevel::kWarn, "refused", "a request was refused",
      {{"run_id", environment_.spec->run_id},
       {"reason", absl::StatusCodeToString(why.code())},
       {"peer", stream.peer()},
       {"method", "Train"},
       {"err", std::string(why.message())}});
}

// Of a stream, or of a session without one.
void StepRunner::LogEnd(uint32_t rank, const absl::Status& why) const {
  if (why.ok()) return;
  const bool orderly = absl::IsUnavailable(why);  // the daemon is shutting down
  const LogLevel level = absl::IsDataLoss(why) ? LogLevel::kError : orderly ? LogLevel::kInfo : LogLevel::kWarn;
  Log(level, "stream_ended", "a rank's stream or session was ended",
      {{"run_id", environment_.spec->run_id},
       {"rank", uint64_t{rank}},
       {"step", machine_.step()},
       {"reason", absl::StatusCodeToString(why.code())},
       {"peer", links_[rank].peer},
       {"lane", links_[rank].lane},
       {"err", std::string(why.message())}});
}

void StepRunner::LogExpiredLeases(double now_s) {
  for (uint32_t rank = 0; rank < machine_.world(); ++rank) {
    const bool away = machine_.session(rank) && !machine_.connected(rank);
    const bool over = away && now_s >= machine_.disconnected_at_s(rank) + environment_.spec->lease_s;
    if (over && !links_[rank].lease_over) {
      Log(LogLevel::kWarn, "lease_expired", "a rank was away for longer than its lease; another process may take it",
          {{"run_id", environment_.spec->run_id},
           {"rank", uint64_t{rank}},
           {"step", machine_.step()},
           {"peer", links_[rank].peer},
           {"dur_s", now_s - machine_.disconnected_at_s(rank)}});
    }
    links_[rank].lease_over = over;
  }
}

void StepRunner::LogTorn(const effect::Close& e) const {
  if (e.outcome != Outcome::kPartial && e.outcome != Outcome::kAborted) return;
  Log(LogLevel::kWarn, "step_torn", "a step was not applied, or in part",
      {{"run_id", environment_.spec->run_id},
       {"step", e.step},
       {"reason", e.reason},
       {"outcome", std::string(OutcomeName(e.outcome))},
       {"tensors_not_applied", uint64_t{e.not_applied.size()}},
       {"err", e.detail}});
}

}  // namespace ballast
