// What the step runner does for each of the step machine's effects.
#include <algorithm>
#include <cstring>
#include <utility>

#include "server/base/clock.h"
#include "server/run/step_runner.h"

namespace ballast {
namespace {

// A rank that lacks more than these has been away for longer than any lease.
constexpr size_t kResultsKept = 256;

}  // namespace

void StepRunner::Do(const effect::Fence& e) {
  Link& link = links_[e.rank];
  if (link.stream == nullptr) LogEnd(e.rank, e.status);
  if (link.stream != nullptr && link.session == e.session) {
    if (e.status.code() == absl::StatusCode::kDataLoss) environment_.metrics->OnDuplicateChunk(false);
    Detach(e.rank, e.status);
  }
  link.peer.clear();
  ShowRanks();
}

void StepRunner::Do(const effect::LeftOut& e) {
  left_out_.insert(std::upper_bound(left_out_.begin(), left_out_.end(), e.rank), e.rank);
}

void StepRunner::Do(const effect::Opened& e) {
  left_out_ = e.left_out;
  hyper_ = std::move(begin_->hyper);
  loss_scale_ = begin_->loss_scale;
  end_values_.clear();
  clip_ = 1;
  probed_ = false;
  statistics_.Begin();
  for (Link& link : links_) link.losses.clear();
  clock_ = {.begin_s = MonotonicSeconds()};
  environment_.metrics->OnState("training");
  environment_.board->Write([](RunStatus& s) { s.state = RunStatus::State::kTraining; });
}

void StepRunner::Do(const effect::Begun& e) {
  links_[e.rank].sender->DropPublished();
  links_[e.rank].coming_state.reset();
}

void StepRunner::Do(const effect::Hold& e) {
  Link& link = links_[e.rank];
  const uint64_t bytes = gradient_->data.size();
  link.held[e.id] = std::move(gradient_->data);
  link.held_bytes += bytes;
  clock_.last_byte_s = MonotonicSeconds();
  if (clock_.first_byte_s == 0) clock_.first_byte_s = clock_.last_byte_s;
  environment_.metrics->OnReceived(link.lane, bytes);
  received_bytes_ += bytes;
  environment_.board->Write([&](RunStatus& s) { s.received_bytes += bytes; });
}

void StepRunner::Do(const effect::Drop& e) {
  links_[e.rank].sender->Credit(gradient_->data.size());
  if (e.again) environment_.metrics->OnDuplicateChunk(true);
}

// In rank order: the bits of the sum.
void StepRunner::Do(const effect::Sum& e) {
  const RunSpec& spec = *environment_.spec;
  const TensorSpec& t = spec.tensors[e.id.tensor];
  const uint64_t begin = ChunkBegin(spec, e.id.chunk), elements = ChunkEnd(spec, t, e.id.chunk) - begin;
  const auto& format = kernels::WireFormats()[static_cast<size_t>(t.gradient_format)];
  std::byte* const to = SlabAt(e.id.tensor, e.slab) + begin * WireBytes(SlabFormat(spec, t));
  if (e.ranks.empty()) std::memset(to, 0, elements * WireBytes(SlabFormat(spec, t)));
  bool first = e.first;
  for (const uint32_t rank : e.ranks) {
    const Payload payload = TakeHeld(rank, e.id);
    if (SumsGradients(spec)) {
      format.accumulate(reinterpret_cast<float*>(to), payload.bytes().data(), elements, std::exchange(first, false));
    } else {
      std::memcpy(to, payload.bytes().data(), payload.size());
    }
  }
}

Payload StepRunner::TakeHeld(uint32_t rank, const ChunkId& id) {
  Link& link = links_[rank];
  auto node = link.held.extract(id);
  link.held_bytes -= node.mapped().size();
  link.sender->Credit(node.mapped().size());
  return std::move(node.mapped());
}

void StepRunner::DropHeld(uint32_t rank) {
  Link& link = links_[rank];
  if (link.held_bytes > 0) link.sender->Credit(link.held_bytes);
  link.held.clear();
  link.held_bytes = 0;
}

void StepRunner::DropAllHeld() {
  for (uint32_t rank = 0; rank < links_.size(); ++rank) DropHeld(rank);
}

void StepRunner::Do(const effect::Forget& e) {
  DropHeld(e.rank);
  links_[e.rank].losses.clear();
}

void StepRunner::Do(const effect::Publish& e) {
  for (uint32_t rank = 0; rank < machine_.world(); ++rank) {
    if (!e.rank || *e.rank == rank) links_[rank].sender->Publish(e.step, e.tensor);
  }
}

void StepRunner::Do(const effect::Close& e) {
  DropAllHeld();
  for (Link& link : links_) {
    if (link.coming_state) link.state = std::exchange(link.coming_state, std::nullopt);
  }
  ClosedStep closed{.step = e.step,
                    .outcome = e.outcome,
                    .reason = e.reason,
                    .detail = e.outcome == Outcome::kApplied ? stopped_ : e.detail,
                    .not_applied = e.not_applied,
                    .left_out = left_out_,
                    .clip_coefficient = clip_};
  statistics_.Complete(&closed);
  const StepFindings found = FindSpikes(&closed);
  results_.push_back(std::move(closed));
  if (results_.size() > kResultsKept) results_.pop_front();
  Report(e, found);
  if (e.outcome != Outcome::kPartial || !environment_.spec->rewinds_torn) return KeepSnapshot();
  RewindItself({.steps_back = 1, .reason = "torn"}, absl::StrCat("step ", e.step, " is torn: ", e.reason), [] {});
}

void StepRunner::Do(const effect::Result& e) {
  for (const ClosedStep& closed : results_) {
    if (closed.step == e.step) links_[e.rank].sender->Result(closed);
  }
}

void StepRunner::Do(const effect::Discard&) { DropAllHeld(); }

}  // namespace ballast
