// A run's link to one of its ranks: the stream of the rank's session, what the rank has sent that is not summed yet,
// what goes out to it, and the state that its client keeps with the run.
//
// A message that finds no room is parked, and so is what follows it. A payload is held in the memory that it came in
// until it may be summed, and a device has added it; its credit returns then. A stream that is over takes its memory
// with it, so what is held is copied first; what a device is adding goes when it has done so. It is told to end, and
// cancelled when it has not gone after a second.
//
// Strand-confined. It outlives neither the store nor the spec.
#pragma once

#include <cstdint>
#include <deque>
#include <functional>
#include <map>
#include <memory>
#include <optional>
#include <string>
#include <vector>

#include "absl/status/status.h"

#include "server/plan/plan.h"
#include "server/run/rank_outbox.h"
#include "server/run/rank_stream.h"
#include "server/spec/run_spec.h"
#include "server/step/client_state.h"
#include "server/step/payload.h"
#include "server/store/parameter_store.h"

namespace ballast {

class RankLink {
 public:
  struct Environment {
    const RunSpec* spec;
    const Plan* plan;
    ParameterStore* store;
    std::function<void(const std::string& transport, uint64_t bytes)> on_sent;  // payload of a weights chunk left
    std::function<void()> settle;                                               // the outbox could go on
  };
  explicit RankLink(Environment environment);
  RankLink(const RankLink&) = delete;
  RankLink& operator=(const RankLink&) = delete;

  // The stream takes the place of the one before, which is cancelled. Its client hears that it is open, and gets the
  // credit of what was summed since PromiseHeld.
  void Open(std::shared_ptr<RankStream> stream, SessionId session);
  // The stream is told to end with this status. What it brought stays; what was parked or queued for it does not.
  void Close(absl::Status status);
  // Cancels streams that were told to end and are late.
  void CancelLate(double now_s);
  void OnGone(const RankStream* stream);  // it has ended
  bool open() const { return stream_ != nullptr; }
  const std::shared_ptr<RankStream>& stream() const { return stream_; }
  SessionId session() const { return session_; }  // of the last stream
  // Who holds the rank, or held it last; empty: nobody, or who gave it back.
  void set_peer(std::string peer) { peer_ = std::move(peer); }
  const std::string& peer() const { return peer_; }
  const std::string& transport() const { return transport_; }  // of the last stream; empty: none yet

  // What comes in.
  void Park(RankMessage message) { parked_.push_back(std::move(message)); }
  RankMessage Unpark();  // the oldest; there is one
  const RankMessage* parked() const { return parked_.empty() ? nullptr : &parked_.front(); }
  size_t parked_messages() const { return parked_.size(); }
  void OnInputClosed() { input_closed_ = true; }  // the client has said all it will
  // Whether a payload of so many bytes may be held beside those that are.
  bool HasRoomFor(uint64_t bytes) const { return held_bytes_ + bytes <= environment_.plan->window_bytes; }
  void Hold(const ChunkId& id, Payload payload);
  // To be summed. It counts as held until OnSummed, which may be told after the session is over.
  Payload TakeHeld(const ChunkId& id);
  void OnSummed(SessionId session, uint64_t bytes);
  void DropHeld();  // but what is being summed
  uint64_t held_bytes() const { return held_bytes_; }
  bool summing() const { return summing_bytes_ > 0; }
  // The client is being told, with the answer to its attach, what is held now.
  void PromiseHeld() { held_promised_ = held_bytes_; }
  // The rank's next chunk may find no credit. Only of an open link.
  bool ShortOfCredit() const;

  // What goes out.
  RankOutbox& outbox() { return outbox_; }
  bool sending() const { return open() && !outbox_.idle(); }
  // The client has nothing more to say, and all that it is owed has been written.
  bool finished() const { return open() && input_closed_ && parked_.empty() && outbox_.idle(); }
  uint64_t buffer_bytes() const { return outbox_.buffer_bytes(); }

  // The client's state: what comes with the StepEnd of the open step is the rank's once that step has closed.
  void BringState(ClientState state) { coming_state_ = std::move(state); }
  void DropComingState() { coming_state_.reset(); }
  void KeepComingState();
  const std::optional<ClientState>& state() const { return state_; }
  // After a rewind: that of the snapshot, and nothing is promised to anyone.
  void GoBackTo(std::optional<ClientState> state);

 private:
  struct Leaving {
    std::shared_ptr<RankStream> stream;
    double cancel_at_s = 0;
  };

  // Copies what is held out of the stream's memory. Once in a while, so it may allocate.
  void KeepHeld();

  const Environment environment_;
  std::shared_ptr<RankStream> stream_;
  SessionId session_ = {};
  bool input_closed_ = false;
  std::string peer_, transport_;
  std::vector<Leaving> leaving_;    // told to end
  std::deque<RankMessage> parked_;  // a gradient that finds no room, and what follows it
  std::map<ChunkId, Payload> held_;
  uint64_t held_bytes_ = 0, summing_bytes_ = 0;  // the latter are among the former
  uint64_t held_promised_ = 0;                   // until the client's stream is open
  RankOutbox outbox_;
  std::optional<ClientState> coming_state_, state_;
};

}  // namespace ballast
