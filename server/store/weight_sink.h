// Where encoded weights go: the stream of a rank, or that of a reader.
#pragma once

#include <cstdint>

#include "absl/status/status.h"

#include "server/store/state_slot.h"
#include "server/store/weight_piece.h"
#include "server/store/weight_series.h"

namespace ballast {

struct WeightsChunk {
  uint64_t step = 0;
  uint32_t tensor = 0;
  uint64_t chunk = 0;
  bool last = false;  // of the tensor that the rank, or the reader, receives
  StateSlot slot = StateSlot::kWeights;
  uint64_t updates = 0;  // of the slot kUpdates, which has no data
  WeightSeries series = {};
};

// What became of a write. kNow: it is out of the sender's hands, who takes the memory back and may write again. kLater:
// Run::OnWritten says when that is so; a reader's sink knows no other. kOver: the stream is over, what was to be written
// stays as it is, and no answer comes.
enum class Written { kNow, kLater, kOver };

// An outgoing stream as its run sees it. Shared by its transport (until the call is over) and the run (until it has let
// go). Called on the strand.
class WeightSink {
 public:
  virtual ~WeightSink() = default;
  // Swaps the sealed piece's data into a message, unless it is in the stream's memory already, and writes it. One write
  // at a time. TakeBack swaps the memory back.
  virtual Written WriteWeights(const WeightsChunk& chunk, WeightPiece* piece) = 0;
  virtual void TakeBack(WeightPiece* piece) = 0;
  // Whether several pieces may be written, of which only the first answers, before Flush; they are taken back in the same
  // order.
  virtual bool gathers() const { return false; }
  // What was written has been the last for now: until then a stream may hold it back, so that it goes out together.
  virtual void Flush() = 0;
  // Called before a piece is encoded: the stream lends its own memory for it, if it wants the piece there. `small`: it is
  // of a tensor that is (IsSentSmall). False: not now; Run::OnRoom says when to ask again. Unlend: the piece was not
  // written after all.
  virtual bool Lend(WeightPiece*, bool /*small*/) { return true; }
  virtual void Unlend(WeightPiece*) {}
  // Ends the stream. Later writes are kOver. Idempotent: the first status stands.
  virtual void Finish(absl::Status status) = 0;
  // Ends the stream at once, whatever the peer does.
  virtual void Cancel() = 0;
};

}  // namespace ballast
