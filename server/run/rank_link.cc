#include "server/run/rank_link.h"

#include <utility>

#include "server/base/clock.h"

namespace ballast {
namespace {

// How long a peer that does not read may delay the end of its own stream.
constexpr double kLeaveS = 1;

}  // namespace

RankLink::RankLink(Environment environment)
    : environment_(std::move(environment)),
      outbox_(RankOutbox::Environment{.spec = environment_.spec,
                                      .store = environment_.store,
                                      .on_sent = [this](uint64_t bytes) { environment_.on_sent(transport_, bytes); },
                                      .settle = environment_.settle},
              *environment_.plan) {}

void RankLink::Open(std::shared_ptr<RankStream> stream, SessionId session) {
  if (stream_ != nullptr) stream_->Cancel();
  KeepHeld();
  stream_ = std::move(stream);
  session_ = session;
  input_closed_ = false;
  parked_.clear();
  peer_ = stream_->peer();
  transport_ = stream_->transport();
  outbox_.Bind(stream_);
  outbox_.Open();
  if (held_promised_ > held_bytes_) outbox_.Credit(held_promised_ - held_bytes_);
  held_promised_ = 0;
}

void RankLink::Close(absl::Status status) {
  stream_->Finish(std::move(status));
  leaving_.push_back({stream_, MonotonicSeconds() + kLeaveS});
  outbox_.Unbind();
  parked_.clear();
  KeepHeld();
  stream_.reset();
}

void RankLink::CancelLate(double now_s) {
  for (const Leaving& l : leaving_) {
    if (now_s >= l.cancel_at_s) l.stream->Cancel();
  }
}

void RankLink::OnGone(const RankStream* stream) {
  std::erase_if(leaving_, [&](const Leaving& l) { return l.stream.get() == stream; });
}

void RankLink::KeepHeld() {
  for (auto& [id, payload] : held_) payload.Keep();
}

RankMessage RankLink::Unpark() {
  RankMessage message = std::move(parked_.front());
  parked_.pop_front();
  return message;
}

void RankLink::Hold(const ChunkId& id, Payload payload) {
  held_bytes_ += payload.size();
  held_[id] = std::move(payload);
}

Payload RankLink::TakeHeld(const ChunkId& id) {
  auto node = held_.extract(id);
  summing_bytes_ += node.mapped().size();
  return std::move(node.mapped());
}

void RankLink::OnSummed(SessionId session, uint64_t bytes) {
  held_bytes_ -= bytes;
  summing_bytes_ -= bytes;
  if (session == session_) outbox_.Credit(bytes);  // a later one has spent none of it
}

void RankLink::DropHeld() {
  outbox_.Credit(held_bytes_ - summing_bytes_);
  held_.clear();
  held_bytes_ = summing_bytes_;
}

bool RankLink::ShortOfCredit() const {
  const uint64_t chunk_bytes = environment_.spec->chunk_elements * sizeof(float);
  return held_bytes_ + chunk_bytes > environment_.spec->credit_bytes || stream_->full();
}

void RankLink::KeepComingState() {
  if (coming_state_) state_ = std::exchange(coming_state_, std::nullopt);
}

void RankLink::GoBackTo(std::optional<ClientState> state) {
  state_ = std::move(state);
  coming_state_.reset();
  held_promised_ = 0;
}

}  // namespace ballast
