#include "tests/server/step/step_simulator_rank.h"

#include <algorithm>
#include <utility>

#include "absl/strings/str_cat.h"

namespace ballast::sim {
const char* KindName(Kind kind) {
  constexpr const char* kNames[] = {"attach",        "resume",
                                    "restart",       "takeover",
                                    "leave",         "cut",
                                    "death",         "timeout",
                                    "duplicate",     "other_crc",
                                    "disagreement",  "end_disagreement",
                                    "absent_tensor", "absent_everywhere",
                                    "wanted_sent",   "clock_jump",
                                    "world_change",  "rewind",
                                    "all_cut",       "verdict_skip",
                                    "verdict_abort", "verdict_apply",
                                    "measure",       "measure_torn",
                                    "discard",       "open_end",
                                    "slab_wait",     "slow_rank",
                                    "parked",        "overdue",
                                    "left_out",      "without",
                                    "forgotten",     "discarded",
                                    "applied",       "skipped",
                                    "aborted",       "partial"};
  static_assert(std::size(kNames) == static_cast<size_t>(Kind::kCount));
  return kNames[static_cast<size_t>(kind)];
}

SimulatedRank::SimulatedRank(const RunShape& shape, Identity identity, uint64_t step, Random* random, Counts* counts)
    : shape_(shape),
      identity_(identity),
      random_(random),
      counts_(counts),
      step_(step),
      weights_(shape.machine.tensor_names.size()),
      received_(shape.machine.tensor_names.size()) {
  MakePlan();
  begins_ = ends_ = !identity_.reined;
}

void SimulatedRank::BeginStep(bool as_others_do) {
  step_ = next_step();
  MakePlan();
  if (!as_others_do) plan_.content += " and another";
  begins_ = true;
  ends_ = has_result_ = false;
}

void SimulatedRank::EndStep(std::string content, bool discard) {
  plan_.end_content = std::move(content);
  if (discard) plan_.discards_after = 0;
  ends_ = true;
}

void SimulatedRank::MakePlan() {
  plan_ = {.content = absl::StrCat("lr of step ", step_)};
  const bool staged = shape_.machine.commit == Commit::kStaged;
  if (staged && !identity_.reined && Mix(identity_.run_seed, step_) % 2 == 0)
    plan_.end_content = absl::StrCat("decay of step ", step_);
  if (staged && !identity_.reined && identity_.world > 1 && Chance(random_, 40)) {
    ++(*counts_)[static_cast<size_t>(Kind::kEndDisagreement)];
    plan_.end_content += " and another";
  }
  const uint64_t micros = 1 + Mix(identity_.run_seed, step_) % shape_.machine.most_micros;
  for (uint32_t m = 0; m < micros; ++m) plan_.micros.push_back(MakeMicro(m));
  if (staged) PlanEnd();
  if (std::exchange(disagree_next_, false)) Disagree();
  producing_ = 0;
  said_ = 0;
  discarding_ = asked_ = false;
  waiting_ = false;
  wanted_.reset();
  begin_said_ = micro_begin_said_ = micro_end_said_ = step_end_said_ = measure_said_ = measured_ = false;
  micro_ = 0;
}

// How it ends the step: each rank as it likes.
void SimulatedRank::PlanEnd() {
  plan_.open_ended = Chance(random_, 2);
  plan_.measures = identity_.reined;
  if (identity_.reined) return;
  plan_.measures = Mix(identity_.run_seed + 1, step_) % 2 == 0 && !Chance(random_, 4);
  plan_.waits = !Chance(random_, 4);
  if (Chance(random_, 10 * identity_.world)) plan_.discards_after = Below(random_, 12);
}

SimulatedRank::Micro SimulatedRank::MakeMicro(uint32_t micro) {
  Micro made;
  std::vector<uint32_t> tensors(shape_.machine.tensor_names.size());
  for (uint32_t i = 0; i < tensors.size(); ++i) tensors[i] = i;
  std::shuffle(tensors.begin(), tensors.end(), *random_);
  made.absent.resize(tensors.size());
  for (const uint32_t i : tensors) {
    const bool everywhere = Mix(Mix(identity_.run_seed, step_), i + 100 * identity_.part) % 10 == 0;
    made.absent[i] = everywhere || Chance(random_, 8);
    if (made.absent[i]) ++(*counts_)[static_cast<size_t>(everywhere ? Kind::kAbsentEverywhere : Kind::kAbsentTensor)];
    if (made.absent[i]) continue;
    for (uint64_t c = 0; c < shape_.machine.reduction.chunks[i]; ++c) {
      if (shape_.Covers(identity_.rank, identity_.world, i, c)) made.order.push_back({micro, i, c});
    }
  }
  if (Chance(random_, 3)) std::shuffle(made.order.begin(), made.order.end(), *random_);
  made.sent.resize(made.order.size(), Sent::kNo);
  return made;
}

void SimulatedRank::Hook() {
  Micro& micro = plan_.micros[producing_];
  micro.produced = std::min(micro.order.size(), micro.produced + 1 + Below(random_, 6));
}

void SimulatedRank::Disagree() {
  ++(*counts_)[static_cast<size_t>(Kind::kDisagreement)];
  if (Chance(random_, 2)) {
    plan_.content += " and another";
  } else {
    plan_.micros.resize(1);
    if (shape_.machine.most_micros > 1 && Chance(random_, 2)) plan_.micros.push_back(MakeMicro(1));
  }
}

std::optional<StepEvent> SimulatedRank::Next() {
  if (waiting_ || !begins_ || has_result_) return std::nullopt;
  auto message = NextMessage();
  said_ += message ? 1 : 0;
  return message;
}

std::optional<StepEvent> SimulatedRank::NextMessage() {
  if (!std::exchange(begin_said_, true)) return event::StepBegin{*session, step_, plan_.content};
  if (plan_.discards_after && (discarding_ || (!step_end_said_ && said_ > *plan_.discards_after))) {
    discarding_ = true;
    if (std::exchange(step_end_said_, true)) return std::nullopt;
    return event::StepEnd{*session, plan_.end_content, /*discard=*/true};
  }
  while (true) {
    Micro& micro = plan_.micros[micro_];
    const auto number = static_cast<uint32_t>(micro_);
    const bool last = micro_ + 1 == plan_.micros.size();
    const bool implied = micro_ == 0 && last && !plan_.open_ended && Chance(random_, 2);
    if (!std::exchange(micro_begin_said_, true) && !implied) {
      return event::MicroBegin{*session, number, last && !plan_.open_ended};
    }
    if (auto chunk = NextChunk(&micro)) return chunk;
    if (micro.produced < micro.order.size()) return std::nullopt;
    // Ahead of what waits for credit: the others' credit may wait for what is absent here.
    if (!std::exchange(micro_end_said_, true)) return event::MicroEnd{*session, number, micro.absent};
    if (micro.first_unsent < micro.order.size()) return std::nullopt;
    if (last) break;
    ++micro_;
    producing_ = std::max(producing_, micro_);
    micro_begin_said_ = micro_end_said_ = false;
  }
  if (plan_.measures && !std::exchange(measure_said_, true)) {
    asked_ = true;
    return event::StepMeasure{*session};
  }
  if (identity_.reined ? plan_.measures && !ends_ : plan_.measures && plan_.waits && !measured_) return std::nullopt;
  if (std::exchange(step_end_said_, true)) return std::nullopt;
  if (plan_.open_ended) ++(*counts_)[static_cast<size_t>(Kind::kOpenEnd)];
  return event::StepEnd{*session, plan_.end_content};
}

std::optional<StepEvent> SimulatedRank::NextChunk(Micro* micro) {
  if (micro->first_unsent > 0 && !step_end_said_ && (corrupt_next_ || std::exchange(repeat_next_, false))) {
    if (auto again = Repeat(*micro)) return again;
  }
  for (; micro->first_unsent < micro->produced; ++micro->first_unsent) {
    Sent& sent = micro->sent[micro->first_unsent];
    if (sent == Sent::kYes) continue;
    const uint64_t bytes = shape_.ChunkBytes(micro->order[micro->first_unsent]);
    if (spent_bytes_ + bytes <= shape_.window_bytes) {
      Spend(micro->order[micro->first_unsent]);
      return Send(micro, micro->first_unsent);
    }
    if (sent == Sent::kNo) break;
    sent = Sent::kYes;  // what is held already is not worth waiting for credit
  }
  return wanted_ ? NextWanted(micro) : std::nullopt;
}

std::optional<StepEvent> SimulatedRank::NextWanted(Micro* micro) {
  for (size_t at = micro->first_unsent; at < micro->produced; ++at) {
    if (micro->order[at] != *wanted_ || micro->sent[at] != Sent::kNo) continue;
    Spend(*std::exchange(wanted_, std::nullopt));
    ++(*counts_)[static_cast<size_t>(Kind::kWantedSent)];
    return Send(micro, at);
  }
  return std::nullopt;
}

void SimulatedRank::Spend(ChunkId id) {
  const uint64_t bytes = shape_.ChunkBytes(id);
  spent_bytes_ += bytes;
  spent_.emplace(id, bytes);
}

event::Chunk SimulatedRank::Send(Micro* micro, size_t at) {
  const ChunkId id = micro->order[at];
  if (micro->sent[at] == Sent::kAgain) ++(*counts_)[static_cast<size_t>(Kind::kDuplicate)];
  micro->sent[at] = Sent::kYes;
  repeat_next_ = Chance(random_, 15);
  const uint64_t payload = Mix(Mix(Mix(identity_.process, step_), id.micro), (uint64_t{id.tensor} << 32) + id.chunk);
  return {*session, id.micro, id.tensor, id.chunk, static_cast<uint32_t>(payload)};
}

std::optional<StepEvent> SimulatedRank::Repeat(const Micro& micro) {
  Micro copy = micro;
  const size_t at = Below(random_, micro.first_unsent);
  const uint64_t bytes = shape_.ChunkBytes(micro.order[at]);
  if (spent_bytes_ + bytes > shape_.window_bytes) return std::nullopt;
  Spend(micro.order[at]);
  event::Chunk chunk = Send(&copy, at);
  repeat_next_ = false;
  if (std::exchange(corrupt_next_, false)) {
    ++(*counts_)[static_cast<size_t>(Kind::kOtherCrc)];
    chunk.crc ^= 1;
  } else {
    ++(*counts_)[static_cast<size_t>(Kind::kDuplicate)];
  }
  return chunk;
}

// --- what it hears ---

void SimulatedRank::Resume(const StepMachine& machine, uint32_t rank, const std::map<ChunkId, uint64_t>& held) {
  // What was ended as it is may not be discarded any more, and the other way round.
  if (step_end_said_ && !discarding_) plan_.discards_after.reset();
  begin_said_ = micro_begin_said_ = micro_end_said_ = step_end_said_ = measure_said_ = measured_ = false;
  micro_ = 0;
  spent_.clear();
  spent_bytes_ = 0;
  wanted_.reset();
  for (const auto& [id, _] : held) Spend(id);
  waiting_ = machine.step() > step_;
  closed_elsewhere_ = std::max(closed_elsewhere_, machine.step() - 1);
  const bool in_step = machine.step() == step_ && machine.InStep(rank);
  const std::vector<bool> applied = machine.TensorsApplied();
  for (uint32_t m = 0; m < plan_.micros.size(); ++m) {
    Micro& micro = plan_.micros[m];
    micro.first_unsent = 0;
    for (size_t at = 0; at < micro.order.size(); ++at) {
      const ChunkId id = micro.order[at];
      const bool delivered =
          m < machine.reduction().micros_begun(rank) && machine.reduction().Delivered(rank, m, id.tensor)[id.chunk];
      const bool is_in = in_step && (delivered || applied[id.tensor]);
      micro.sent[at] = !is_in ? Sent::kNo : Chance(random_, 10) ? Sent::kAgain : Sent::kYes;
    }
  }
}

void SimulatedRank::OnReturned(ChunkId id) {
  if (const auto spent = spent_.find(id); spent != spent_.end()) {
    spent_bytes_ -= spent->second;
    spent_.erase(spent);
  }
}

void SimulatedRank::OnWeights(uint64_t step, uint32_t tensor) {
  weights_[tensor] = std::max(weights_[tensor], step);
  if (weights_step_ != step) received_.assign(received_.size(), false);
  weights_step_ = step;
  received_[tensor] = true;
}

void SimulatedRank::OnResult(uint64_t step) {
  if (identity_.reined) {
    if (in_step() && step == step_) {
      has_result_ = true;
    } else {
      closed_elsewhere_ = std::max(closed_elsewhere_, step);
    }
    return;
  }
  if (step != step_) return;  // an earlier one, said again
  ++step_;
  MakePlan();
}

}  // namespace ballast::sim
