// Steps that wait for long: which ranks they wait for, and what those have not sent.
#include <algorithm>
#include <string>
#include <utility>
#include <vector>

#include "absl/strings/str_cat.h"
#include "absl/strings/str_join.h"

#include "server/step/step_machine.h"

namespace ballast {
namespace {

constexpr size_t kMostNamed = 4;  // ranks
constexpr double kMomentS = 1;    // of waiting that nobody need be told of

// The first few, and how many more there are.
std::string Join(std::vector<std::string> texts) {
  const size_t more = texts.size() > kMostNamed ? texts.size() - kMostNamed : 0;
  texts.resize(texts.size() - more);
  return absl::StrCat(absl::StrJoin(texts, "; "), more > 0 ? absl::StrCat("; and ", more, " more") : "");
}

}  // namespace

void StepMachine::CountAwaited(double now_s) {
  const double seen_s = now_s - std::max(ticked_at_s_, opened_at_s_);
  ticked_at_s_ = now_s;
  if (!open_) return;
  for (uint32_t r = 0; r < ranks_.size(); ++r) {
    if (CouldSend(r)) ranks_[r].awaited_s += std::min(seen_s, options_.counted_tick_s);
  }
}

// At any time some rank could send, or the device is at work: of the ranks that lack the wanted chunk each has credit
// or may send it beyond; and where none is wanted, a rank has not begun the micro-batch that it may, or a slab is read.
bool StepMachine::CouldSend(uint32_t rank) {
  if (reduction_.left_out(rank)) return false;
  const Rank& r = ranks_[rank];
  // The rank may not begin before it has the result of the last step, which waits for the device.
  if (!InStep(rank)) return !connected(rank) || r.lacking == 0 || r.told == closed_step_;
  if (r.ended) return false;
  if (connected(rank) && r.said_measure && !r.told_norm) return false;  // it waits for the others, or for the device
  const uint32_t begun = reduction_.micros_begun(rank);
  if (begun == 0 || !connected(rank)) return true;
  if (reduction_.lacking(rank, begun - 1) > 0) return !ranks_[rank].short_of_credit || Wanted(rank);
  const bool done = reduction_.ended(rank, begun - 1) && reduction_.last_micro(rank) != begun - 1;
  return !done || reduction_.MayBegin(begun);
}

void StepMachine::CloseOverdue(StepEffects* effects) {
  if (!open_ || options_.step_timeout_s <= 0) return;
  std::vector<std::string> missing;
  for (uint32_t r = 0; r < ranks_.size(); ++r) {
    if (!Overdue(r) || !CouldSend(r)) continue;
    missing.push_back(absl::StrCat(Called(r), " ", Missing(r, /*look=*/true)));
  }
  if (missing.empty()) return;
  if (options_.is_part && measured_) return Proceed(effects);  // another part may be past it: see OthersBringVerdict
  CloseAsFarAs("timeout",
               absl::StrCat("step ", step_, " waited for ranks for longer than step_timeout, ", options_.step_timeout_s,
                            " s: ", Join(std::move(missing)),
                            ". See what they do, or create the run with a larger step_timeout_s"),
               effects);
}

// --- for people -------------------------------------------------------------------------------------------------------

std::vector<AwaitedRank> StepMachine::Awaited() {
  std::vector<AwaitedRank> awaited;
  if (!open_) return awaited;
  LookThroughOne();
  for (uint32_t r = 0; r < ranks_.size(); ++r) {
    if (WaitsFor(r)) awaited.push_back({r, Missing(r, /*look=*/false), ranks_[r].awaited_s, connected(r)});
  }
  return awaited;
}

bool StepMachine::WaitsFor(uint32_t rank) { return ranks_[rank].awaited_s >= kMomentS && CouldSend(rank); }

void StepMachine::LookThroughOne() {
  for (uint32_t i = 0; i < world(); ++i) {
    const uint32_t rank = (look_next_ + i) % world();
    const uint32_t begun = reduction_.micros_begun(rank);
    if (begun == 0 || !WaitsFor(rank)) continue;
    Lack& lack = ranks_[rank].lack;
    const uint64_t chunks = reduction_.lacking(rank, begun - 1);
    if (chunks == 0 || (lack.micro == begun - 1 && lack.chunks == chunks)) continue;
    lack = {.micro = begun - 1, .chunks = chunks, .text = LackOf(rank, begun - 1)};
    look_next_ = rank + 1;
    return;
  }
}

std::string StepMachine::Called(uint32_t rank) const {
  return absl::StrCat("rank ", rank, connected(rank) ? "" : " (not connected)");
}

std::string StepMachine::MissingOfOthers(uint32_t rank) const {
  std::vector<std::string> missing;
  for (uint32_t r = 0; r < ranks_.size(); ++r) {
    const std::string what = r == rank ? "" : Missing(r, /*look=*/false);
    if (!what.empty()) missing.push_back(absl::StrCat(Called(r), " ", what));
  }
  return Join(std::move(missing));
}

// Why no process may take the rank now: its last one's part of the open step is in.
std::string StepMachine::FinishDetail(uint32_t rank) const {
  const std::string others = MissingOfOthers(rank);
  return absl::StrCat("step ", step_,
                      ranks_[rank].discards ? ", which the rank's last process discarded, closes when all have ended it"
                                            : " is being finished with what the rank's last process sent",
                      others.empty() ? "" : absl::StrCat(", and ", others), "; attach again");
}

std::string StepMachine::Missing(uint32_t rank, bool look) const {
  const Rank& r = ranks_[rank];
  if (reduction_.left_out(rank)) return "";
  if (!InStep(rank) && !r.session) return r.came ? "has no process any more" : "has no process yet";
  if (!InStep(rank)) return "has not begun it";
  if (r.ended) return "";
  if (discarded_) return "has not ended it, which another rank discards";
  const uint32_t begun = reduction_.micros_begun(rank);
  if (begun == 0) return "has sent nothing but StepBegin";
  if (std::string rest = MissingOfMicro(rank, begun - 1, look); !rest.empty()) return rest;
  const bool all = reduction_.ended(rank, begun - 1) && reduction_.last_micro(rank) == begun - 1;
  return absl::StrCat(all ? "has not sent StepEnd" : "has not gone on", " after micro-batch ", begun - 1);
}

std::string StepMachine::MissingOfMicro(uint32_t rank, uint32_t micro, bool look) const {
  if (reduction_.lacking(rank, micro) == 0) {
    return reduction_.ended(rank, micro) ? "" : absl::StrCat("has not sent MicroEnd of micro-batch ", micro);
  }
  if (look) return LackOf(rank, micro);
  const Lack& lack = ranks_[rank].lack;
  if (lack.chunks > 0 && lack.micro == micro) return lack.text;
  return absl::StrCat("lacks gradients in micro-batch ", micro);
}

std::string StepMachine::LackOf(uint32_t rank, uint32_t micro) const {
  const bool ended = reduction_.ended(rank, micro);
  size_t missing = 0;
  std::string first;
  for (uint32_t i = 0; i < tensors_.size(); ++i) {
    if (reduction_.count(rank, micro, i) == reduction_.covered(rank, i)) continue;
    if (ended && reduction_.absent(rank, micro)[i]) continue;
    if (missing++ == 0) first = Name(i);
  }
  return absl::StrCat("lacks ", missing, " of ", tensors_.size(), " tensors in micro-batch ", micro, ", the first ",
                      first);
}

}  // namespace ballast
