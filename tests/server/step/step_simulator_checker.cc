#include "tests/server/step/step_simulator_checker.h"

#include <algorithm>
#include <utility>

#include "absl/strings/str_cat.h"
#include "proto/rewound.h"

namespace ballast::sim {

StepChecker::StepChecker(const RunShape& shape, Peers peers)
    : shape_(shape),
      peers_(peers),
      step_(shape.machine.first_step),
      tensors_(shape.machine.reduction.chunks.size()),
      version_(tensors_.size()),
      applied_(tensors_.size()) {
  ResetStep();
}

std::string StepChecker::Observe(const StepEvent& event, const StepEffects& effects, const StepMachine& machine) {
  event_ = &event;
  refused_ = !effects.empty() && std::holds_alternative<effect::Reject>(effects.front());
  chunk_ = nullptr;
  chunk_answers_ = 0;
  waited_for_slab_ = false;
  NoteLate(machine);
  std::visit([this](const auto& e) { Note(e); }, event);
  for (const StepEffect& effect : effects) {
    std::visit([this](const auto& e) { On(e); }, effect);
  }
  if (chunk_ != nullptr && chunk_answers_ != 1) Fail("a chunk was neither held nor dropped, or both");
  CheckResults();
  CheckEnds();
  CheckRewind(machine);
  if (machine.step() != step_ || machine.step_open() != open_) Fail("another step is open than the effects tell");
  return violation_;
}

// What the machine has found by a tick is lost where that closes the step.
void StepChecker::NoteLate(const StepMachine& machine) {
  const double timeout_s = shape_.machine.step_timeout_s;
  const bool may_be = timeout_s > 0 && std::holds_alternative<event::Tick>(*event_);
  for (uint32_t r = 0; r < ranks_.size(); ++r) {
    const bool counted = machine.step_open() && r < machine.world() && machine.awaited_s(r) >= timeout_s;
    ranks_[r].late = ranks_[r].late || (may_be && (counted || machine.step() != step_));
  }
}

void StepChecker::Fail(std::string what) {
  if (violation_.empty()) violation_ = std::move(what);
}

StepChecker::Rank* StepChecker::Speaker(SessionId session) {
  for (Rank& rank : ranks_) {
    if (rank.session == session) return rank.in_step && !refused_ ? &rank : nullptr;
  }
  return nullptr;
}

bool StepChecker::updating(uint64_t step) const {
  return std::any_of(slabs_.begin(), slabs_.end(),
                     [&](const LiveSlab& live) { return live.updating && !live.abandoned && live.step == step; });
}

StepChecker::LiveSlab* StepChecker::Live(uint64_t step, uint32_t tensor) {
  for (LiveSlab& live : slabs_) {
    if (live.step == step && live.tensor == tensor && !live.abandoned && !live.over) return &live;
  }
  return nullptr;
}

void StepChecker::ResetStep() {
  for (Rank& rank : ranks_) {
    rank = {.session = rank.session,
            .connected = rank.connected,
            .came = rank.came,
            .asks = rank.asks,
            .lacking = std::move(rank.lacking),
            .told = std::move(rank.told)};
  }
  ResetSums();
  open_ = false;
  judged_ = measured_ = discarded_ = false;
  verdict_.reset();
}

void StepChecker::ResetSums() {
  for (uint32_t i = 0; i < tensors_.size(); ++i) {
    tensors_[i] = {.sums = std::vector<std::vector<Term>>(shape_.machine.reduction.chunks[i])};
  }
  std::erase_if(slabs_, [](const LiveSlab& live) { return !live.updating && !live.reading; });
  for (LiveSlab& live : slabs_) live.over = live.over || live.reading;
}

// --- events ---

void StepChecker::Note(const event::StreamOpened& e) {
  for (Rank& rank : ranks_) {
    if (rank.session != e.session) continue;
    rank.connected = true;
    rank.said_measure = rank.told_norm = false;
    rank.told.clear();
  }
}

void StepChecker::Note(const event::StreamClosed& e) {
  for (Rank& rank : ranks_) {
    if (rank.session != e.session) continue;
    rank.connected = false;
    if (!e.clean || rank.in_step) continue;
    rank.session.reset();
    rank.lacking.clear();
  }
}

void StepChecker::Note(const event::StepBegin& e) {
  if (refused_) return;
  for (Rank& rank : ranks_) {
    if (rank.session == e.session) rank.lacking.erase(rank.lacking.begin(), rank.lacking.lower_bound(e.step));
  }
}

void StepChecker::BeginMicro(Rank* rank, bool last) {
  if (last) rank->last = static_cast<uint32_t>(rank->micros.size());
  rank->micros.push_back({.absent = std::vector<bool>(tensors_.size())});
}

void StepChecker::Note(const event::MicroBegin& e) {
  Rank* rank = Speaker(e.session);
  if (rank != nullptr && !discarded_ && e.micro == rank->micros.size()) BeginMicro(rank, e.last);
}

void StepChecker::Note(const event::Chunk& e) {
  known_payload_.reset();
  for (const Rank& rank : ranks_) {
    if (rank.session != e.session || !rank.in_step || rank.micros.size() <= e.micro) continue;
    const auto known = rank.micros[e.micro].delivered.find({e.tensor, e.chunk});
    if (known != rank.micros[e.micro].delivered.end()) known_payload_ = known->second;
  }
  if (refused_) return;
  chunk_ = &e;
  Rank* rank = Speaker(e.session);
  if (rank != nullptr && !discarded_ && rank->micros.empty()) BeginMicro(rank, /*last=*/true);
}

void StepChecker::Note(const event::MicroEnd& e) {
  Rank* rank = Speaker(e.session);
  if (rank == nullptr || discarded_) return;
  if (rank->micros.empty()) BeginMicro(rank, /*last=*/true);
  rank->micros[e.micro].ended = true;
  rank->micros[e.micro].absent = e.absent;
}

void StepChecker::Note(const event::TensorApplied& e) {
  // The device does a tensor's updates in order.
  const auto first = std::find_if(slabs_.begin(), slabs_.end(),
                                  [&](const LiveSlab& live) { return live.tensor == e.tensor && live.updating; });
  if (first != slabs_.end() && first->abandoned) {
    slabs_.erase(first);
    return;
  }
  std::erase_if(slabs_, [&](const LiveSlab& live) { return live.step == e.step && live.tensor == e.tensor; });
  applied_[e.tensor] = e.step;
}

void StepChecker::Note(const event::Verdict& e) {
  if (open_ && e.step == step_) verdict_ = e.outcome;
}

// --- sessions ---

// Whether the code says that the session is over.
bool StepChecker::SaysOver(SessionId session, absl::StatusCode code) const {
  return code == absl::StatusCode::kAborted ||
         (code == absl::StatusCode::kFailedPrecondition && outdated_.count(session) > 0);
}

bool StepChecker::MayRefuse(absl::StatusCode code) const {
  const auto held_by = [&](SessionId session) {
    return std::any_of(ranks_.begin(), ranks_.end(), [&](const Rank& r) { return r.session == session; });
  };
  if (const auto* attach = std::get_if<event::Attach>(event_)) {
    if (attach->resumes) return !held_by(*attach->resumes) && SaysOver(*attach->resumes, code);
    const bool other_world = attach->world != ranks_.size();
    const bool behind = shape_.machine.is_part && attach->from_step == step_ + 1;
    const bool again = shape_.machine.is_part && attach->again_step == step_;
    if ((behind || again) && code == absl::StatusCode::kUnavailable && BeingRead()) return true;
    if (code == absl::StatusCode::kFailedPrecondition) return other_world;
    if (other_world) return code == absl::StatusCode::kUnavailable && BeingRead();
    if (code == absl::StatusCode::kAlreadyExists) return ranks_[attach->rank].session && !attach->takeover;
    const Rank& rank = ranks_[attach->rank];
    return code == absl::StatusCode::kUnavailable && (rank.in_step || rank.left_out);
  }
  if (std::holds_alternative<event::Rewind>(*event_)) {
    return code == absl::StatusCode::kUnavailable && BeingRead();
  }
  const auto session = [](const auto& e) -> std::optional<SessionId> {
    if constexpr (requires { e.session; }) return e.session;
    return std::nullopt;
  };
  const auto speaker = std::visit(session, *event_);
  if (speaker && !held_by(*speaker)) return SaysOver(*speaker, code);
  const bool wrong = code == absl::StatusCode::kInvalidArgument || code == absl::StatusCode::kFailedPrecondition;
  if (wrong && peers_ == Peers::kAny) return true;
  const auto* chunk = std::get_if<event::Chunk>(event_);
  return chunk != nullptr && known_payload_ && *known_payload_ != chunk->crc && code == absl::StatusCode::kDataLoss;
}

void StepChecker::On(const effect::Reject& e) {
  if (!MayRefuse(e.status.code())) Fail(absl::StrCat("refused what the protocol allows: ", e.status.ToString()));
  const auto* attach = std::get_if<event::Attach>(event_);
  if (attach == nullptr || attach->resumes || !absl::IsUnavailable(e.status)) return;
  // A process of another world was told something else.
  if (attach->world == ranks_.size() && ranks_[attach->rank].left_out) ranks_[attach->rank].asks = true;
}

void StepChecker::On(const effect::Attached& e) {
  const auto& attach = std::get<event::Attach>(*event_);
  if (e.resumed) {
    if (ranks_[e.rank].session != e.session) Fail("resumed a session that is over");
    return;
  }
  if (attach.world != ranks_.size()) {
    if (open_) Fail("the world changed in an open step");
    ranks_.assign(attach.world, {});
  }
  Rank& rank = ranks_[e.rank];
  if (rank.session || rank.in_step) Fail("a rank was given away that is held");
  if (!rank.held.empty()) Fail("payloads of the rank's last process are held");
  if (rank.left_out) Fail("attached a rank whose weights are being replaced");
  rank = {.session = e.session, .came = true};
}

void StepChecker::On(const effect::Fence& e) {
  Rank& rank = ranks_[e.rank];
  if (rank.session != e.session) Fail("fenced a session that is over");
  const auto* attach = std::get_if<event::Attach>(event_);
  const bool other_world = attach != nullptr && attach->world != ranks_.size();
  if (other_world || RewoundTo(e.status)) outdated_.insert(e.session);
  rank.session.reset();
  rank.connected = false;
  rank.lacking.clear();
  rank.told.clear();
}

void StepChecker::On(const effect::Opened& e) {
  if (open_ || e.step != step_) Fail(absl::StrCat("opened step ", e.step, ", but ", step_, " is due"));
  open_ = true;
  // To be closed at once, by the first process of its world.
  const auto* attach = std::get_if<event::Attach>(event_);
  if (attach != nullptr && attach->world != ranks_.size()) ranks_.assign(attach->world, {});
  for (const uint32_t r : e.left_out) {
    if (!shape_.machine.leaves_out_lost) Fail("left out a rank of a run that waits for all");
    if (ranks_[r].session || ranks_[r].asks) Fail("left out a rank that is attached, or was told to attach again");
    if (!ranks_[r].came) Fail("left out a rank that nobody has attached to");
    ranks_[r].left_out = true;
  }
  for (Rank& rank : ranks_) rank.asks = false;
  if (!e.left_out.empty()) CheckPieces();
}

void StepChecker::On(const effect::LeftOut& e) {
  Rank& rank = ranks_[e.rank];
  if (!open_ || !shape_.machine.leaves_out_lost) Fail("left out a rank where none may be");
  if (rank.session || rank.in_step) Fail("left out a rank that is there");
  if (!rank.came) Fail("left out a rank that nobody has attached to");
  for (const Tensor& tensor : tensors_) {
    for (const auto& sum : tensor.sums) {
      if (!sum.empty()) Fail("left out a rank in the middle of a sum");
    }
  }
  rank.left_out = true;
  CheckPieces();
}

const StepChecker::Rank& StepChecker::FirstTakingPart() const {
  return *std::find_if(ranks_.begin(), ranks_.end(), [](const Rank& rank) { return !rank.left_out; });
}

bool StepChecker::AllTakingPart(const std::function<bool(const Rank&)>& holds) const {
  return std::all_of(ranks_.begin(), ranks_.end(), [&](const Rank& rank) { return rank.left_out || holds(rank); });
}

void StepChecker::On(const effect::Begun& e) {
  const auto* begin = std::get_if<event::StepBegin>(event_);
  if (begin == nullptr || ranks_[e.rank].session != begin->session || begin->step != step_ || ranks_[e.rank].in_step ||
      ranks_[e.rank].left_out) {
    Fail("a rank began that did not say so");
  }
  ranks_[e.rank].in_step = true;
}

// Each rank has been told on its stream of every step that it may lack and whose updates are done, in order.
void StepChecker::CheckResults() {
  for (uint32_t r = 0; r < ranks_.size(); ++r) {
    for (const uint64_t step : ranks_[r].lacking) {
      if (updating(step)) break;
      if (ranks_[r].told.count(step) == 0) Fail(absl::StrCat("rank ", r, " is not told of step ", step));
    }
  }
}

void StepChecker::On(const effect::Result& e) {
  Rank& rank = ranks_[e.rank];
  if (e.step >= step_) Fail("a result of a step that is not closed");
  if (updating(e.step)) Fail("a result before the weights");
  if (rank.lacking.count(e.step) == 0) Fail("a result for a rank that lacks none");
  if (!rank.told.empty() && *rank.told.rbegin() >= e.step) Fail("a result twice on a stream, or out of order");
  rank.told.insert(e.step);
}

// --- updates and outcomes ---

std::optional<std::vector<StepChecker::Term>> StepChecker::Canonical(uint32_t tensor, uint64_t chunk) const {
  std::vector<Term> terms;
  const auto last = FirstTakingPart().last;
  for (uint32_t m = 0; last && m <= *last; ++m) {
    if (!AllSettled({m, tensor, chunk})) return std::nullopt;
    for (uint32_t r = 0; r < ranks_.size(); ++r) {
      if (ranks_[r].left_out) continue;
      const auto& delivered = ranks_[r].micros[m].delivered;
      if (const auto at = delivered.find({tensor, chunk}); at != delivered.end()) terms.push_back({m, r, at->second});
    }
  }
  // In staged the others may not have named it yet.
  const bool staged = shape_.machine.commit == Commit::kStaged;
  const auto agrees = [&](const Rank& rank) { return rank.last == last || (staged && !rank.last); };
  if (!last || !AllTakingPart(agrees)) return std::nullopt;
  return terms;
}

bool StepChecker::AbsentEverywhere(uint32_t tensor) const {
  for (uint64_t c = 0; c < tensors_[tensor].sums.size(); ++c) {
    const auto sum = Canonical(tensor, c);
    if (!sum || !sum->empty()) return false;
  }
  return true;
}

void StepChecker::On(const effect::Update& e) {
  if (!open_ || e.step != step_) return Fail("an update outside its step");
  Tensor& tensor = tensors_[e.tensor];
  if (tensor.updated) return Fail("a tensor was updated twice in a step");
  if (shape_.machine.commit == Commit::kStaged && verdict_ != Outcome::kApplied)
    return Fail("an update before the verdict");
  for (uint64_t c = 0; c < tensor.sums.size(); ++c) {
    const auto due = Canonical(e.tensor, c);
    if (!due) return Fail("an update before every contribution was in");
    if (tensor.sums[c] != *due) return Fail("a sum is not the canonical one");
    if (due->empty() != (tensor.zeroed.count(c) > 0)) return Fail("what nobody contributed to is not zero");
  }
  LiveSlab* live = Live(e.step, e.tensor);
  if (live == nullptr || live->slab.offset != e.slab.offset) return Fail("an update from another slab than the sum's");
  live->updating = true;
  tensor.updated = true;
  version_[e.tensor] = e.step;
}

void StepChecker::On(const effect::Publish& e) {
  if (applied_[e.tensor] != e.step) Fail(absl::StrCat("published tensor ", e.tensor, " before it was applied"));
}

void StepChecker::On(const effect::Close& e) {
  if (!open_ || e.step != step_) return Fail(absl::StrCat("closed step ", e.step, ", which is not open"));
  CheckOutcome(e);
  updated_any_ = std::any_of(tensors_.begin(), tensors_.end(), [](const Tensor& t) { return t.updated; });
  versions_after_[e.step] = version_;
  ResetStep();
  ++step_;
  for (Rank& rank : ranks_) {
    if (rank.session) rank.lacking.insert(e.step);
  }
}

void StepChecker::On(const effect::Discard& e) {
  if (!open_ || e.step != step_) Fail("discarded a step that is not open");
  if (std::holds_alternative<event::Rewind>(*event_)) return ResetStep();
  // Another part has lost it: then what was summed is summed anew.
  const auto* attach = std::get_if<event::Attach>(event_);
  const bool again = attach != nullptr && shape_.machine.is_part && attach->again_step == step_;
  for (const Tensor& tensor : tensors_) {
    if (tensor.updated) Fail("discarded a step with updates");
    for (const auto& sum : tensor.sums) {
      if (!sum.empty() && !again) Fail("discarded a step with sums");
    }
  }
  ResetStep();
}

}  // namespace ballast::sim
