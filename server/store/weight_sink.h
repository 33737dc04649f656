// Where encoded weights go: the stream of a rank, or of who pulls them.
#pragma once

#include <cstdint>

#include "absl/status/status.h"

#include "server/store/weight_piece.h"

namespace ballast {

struct WeightsChunk {
  uint64_t step = 0;
  uint32_t tensor = 0;
  uint64_t chunk = 0;
  bool last = false;  // of the tensor that the rank receives
};

// An outgoing stream as its run sees it. Shared by its lane (until the call is over) and the run (until it has let go).
// Called on the strand.
class WeightSink {
 public:
  virtual ~WeightSink() = default;
  // Swaps the piece's data into the message and writes it, unless it is in the stream's memory already. One write at a
  // time, each answered once by OnWritten of the run, after which TakeBack swaps the memory back. False: the stream is
  // over, `piece` stays, no answer comes.
  virtual bool WriteWeights(const WeightsChunk& chunk, WeightPiece* piece) = 0;
  virtual void TakeBack(WeightPiece* piece) = 0;
  // Before a piece is encoded: memory of the stream's for it, if it wants it there. False: not now; Run::OnRoom says
  // when to ask again. Unlend: the piece was not written after all.
  virtual bool Lend(WeightPiece*) { return true; }
  virtual void Unlend(WeightPiece*) {}
  // Ends the stream. Later writes return false. Idempotent: the first status stands.
  virtual void Finish(absl::Status status) = 0;
  // Ends it at once, whatever the peer does.
  virtual void Cancel() = 0;
};

}  // namespace ballast
