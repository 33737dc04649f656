#include "client/cpp/ctl/run_text.h"

#include "absl/strings/ascii.h"
#include "absl/strings/str_cat.h"
#include "absl/strings/str_format.h"
#include "absl/strings/strip.h"

#include "client/cpp/ctl/table.h"

namespace ballast::ctl {

std::string StateText(const v1::RunStatus& run) {
  const std::string state = absl::AsciiStrToLower(absl::StripPrefix(v1::RunState_Name(run.state()), "RUN_STATE_"));
  if (run.state() == v1::RUN_STATE_IDLE)
    return absl::StrCat(state, ", no step for ", Duration(run.since_step_seconds()));
  if (!run.has_idle_seconds() || run.state() == v1::RUN_STATE_FAILED) return state;
  const std::string since = Duration(run.idle_seconds());
  return run.state() == v1::RUN_STATE_FINISHED ? absl::StrCat(state, " ", since, " ago")
                                               : absl::StrCat(state, " for trainers for ", since);
}

std::string AwaitedText(const v1::AwaitedRank& rank) {
  return absl::StrCat("rank ", rank.rank(), rank.connected() ? "" : " (not connected)", ", which ", rank.what(),
                      ", for ", Duration(rank.seconds()));
}

std::string FollowText(const v1::FollowStatus& follow) {
  if (follow.readers() == 0) return "nobody";
  std::string text = absl::StrCat(follow.readers(), follow.readers() == 1 ? " reader" : " readers");
  if (!follow.has_newest()) return absl::StrCat(text, "; no version yet");
  absl::StrAppend(&text, "; version of step ", follow.newest().step(), ", ", Bytes(follow.version_bytes()));
  if (follow.change_bytes() > 0) {
    absl::StrAppend(&text, absl::StrFormat("; it has changed %.3g %%, ", 100 * follow.changed_ratio()),
                    Bytes(follow.change_bytes()));
  }
  if (follow.behind_seconds() > 0) absl::StrAppend(&text, "; one is behind for ", Duration(follow.behind_seconds()));
  return text;
}

std::string RelayText(const v1::RelayStatus& relay) {
  std::string text = relay.upstream();
  if (relay.relays_above() > 0) absl::StrAppend(&text, ", itself a relay");
  absl::StrAppend(&text, relay.connected() ? absl::StrCat(", for ", DurationSince(relay.connected_since_unix_s()))
                                           : absl::StrCat("; not connected: ", relay.failure()));
  if (relay.closed_unix_s() > 0)
    absl::StrAppend(&text, "; the weights here are ", DurationSince(relay.closed_unix_s()), " old");
  return absl::StrCat(text, "; ", Bytes(relay.received_bytes()), " received");
}

std::string DurabilityText(const v1::DurabilityStatus& durability) {
  std::string text = durability.durable_step() == 0
                         ? "no step yet"
                         : absl::StrCat("step ", durability.durable_step(), "; newest checkpoint ",
                                        Bytes(durability.checkpoint_bytes()), ", written ",
                                        Duration(durability.checkpoint_age_s()), " ago");
  if (durability.writing()) text += "; a checkpoint is being written";
  if (!durability.last_failure().empty()) {
    absl::StrAppend(&text, "; the last checkpoint failed: ", durability.last_failure());
  }
  if (!durability.journal_failure().empty()) {
    absl::StrAppend(&text, "; the journal failed, until the next checkpoint: ", durability.journal_failure());
  }
  return text;
}

std::string MatterText(const v1::RunStatus& run) {
  if (run.has_relay() && !run.relay().connected())
    return absl::StrCat("nothing comes from ", run.relay().upstream(), ": ", run.relay().failure());
  if (!run.failure().empty())
    return absl::StrCat(run.state() == v1::RUN_STATE_FAILED ? "lost: " : "stopped: ", run.failure());
  const v1::DurabilityStatus& durability = run.durability();
  if (!durability.last_failure().empty())
    return absl::StrCat("the last checkpoint failed: ", durability.last_failure());
  if (!durability.journal_failure().empty())
    return absl::StrCat("the journal failed, until the next checkpoint: ", durability.journal_failure());
  if (run.parts() == 0) return "";
  return absl::StrCat("part ", run.part(), " of ", run.parts(),
                      ", and not the whole run: name all its daemons, --server A,B,..., in their order");
}

std::string OutcomeName(v1::StepOutcome outcome) {
  return absl::AsciiStrToLower(absl::StripPrefix(v1::StepOutcome_Name(outcome), "STEP_OUTCOME_"));
}

uint64_t StoredBytes(const v1::ByteCounts& bytes) {
  return bytes.weights() + bytes.momentum() + bytes.variance() + bytes.averages();
}

uint64_t TotalBytes(const v1::ByteCounts& bytes) {
  return StoredBytes(bytes) + bytes.gradients() + bytes.staging() + bytes.snapshots() + bytes.client_state() +
         bytes.following();
}

}  // namespace ballast::ctl
