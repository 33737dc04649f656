// What the ranks of a step must agree on: the values they begin and end it with, and the number of micro-batches.
#include <algorithm>
#include <vector>

#include "absl/strings/str_cat.h"
#include "absl/strings/str_split.h"
#include "absl/strings/string_view.h"

#include "server/step/step_machine.h"

namespace ballast {
namespace {

struct Said {
  uint32_t rank = 0;
  absl::string_view content;
};

// The first value in which two contents that differ do: "rank 1 gives lr = 2, rank 0 gives lr = 1".
std::string FirstDifference(const Said& a, const Said& b) {
  const std::vector<absl::string_view> lines[] = {absl::StrSplit(a.content, '\n'), absl::StrSplit(b.content, '\n')};
  size_t i = 0;
  const auto line = [&](size_t which) { return i < lines[which].size() ? lines[which][i] : ""; };
  while (line(0) == line(1) && i < std::max(lines[0].size(), lines[1].size())) ++i;
  const auto said = [](absl::string_view value) { return value.empty() ? "nothing more" : value; };
  return absl::StrCat("rank ", a.rank, " gives ", said(line(0)), ", rank ", b.rank, " gives ", said(line(1)));
}

}  // namespace

std::string StepMachine::BeginConflict(uint32_t rank, const std::string& content) const {
  return absl::StrCat("StepBegin of step ", step_, ": ",
                      FirstDifference({rank, content}, {begin_rank_, begin_content_}),
                      "; all must give the same to the bit");
}

// In staged a micro-batch that is not said to be the last may turn out to be so; in release another one follows it.
std::string StepMachine::MicroConflict(uint32_t rank, uint32_t micro, bool last) const {
  const uint32_t follow = options_.commit == Commit::kStaged ? 0 : 1;
  for (uint32_t r = 0; r < ranks_.size(); ++r) {
    if (r == rank || !InStep(r)) continue;
    const auto theirs = reduction_.last_micro(r);
    const uint32_t begun = reduction_.micros_begun(r);
    const bool fewer = theirs && *theirs < micro + (last ? 0 : follow);
    const bool more = last && (theirs ? *theirs > micro : begun + follow > micro + 1);
    if (!fewer && !more) continue;
    const auto at_least = [](bool exact, uint32_t count) { return absl::StrCat(exact ? "" : "at least ", count); };
    return absl::StrCat("the ranks' micro-batches differ: rank ", rank, " has ",
                        at_least(last, micro + 1 + (last ? 0 : follow)), ", rank ", r, " has ",
                        at_least(theirs.has_value(), theirs ? *theirs + 1 : begun + follow));
  }
  return "";
}

absl::Status StepMachine::CheckEnd(uint32_t rank, const event::StepEnd& e) const {
  const bool release = options_.commit == Commit::kRelease;
  if (e.discard && release) {
    return absl::FailedPreconditionError(
        absl::StrCat("StepEnd of step ", step_,
                     " discards it, but the run's commit is release, and tensors may have been updated: create the run "
                     "with commit = staged"));
  }
  if (!e.discard) {
    if (auto s = CheckSent(rank, "StepEnd"); !s.ok()) return s;
  }
  if (!e.content.empty() && release) {
    return absl::FailedPreconditionError(
        absl::StrCat("StepEnd of step ", step_,
                     " brings values (groups or max_grad_norm), but the run's commit is release, and tensors may have "
                     "been updated: give those of groups with StepBegin, or create the run with commit = staged"));
  }
  const Rank& r = ranks_[rank];
  if (!r.ended || (r.end_content == e.content && r.discards == e.discard)) return absl::OkStatus();
  return absl::FailedPreconditionError(
      absl::StrCat("StepEnd of step ", step_, " came again with other values; it must repeat them to the bit"));
}

bool StepMachine::EndsConflict(uint32_t rank, StepEffects* effects) {
  if (discarded_) return false;
  const std::string& mine = ranks_[rank].end_content;
  for (uint32_t r = 0; r < ranks_.size(); ++r) {
    if (!InStep(r) || !ranks_[r].ended || ranks_[r].end_content == mine) continue;
    Close(Outcome::kAborted, "disagreement",
          absl::StrCat("StepEnd of step ", step_, ": ", FirstDifference({rank, mine}, {r, ranks_[r].end_content}),
                       "; all must give the same to the bit"),
          effects);
    return true;
  }
  return false;
}

}  // namespace ballast
