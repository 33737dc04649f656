// What the ranks say, in the order in which they said it, to the step machine.
#include <utility>
#include <variant>

#include "absl/strings/str_cat.h"

#include "server/base/clock.h"
#include "server/run/step_executor.h"

namespace ballast {
namespace {

// The edge has seen that the payload is of so many elements as fit into the chunk.
absl::Status CheckWholePart(const RunSpec& spec, const ChunkSet& covers, const message::Gradient& m) {
  const TensorSpec& t = spec.tensors[m.tensor];
  if (!Contains(covers, m.tensor, m.chunk)) return absl::OkStatus();  // the machine says why it is refused
  const uint64_t first = ChunkBegin(spec, m.chunk);
  const ChunkPart part = PartIn(covers, m.tensor, m.chunk, ChunkEnd(spec, t, m.chunk) - first);
  const uint64_t wanted = (part.end - part.begin) * WireBytes(t.gradient_format);
  if (m.data.size() == wanted) return absl::OkStatus();
  return absl::InvalidArgumentError(absl::StrCat(
      "chunk ", m.chunk, " of tensor ", m.tensor, " '", t.name, "' has ", m.data.size(), " bytes; wanted: ", wanted,
      " (", part.end - part.begin, " elements of ", kernels::WireFormats()[static_cast<size_t>(t.gradient_format)].name,
      ", [", first + part.begin, ", ", first + part.end, ") of the tensor, to which the rank contributes)"));
}

}  // namespace

absl::Status StepExecutor::Take(uint32_t rank, RankMessage& message) {
  return std::visit([&](auto& m) { return Take(rank, m); }, message);
}

absl::Status StepExecutor::Take(uint32_t rank, message::StepBegin& m) {
  if (auto s = gate_.Check(machine_, m.step); !s.ok()) return s;
  begin_ = &m;
  absl::Status taken = Handle(event::StepBegin{links_[rank].session(), m.step, m.content});
  begin_ = nullptr;
  return taken;
}

absl::Status StepExecutor::Take(uint32_t rank, message::MicroBegin& m) {
  return Handle(event::MicroBegin{links_[rank].session(), m.micro, m.last});
}

absl::Status StepExecutor::Take(uint32_t rank, message::Gradient& m) {
  if (auto s = CheckWholePart(*spec_, machine_.reduction().covers(rank), m); !s.ok()) {
    reporter_.metrics().OnRejectedChunk("malformed");
    return s;
  }
  gradient_ = &m;
  absl::Status taken = Handle(event::Chunk{links_[rank].session(), m.micro, m.tensor, m.chunk, m.crc});
  gradient_ = nullptr;
  links_[rank].outbox().Acknowledge();
  return taken;
}

absl::Status StepExecutor::Take(uint32_t rank, message::MicroEnd& m) {
  if (m.loss && machine_.InStep(rank)) judge_.AddLoss(rank, m.micro, *m.loss);
  return Handle(event::MicroEnd{links_[rank].session(), m.micro, std::move(m.absent)});
}

absl::Status StepExecutor::Take(uint32_t rank, message::StepMeasure&) {
  const bool again = !machine_.InStep(rank) || machine_.SentAll(rank);
  StepEffects effects = machine_.Handle(event::StepMeasure{links_[rank].session()}, CoarseSeconds());
  if (machine_.SentAll(rank)) links_[rank].outbox().Release();
  if (!again && machine_.SentAll(rank)) reporter_.OnRankEnded(rank, settings_.RanksOf(machine_.world()));
  return Execute(std::move(effects));
}

absl::Status StepExecutor::Take(uint32_t rank, message::StepEnd& m) {
  RankLink& link = links_[rank];
  const bool in_step = machine_.InStep(rank), again = machine_.SentAll(rank);
  const uint32_t begun = in_step ? machine_.reduction().micros_begun(rank) : 0;
  if (m.loss && begun > 0) judge_.AddLossIfNone(rank, begun - 1, *m.loss);
  if (in_step && !m.client_state.empty()) {
    link.BringState({machine_.step(), std::move(m.client_state)});  // the step may close by this
  }
  StepEffects effects =
      machine_.Handle(event::StepEnd{link.session(), std::move(m.content), m.discard}, CoarseSeconds());
  const bool refused = !effects.empty() && std::holds_alternative<effect::Reject>(effects.front());
  refused ? link.DropComingState() : link.outbox().Release();
  if (in_step && !refused) {
    settings_.end_values = std::move(m.values);
    settings_.max_grad_norm = m.max_grad_norm;
    settings_.whole = std::move(m.whole);
    settings_.checkpoint = settings_.checkpoint || m.checkpoint;
    if (checkpointer_ != nullptr && m.kept_step > 0) checkpointer_->Keep(m.kept_step);
    if (!again) reporter_.OnRankEnded(rank, settings_.RanksOf(machine_.world()));
    reporter_.OnConverted(m.gradient_flushed, m.gradient_overflowed);
  }
  return Execute(std::move(effects));
}

absl::Status StepExecutor::Take(uint32_t, message::Bad& m) { return std::move(m.status); }

}  // namespace ballast
