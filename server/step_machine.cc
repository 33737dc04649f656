#include "server/step_machine.h"

#include <algorithm>
#include <utility>

#include "absl/strings/str_cat.h"

namespace ballast {
namespace {

StepEffects Refuse(absl::Status status, double retry_after_s = 0) {
  return {effect::Reject{std::move(status), retry_after_s}};
}

}  // namespace

const char* OutcomeName(Outcome outcome) {
  constexpr const char* kNames[] = {"applied", "skipped", "aborted", "partial"};
  return kNames[static_cast<int>(outcome)];
}

StepMachine::StepMachine(StepMachineOptions options) : options_(std::move(options)), step_(options_.first_step) {
  tensors_.resize(options_.chunks.size());
  Reset();
}

StepEffects StepMachine::Handle(const StepEvent& event, double now_s) {
  return std::visit([&](const auto& e) { return On(e, now_s); }, event);
}

std::vector<bool> StepMachine::ChunksHeld(uint32_t tensor) const {
  std::vector<bool> held;
  for (const auto& crc : tensors_[tensor].crc) held.push_back(crc.has_value());
  return held;
}

std::vector<bool> StepMachine::TensorsApplied() const {
  std::vector<bool> applied;
  for (const Tensor& t : tensors_) applied.push_back(t.updated());
  return applied;
}

StepEffects StepMachine::On(const event::Attach& e, double now_s) {
  if (e.resumes) {
    if (session_ != e.resumes) return Refuse(CheckCurrent(*e.resumes));
    return {effect::Attached{*session_, /*resumed=*/true}};
  }
  StepEffects effects;
  if (session_) {
    const double lease_left_s = disconnected_at_s_ + options_.lease_s - now_s;
    if (!e.takeover && connected_) {
      return Refuse(absl::AlreadyExistsError("a live session holds the rank; attach with takeover to replace it"));
    }
    if (!e.takeover && lease_left_s > 0) {
      return Refuse(
          absl::AlreadyExistsError(absl::StrCat("a session whose connection was lost holds the rank for another ",
                                                lease_left_s, " s; wait, or attach with takeover to replace it")),
          lease_left_s);
    }
    effects = EndSession(absl::AbortedError("another process took this rank over"), "restarted");
  }
  unacknowledged_.clear();
  session_ = e.session;
  connected_ = false;
  disconnected_at_s_ = now_s;
  effects.push_back(effect::Attached{e.session, /*resumed=*/false});
  return effects;
}

StepEffects StepMachine::On(const event::StreamOpened& e, double) {
  if (auto s = CheckCurrent(e.session); !s.ok()) return Refuse(s);
  connected_ = true;
  const auto received = [&](uint64_t step, uint32_t tensor) {
    return e.weights_step == step && tensor < e.weights_received.size() && e.weights_received[tensor];
  };
  StepEffects effects;
  if (open_) {
    for (uint32_t i = 0; i < tensors_.size(); ++i) {
      if (tensors_[i].state == TensorState::kApplied && !received(step_, i)) {
        effects.push_back(effect::Publish{step_, i});
      }
    }
  } else if (!unacknowledged_.empty()) {
    for (uint32_t i = 0; i < unacknowledged_.size(); ++i) {
      if (unacknowledged_[i] && !received(closed_step_, i)) effects.push_back(effect::Publish{closed_step_, i});
    }
    effects.push_back(effect::RepeatResult{closed_step_});
  }
  return effects;
}

StepEffects StepMachine::On(const event::StreamClosed& e, double now_s) {
  if (session_ != e.session) return {};
  connected_ = false;
  disconnected_at_s_ = now_s;
  if (e.clean && !open_) session_.reset();
  return {};
}

StepEffects StepMachine::On(const event::StepBegin& e, double) {
  if (auto s = CheckCurrent(e.session); !s.ok()) return Refuse(s);
  if (e.step != step_) {
    return Refuse(absl::FailedPreconditionError(
        absl::StrCat("StepBegin of step ", e.step, ", but step ", step_, open_ ? " is open" : " is the next")));
  }
  if (open_) {
    if (e.content == begin_content_) return {};
    return Refuse(absl::FailedPreconditionError(
        absl::StrCat("step ", step_, " was begun with other values; a resumed step must repeat them to the bit")));
  }
  open_ = true;
  begin_content_ = e.content;
  unacknowledged_.clear();
  return {effect::Opened{step_}};
}

StepEffects StepMachine::On(const event::Chunk& e, double) {
  if (auto s = CheckOpen(e.session); !s.ok()) return Refuse(s);
  if (auto s = CheckChunk(e); !s.ok()) return Refuse(s);
  Tensor& t = tensors_[e.tensor];
  std::optional<uint32_t>& crc = t.crc[e.chunk];
  if (crc == e.crc) return {effect::Duplicate{}};
  if (crc) {
    auto why = absl::DataLossError(absl::StrCat("chunk ", e.chunk, " of ", Name(e.tensor), " in step ", step_,
                                                " came twice with different bytes; the session is closed"));
    StepEffects effects = Refuse(why);
    StepEffects end = EndSession(why, "data_loss");
    effects.insert(effects.end(), end.begin(), end.end());
    return effects;
  }
  if (micro_ended_) {
    return Refuse(absl::FailedPreconditionError(
        absl::StrCat("a gradient of ", Name(e.tensor), " after its micro-batch ended without one")));
  }
  crc = e.crc;
  StepEffects effects = {effect::Store{e.tensor, e.chunk}};
  if (++t.held == options_.chunks[e.tensor]) {
    t.state = TensorState::kUpdating;
    effects.push_back(effect::Update{step_, e.tensor});
  }
  return effects;
}

StepEffects StepMachine::On(const event::MicroEnd& e, double) {
  if (auto s = CheckOpen(e.session); !s.ok()) return Refuse(s);
  if (e.micro != 0) {
    return Refuse(absl::InvalidArgumentError(
        absl::StrCat("micro-batch ", e.micro, ": this version takes one micro-batch a step, number 0")));
  }
  std::vector<bool> absent = e.absent;
  absent.resize(tensors_.size());
  if (micro_ended_) {
    if (absent == absent_) return {};
    return Refuse(absl::FailedPreconditionError("MicroEnd came again with other absent tensors"));
  }
  if (auto s = CheckComplete(absent); !s.ok()) return Refuse(s);
  for (uint32_t i = 0; i < tensors_.size(); ++i) {
    if (!absent[i]) continue;
    tensors_[i].state = TensorState::kAbsent;
    --unsettled_;
  }
  absent_ = std::move(absent);
  micro_ended_ = true;
  return {};
}

StepEffects StepMachine::On(const event::StepEnd& e, double) {
  if (auto s = CheckOpen(e.session); !s.ok()) return Refuse(s);
  if (!micro_ended_) {
    return Refuse(absl::FailedPreconditionError(absl::StrCat("StepEnd of step ", step_, " before its MicroEnd")));
  }
  step_ended_ = true;
  StepEffects effects;
  CloseIfDone(&effects);
  return effects;
}

StepEffects StepMachine::On(const event::TensorApplied& e, double) {
  if (!open_ || e.step != step_) return {};  // of a step torn while it was updating
  tensors_[e.tensor].state = TensorState::kApplied;
  --unsettled_;
  StepEffects effects = {effect::Publish{step_, e.tensor}};
  CloseIfDone(&effects);
  return effects;
}

StepEffects StepMachine::On(const event::Tick&, double now_s) {
  const bool lost = session_ && !connected_ && now_s >= disconnected_at_s_ + options_.lease_s + options_.rank_timeout_s;
  if (!open_ || !lost) return {};
  return EndSession(absl::AbortedError(absl::StrCat(
                        "the rank was away for longer than its lease and rank_timeout; step ", step_, " was closed")),
                    "rank_lost");
}

absl::Status StepMachine::CheckCurrent(SessionId session) const {
  if (session_ == session) return absl::OkStatus();
  if (session_) return absl::AbortedError("this session is over: another process took the rank over");
  return absl::AbortedError("this session is over: attach again without its token");
}

absl::Status StepMachine::CheckOpen(SessionId session) const {
  if (auto s = CheckCurrent(session); !s.ok()) return s;
  if (!open_) return absl::FailedPreconditionError(absl::StrCat("no step is open; send StepBegin of step ", step_));
  return absl::OkStatus();
}

absl::Status StepMachine::CheckChunk(const event::Chunk& e) const {
  if (e.tensor >= tensors_.size()) {
    return absl::InvalidArgumentError(
        absl::StrCat("gradient of tensor ", e.tensor, ", but the run has ", tensors_.size(), " tensors"));
  }
  if (e.micro != 0) {
    return absl::InvalidArgumentError(absl::StrCat("gradient of ", Name(e.tensor), " in micro-batch ", e.micro,
                                                   ": this version takes one micro-batch a step, number 0"));
  }
  if (e.chunk >= options_.chunks[e.tensor]) {
    return absl::InvalidArgumentError(
        absl::StrCat("chunk ", e.chunk, " of ", Name(e.tensor), ", which has ", options_.chunks[e.tensor], " chunks"));
  }
  return absl::OkStatus();
}

absl::Status StepMachine::CheckComplete(const std::vector<bool>& absent) const {
  for (uint32_t i = 0; i < tensors_.size(); ++i) {
    const Tensor& t = tensors_[i];
    if (absent[i] && t.held > 0) {
      return absl::InvalidArgumentError(absl::StrCat(Name(i), " is listed absent, but a gradient of it was sent"));
    }
    if (!absent[i] && t.held < options_.chunks[i]) {
      return absl::InvalidArgumentError(absl::StrCat(Name(i), ": ", t.held, " of ", options_.chunks[i],
                                                     " gradient chunks sent in step ", step_,
                                                     "; send the rest, or list it absent"));
    }
  }
  return absl::OkStatus();
}

StepEffects StepMachine::EndSession(absl::Status why, const char* reason) {
  StepEffects effects = {effect::Fence{*session_, std::move(why)}};
  session_.reset();
  connected_ = false;
  CloseTorn(reason, &effects);
  unacknowledged_.clear();  // whoever comes next pulls
  return effects;
}

// The rank's process is gone. What it sent whole was updated and stays so.
void StepMachine::CloseTorn(const char* reason, StepEffects* effects) {
  if (!open_) return;
  const bool any_chunk = std::any_of(tensors_.begin(), tensors_.end(), [](const Tensor& t) { return t.held > 0; });
  const bool any_updated = std::any_of(tensors_.begin(), tensors_.end(), [](const Tensor& t) { return t.updated(); });
  if (micro_ended_) {
    Close(Outcome::kApplied, "", effects);  // nothing was missing but the end mark
  } else if (any_chunk) {
    Close(any_updated ? Outcome::kPartial : Outcome::kAborted, reason, effects);
  } else {
    effects->push_back(effect::Discard{step_});
    open_ = false;
    Reset();
  }
}

void StepMachine::CloseIfDone(StepEffects* effects) {
  if (open_ && step_ended_ && unsettled_ == 0) Close(Outcome::kApplied, "", effects);
}

void StepMachine::Close(Outcome outcome, std::string reason, StepEffects* effects) {
  effect::Close close{.step = step_, .outcome = outcome, .reason = std::move(reason), .not_applied = {}};
  unacknowledged_.assign(tensors_.size(), false);
  for (uint32_t i = 0; i < tensors_.size(); ++i) {
    if (tensors_[i].state == TensorState::kAwaited) close.not_applied.push_back(i);
    unacknowledged_[i] = tensors_[i].updated();
  }
  effects->push_back(std::move(close));
  closed_step_ = step_++;
  open_ = false;
  Reset();
}

void StepMachine::Reset() {
  begin_content_.clear();
  micro_ended_ = false;
  step_ended_ = false;
  absent_.clear();
  unsettled_ = tensors_.size();
  for (size_t i = 0; i < tensors_.size(); ++i) {
    tensors_[i].state = TensorState::kAwaited;
    tensors_[i].held = 0;
    tensors_[i].crc.assign(options_.chunks[i], std::nullopt);
  }
}

std::string StepMachine::Name(uint32_t tensor) const {
  return absl::StrCat("tensor ", tensor, " '", options_.tensor_names[tensor], "'");
}

}  // namespace ballast
