// Sessions that are over: how each ended, for a client that comes back with its token.
#include <algorithm>

#include "absl/strings/str_cat.h"
#include "proto/rewound.h"
#include "proto/session_over.h"

#include "server/step/step_machine.h"

namespace ballast {
namespace {

// How many ended sessions are remembered: far more than tokens are.
constexpr size_t kMostOver = 256;

}  // namespace

void StepMachine::Remember(uint32_t rank, Ending how) {
  if (over_.size() == kMostOver) over_.erase(over_.begin());
  const uint64_t of = how == Ending::kRewound ? generation_ - 1 : generation_;
  over_.push_back({*ranks_[rank].session, rank, of, how});
}

absl::Status StepMachine::CheckCurrent(SessionId session) const {
  if (RankOf(session)) return absl::OkStatus();
  const auto over = std::find_if(over_.begin(), over_.end(), [&](const Over& o) { return o.session == session; });
  switch (over == over_.end() ? Ending::kAway : over->how) {
    case Ending::kAway:
      return SessionOverError();
    case Ending::kTaken:
      return absl::AbortedError("this session is over: another process took the rank over");
    case Ending::kLeft:
      return absl::AbortedError("this session is over: its client gave the rank back");
    case Ending::kDataLoss:
      return absl::AbortedError("this session is over: a chunk came twice with different bytes");
    case Ending::kRewound:
      return RewoundError(rewound_to_, generation_);
    case Ending::kWorld:
      return absl::FailedPreconditionError(absl::StrCat("this session is of generation ", over->generation,
                                                        " of the run, which is at generation ", generation_, ", step ",
                                                        step_, "; attach again without its token"));
  }
  return SessionOverError();
}

}  // namespace ballast
